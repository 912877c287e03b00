"""Computes backbone states of documents; training, calibration and grading all use this module.

Documents of similar length are padded on the right and run as one batch. Padding is recognised by
the lengths of documents, not by token values. A document fails if its states contain NaN or
infinity. If more than a few documents fail, an error is raised.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nmoe_core.engine import Residual, Transformer
from nmoe_core.quality.heads import PASS_TOKENS
from nmoe_core.quality.heads.scores import DocumentTokens

BATCH_DOCUMENTS = 64
CPU_TOKENS = 1024  # a batch whose activations fit into the cache is fastest
GPU_TOKENS = 16_384
States = dict[int, Tensor]  # by the number of the block: [B, T, H]


@dataclass(frozen=True, slots=True)
class Batch:
    """Documents padded together.

    `rows` are the positions of the batch's documents among all given documents; `input_ids` is
    int64 `[B, T]`, `lengths` int64 `[B]`.
    """

    rows: list[int]
    input_ids: Tensor
    lengths: Tensor

    def only(self, stays: list[int], states: States) -> tuple[States, Batch]:
        """Select the documents at positions `stays`, padded to the longest of them."""
        if len(stays) == len(self.rows):
            return states, self
        lengths = self.lengths[stays]
        longest = int(lengths.max()) if stays else 0
        kept = Batch([self.rows[i] for i in stays], self.input_ids[stays, :longest], lengths)
        return {n: hidden[stays, :longest].contiguous() for n, hidden in states.items()}, kept


def batches(
    documents: DocumentTokens,
    batch_size: int,
    device: torch.device,
    rows: Sequence[int] | None = None,
) -> Iterator[Batch]:
    """Batch documents by length, shortest first; documents of equal length keep their order. Takes
    the documents at `rows`, by default all. A batch has at most `batch_size` documents and
    `PASS_TOKENS` tokens with padding."""
    asked = range(len(documents)) if rows is None else rows
    order = sorted(asked, key=lambda i: len(documents.tokens[i]))
    lengths = [len(documents.tokens[i]) for i in order]
    for some in padded_batches(lengths, batch_size, PASS_TOKENS):
        yield collate(documents, order[some], device)


def small_batches(
    documents: DocumentTokens, device: torch.device, rows: Sequence[int]
) -> Iterator[Batch]:
    """Batches of the documents at `rows`, in this order, as `small_slices`."""
    lengths = [len(documents.tokens[i]) for i in rows]
    for some in small_slices(lengths, device):
        yield collate(documents, list(rows[some]), device)


def small_slices(lengths: Sequence[int] | np.ndarray, device: torch.device) -> Iterator[slice]:
    """Split documents with these lengths, in this order, into batches of the size that the device
    runs fastest."""
    most_tokens = CPU_TOKENS if device.type == "cpu" else GPU_TOKENS
    return padded_batches(lengths, BATCH_DOCUMENTS, most_tokens)


def padded_batches(
    lengths: Sequence[int] | np.ndarray, most_documents: int, most_tokens: int
) -> Iterator[slice]:
    """Split documents with these lengths, in this order, into batches of at most `most_documents`
    documents and `most_tokens` tokens with padding; a longer document forms one batch alone."""
    start = 0
    while start < len(lengths):
        stop = start
        longest = 0
        while stop < len(lengths) and stop - start < most_documents:
            longest = max(longest, int(lengths[stop]))
            if stop > start and longest * (stop - start + 1) > most_tokens:
                break
            stop += 1
        yield slice(start, stop)
        start = stop


def collate(documents: DocumentTokens, rows: list[int], device: torch.device) -> Batch:
    """Pad the documents at `rows` to the longest of them."""
    lengths = [len(documents.tokens[i]) for i in rows]
    input_ids = np.zeros((len(rows), max(lengths)), np.int64)
    for row, i in enumerate(rows):
        input_ids[row, : lengths[row]] = documents.tokens[i]
    ids = torch.from_numpy(input_ids).to(device)
    return Batch(rows, ids, torch.tensor(lengths, device=device))


def device_of(model: Transformer) -> torch.device:
    """The device that holds the backbone's weights."""
    return next(model.parameters()).device


def arithmetic(model: Transformer) -> str:
    """The backbone's weight dtype and kind of device, and the MoE backend if one is configured."""
    weights = next(model.parameters())
    way = model.runtime.experts.name
    return f"{weights.dtype} {weights.device.type} {way}".rstrip()


def is_batch_invariant(model: Transformer) -> bool:
    """Whether a document's states have the same bits in any batch: in float32 or int8, with the MKL
    of a CPU."""
    is_mkl = device_of(model).type == "cpu" and torch.backends.mkl.is_available()
    is_plain = model.runtime.experts.name in ("", "int8")
    return is_mkl and is_plain and next(model.parameters()).dtype == torch.float32


def finite_states(
    model: Transformer,
    batch: Batch,
    taps: Iterable[int],
    failed: dict[int, str],
    start: Residual | None = None,
) -> tuple[States, Batch]:
    """The residual stream after the blocks `taps`, of the documents whose states are all finite,
    and the batch of these documents.

    Non-finite values are counted before a mask, mean or clamp can hide them. For each document with
    non-finite states, the reason is added to `failed`, by row. If `start` is given, only the blocks
    after that residual run.
    """
    inputs = batch.input_ids if start is None else start
    _, states = model(inputs, batch.lengths, return_hidden_states=tuple(taps), no_logits=True)
    bad: set[int] = set()
    for tap, hidden in states.items():
        counts = count_nonfinite(hidden, batch.lengths).tolist()
        for i, count in enumerate(counts):
            if count and i not in bad:
                reason = f"backbone states after block {tap} are not finite: {count} values"
                failed[batch.rows[i]] = reason
                bad.add(i)
    return batch.only([i for i in range(len(batch.rows)) if i not in bad], states)


def position_mask(lengths: Tensor, num_positions: int) -> Tensor:
    """Whether a position belongs to its document: bool `[B, num_positions]`."""
    return torch.arange(num_positions, device=lengths.device) < lengths[:, None]


def count_nonfinite(hidden: Tensor, lengths: Tensor) -> Tensor:
    """Count NaN and infinite values per document, padding excluded: int64 `[B]`."""
    mask = position_mask(lengths, hidden.shape[1])
    return (~torch.isfinite(hidden) & mask[:, :, None]).sum(dim=(1, 2))


def pooled(hidden: Tensor, lengths: Tensor) -> Tensor:
    """Mean state per document, padding excluded, in float32: `[B, T, H]` to `[B, H]`. Each document
    is summed alone, so its row does not depend on the padding."""
    ends = lengths.tolist()
    means = [states[:end].float().mean(dim=0) for states, end in zip(hidden, ends)]
    return torch.stack(means) if means else hidden.new_zeros((0, hidden.shape[-1])).float()
