"""Documents to backbone states: the one path that training, calibration and grading share.

The heads see the first `max_ctx` tokens of a document, without the EOS. Documents of similar length
are padded on the right and run together. Lengths say what is padding, never a token's value. A
document with states that are not finite fails; more than a few of those are an error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nmoe_core.base.errors import HeadError
from nmoe_core.engine import Residual, Transformer
from nmoe_core.shards.documents import DocumentReader

BUFFER_BATCHES = 16
MAX_FAILED = 10
MAX_FAILED_SHARE = 0.01


@dataclass(frozen=True, slots=True)
class DocumentTokens:
    """Documents as the heads see them: their ids, and their tokens, uint32 `[1..max_ctx]` each."""

    names: Sequence[str]
    tokens: Sequence[np.ndarray]

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, rows: slice) -> DocumentTokens:
        return DocumentTokens(self.names[rows], self.tokens[rows])

    def digests(self) -> np.ndarray:
        """64 bits of the SHA-256 of each document's tokens: int64 `[N]`."""
        found = [hashlib.sha256(np.asarray(tokens, "<u4").tobytes()) for tokens in self.tokens]
        bits = [int.from_bytes(d.digest()[:8], "little", signed=True) for d in found]
        return np.array(bits, np.int64)


@dataclass(frozen=True, slots=True)
class Corpus:
    """Token shards below `data_root`, and how much of a document the heads see."""

    data_root: Path
    eos_token_id: int
    max_ctx: int

    def read(self, doc_ids: Sequence[str]) -> DocumentTokens:
        """Documents by id; raises as `DocumentReader.tokens`."""
        reader, eos = DocumentReader(self.data_root), self.eos_token_id
        tokens = [as_seen(reader.tokens(doc_id, eos), eos, self.max_ctx) for doc_id in doc_ids]
        return DocumentTokens(doc_ids, tokens)


def as_seen(tokens: np.ndarray, eos_token_id: int, max_ctx: int) -> np.ndarray:
    """The part of a document that heads see; of an empty one they see the EOS."""
    return tokens[:max_ctx] if len(tokens) else np.array([eos_token_id], np.uint32)


@dataclass(frozen=True, slots=True)
class Batch:
    """Documents padded together.

    `rows` are their positions in the documents they came from; `input_ids` is int64 `[B, T]`,
    `lengths` int64 `[B]`.
    """

    rows: list[int]
    input_ids: Tensor
    lengths: Tensor

    def only(self, stays: list[int], hidden: Tensor) -> tuple[Tensor, Batch]:
        """States and batch of some of the documents, padded to the longest of them."""
        if len(stays) == len(self.rows):
            return hidden, self
        lengths = self.lengths[stays]
        longest = int(lengths.max()) if stays else 0
        kept = Batch([self.rows[i] for i in stays], self.input_ids[stays, :longest], lengths)
        return hidden[stays, :longest].contiguous(), kept


def batches(documents: DocumentTokens, max_batch: int, device: torch.device) -> Iterator[Batch]:
    """Batches of documents of similar length, shortest first; ties keep their order."""
    order = sorted(range(len(documents)), key=lambda i: len(documents.tokens[i]))
    for start in range(0, len(order), max_batch):
        yield collate(documents, order[start : start + max_batch], device)


def collate(documents: DocumentTokens, rows: list[int], device: torch.device) -> Batch:
    """Pad the documents at `rows` to the longest of them."""
    lengths = [len(documents.tokens[i]) for i in rows]
    input_ids = np.zeros((len(rows), max(lengths)), np.int64)
    for row, i in enumerate(rows):
        input_ids[row, : lengths[row]] = documents.tokens[i]
    ids = torch.from_numpy(input_ids).to(device)
    return Batch(rows, ids, torch.tensor(lengths, device=device))


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one CPU thread inside, so that sums have one order and results equal bytes.

    Several cores are for several processes, each with its own shards.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def device_of(model: Transformer) -> torch.device:
    """Where the backbone's weights are."""
    return next(model.parameters()).device


def arithmetic(model: Transformer) -> str:
    """What the backbone computes with: the type of its weights, and the kind of device."""
    weights = next(model.parameters())
    return f"{weights.dtype} {weights.device.type}"


def finite_states(
    model: Transformer,
    batch: Batch,
    tap: int,
    failed: dict[int, str],
    start: Residual | None = None,
) -> tuple[Tensor, Batch]:
    """Residual after block `tap`, `[B, T, H]`, of the documents in which it is finite, and those.

    Values are counted before any mask, mean or clamp could hide them; `failed` gets the reason of
    each other document, by its row. From `start`, only the blocks after that residual run.
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
    """NaN and infinite values in each document's own states: int64 `[B]`."""
    mask = position_mask(lengths, hidden.shape[1])
    return (~torch.isfinite(hidden) & mask[:, :, None]).sum(dim=(1, 2))


def require_few_failed(failed: Mapping[str, str], num_documents: int) -> None:
    """Refuse when so many of `num_documents` failed that the documents cannot be the cause.

    `failed` has the reason of each by document id.

    Raises:
        HeadError: All failed, or more than ten and one in a hundred (E-HEAD-NONFINITE).
    """
    allowed = min(max(MAX_FAILED, MAX_FAILED_SHARE * num_documents), num_documents - 1)
    if len(failed) <= allowed:
        return
    name, reason = next(iter(failed.items()))
    raise HeadError(
        reason,
        where=name,
        found=f"{len(failed)} of {num_documents} documents failed like this or alike",
        expected=f"at most {int(allowed)}",
        do="check the checkpoint, or run the backbone in float32",
        code="E-HEAD-NONFINITE",
    )


def pooled(hidden: Tensor, lengths: Tensor) -> Tensor:
    """Mean of a document's own states, in float32: `[B, T, H]` to `[B, H]`."""
    mask = position_mask(lengths, hidden.shape[1])[:, :, None]
    # Selected, not multiplied: padding times zero would let a NaN through.
    total = torch.where(mask, hidden.float(), 0.0).sum(dim=1)
    return total / lengths[:, None]
