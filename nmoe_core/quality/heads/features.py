"""Computes backbone states of documents; training, calibration and grading all use this module.

Documents of similar length are padded on the right and run as one batch. Padding is recognised by
the lengths of documents, not by token values. A document fails if its states contain NaN or
infinity. If more than a few documents fail, an error is raised.

Pooled states of training documents are cached on disk in parts (11.5 kB per document at 2,880
dimensions), so the next training needs no backbone pass. States at every position are cached in
memory if they fit.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from nmoe_core.base.arrays import map_npy
from nmoe_core.base.atomic import write_bytes
from nmoe_core.engine import Residual, Transformer
from nmoe_core.quality.heads.scores import DocumentTokens, require_few_failed

FEATURE_BATCH = 32
PART_DOCUMENTS = 2048


@dataclass(frozen=True, slots=True)
class Batch:
    """Documents padded together.

    `rows` are the positions of the batch's documents among all given documents; `input_ids` is
    int64 `[B, T]`, `lengths` int64 `[B]`.
    """

    rows: list[int]
    input_ids: Tensor
    lengths: Tensor

    def only(self, stays: list[int], hidden: Tensor) -> tuple[Tensor, Batch]:
        """Select the documents at positions `stays`, padded to the longest of them."""
        if len(stays) == len(self.rows):
            return hidden, self
        lengths = self.lengths[stays]
        longest = int(lengths.max()) if stays else 0
        kept = Batch([self.rows[i] for i in stays], self.input_ids[stays, :longest], lengths)
        return hidden[stays, :longest].contiguous(), kept


def batches(
    documents: DocumentTokens,
    batch_size: int,
    device: torch.device,
    rows: Sequence[int] | None = None,
) -> Iterator[Batch]:
    """Batch documents by length, shortest first; documents of equal length keep their order. Takes
    the documents at `rows`, by default all."""
    asked = range(len(documents)) if rows is None else rows
    order = sorted(asked, key=lambda i: len(documents.tokens[i]))
    for start in range(0, len(order), batch_size):
        yield collate(documents, order[start : start + batch_size], device)


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


def finite_states(
    model: Transformer,
    batch: Batch,
    tap: int,
    failed: dict[int, str],
    start: Residual | None = None,
) -> tuple[Tensor, Batch]:
    """The residual stream after block `tap`, `[B, T, H]`, of the documents whose states are all
    finite, and the batch of these documents.

    Non-finite values are counted before a mask, mean or clamp can hide them. For each document with
    non-finite states, the reason is added to `failed`, by row. If `start` is given, only the blocks
    after that residual run.
    """
    inputs = batch.input_ids if start is None else start
    _, states = model(inputs, batch.lengths, return_hidden_states=(tap,), no_logits=True)
    counts = count_nonfinite(states[tap], batch.lengths).tolist()
    for row, count in zip(batch.rows, counts):
        if count:
            failed[row] = f"backbone states after block {tap} are not finite: {count} values"
    return batch.only([i for i, count in enumerate(counts) if count == 0], states[tap])


def position_mask(lengths: Tensor, num_positions: int) -> Tensor:
    """Whether a position belongs to its document: bool `[B, num_positions]`."""
    return torch.arange(num_positions, device=lengths.device) < lengths[:, None]


def count_nonfinite(hidden: Tensor, lengths: Tensor) -> Tensor:
    """Count NaN and infinite values per document, padding excluded: int64 `[B]`."""
    mask = position_mask(lengths, hidden.shape[1])
    return (~torch.isfinite(hidden) & mask[:, :, None]).sum(dim=(1, 2))


def pooled(hidden: Tensor, lengths: Tensor) -> Tensor:
    """Mean state per document, padding excluded, in float32: `[B, T, H]` to `[B, H]`."""
    mask = position_mask(lengths, hidden.shape[1])[:, :, None]
    # Use `where`: if the padding holds NaN, multiplying by zero would give NaN.
    total = torch.where(mask, hidden.float(), 0.0).sum(dim=1)
    return total / lengths[:, None]


def pooled_features(model: Transformer, documents: DocumentTokens, tap: int, cache: Path) -> Tensor:
    """Pooled states after block `tap`: float32 `[N, H]` on the backbone's device.

    Rows of documents whose states are not finite are NaN. Complete parts are read from the
    directory `cache`; the others are computed and written there. The directory is named by a digest
    of the inputs. Raises HeadError if more than a few documents have states that are not finite
    (E-HEAD-NONFINITE).
    """
    parts = []
    for number, start in enumerate(range(0, len(documents), PART_DOCUMENTS)):
        path = cache / f"part_{number:06d}.npy"
        some = documents[start : start + PART_DOCUMENTS]
        try:
            part = map_npy(path)
        except (FileNotFoundError, ValueError):  # not there yet, or damaged
            part = np.full((len(some), model.config.hidden_size), np.nan, np.float32)
            for batch in batches(some, FEATURE_BATCH, device_of(model)):
                states, good = finite_states(model, batch, tap, {})
                part[good.rows] = pooled(states, good.lengths).cpu()
            payload = io.BytesIO()
            np.save(payload, part, allow_pickle=False)
            write_bytes(path, payload.getvalue())
        parts.append(part)
    features = torch.from_numpy(np.concatenate(parts))
    bad: list[int] = torch.nonzero(~torch.isfinite(features).all(dim=1)).flatten().tolist()
    reason = f"backbone states after block {tap} are not finite"
    require_few_failed({documents.names[i]: reason for i in bad}, len(documents))
    return features.to(device_of(model))


class TapStates:
    """States after block `tap`, for any rows of the training documents.

    They are cached in memory if they take at most `cache_bytes`, else computed on each use.
    `lengths` counts the tokens of each document; `failed` maps the id of each excluded document to
    the reason.
    """

    def __init__(
        self, model: Transformer, documents: DocumentTokens, tap: int, cache_bytes: int
    ) -> None:
        self._model = model
        self._documents = documents
        self._tap = tap
        self.failed: dict[str, str] = {}
        self.lengths = [len(tokens) for tokens in documents.tokens]
        self.is_cached = 4 * model.config.hidden_size * sum(self.lengths) <= cache_bytes
        self._kept: dict[int, Tensor] = {}
        if self.is_cached:
            for batch in batches(documents, FEATURE_BATCH, device_of(model)):
                states, _, rows = self._compute(batch)
                for i, state in zip(rows, states):
                    self._kept[i] = state[: self.lengths[i]].float().clone()

    def of(self, rows: list[int]) -> tuple[Tensor, Tensor, list[int]]:
        """States `[B, T, H]` padded with zeros, lengths `[B]`, and their rows. Raises HeadError if
        more than a few documents so far have states that are not finite (E-HEAD-NONFINITE)."""
        device = device_of(self._model)
        if not self.is_cached:
            return self._compute(collate(self._documents, rows, device))
        rows = [i for i in rows if i in self._kept]
        lengths = torch.tensor([self.lengths[i] for i in rows], device=device)
        if not rows:
            return torch.empty(0, 1, self._model.config.hidden_size), lengths, rows
        return pad_sequence([self._kept[i] for i in rows], batch_first=True), lengths, rows

    def _compute(self, batch: Batch) -> tuple[Tensor, Tensor, list[int]]:
        failed: dict[int, str] = {}
        states, good = finite_states(self._model, batch, self._tap, failed)
        self.failed |= {self._documents.names[i]: reason for i, reason in failed.items()}
        require_few_failed(self.failed, len(self._documents))
        return states, good.lengths, good.rows
