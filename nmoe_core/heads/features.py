"""Documents to backbone states: the one path that training, calibration and grading share.

A document is seen as its first `max_ctx` tokens without the EOS. Documents are batched by length
inside a bounded buffer and padded on the right; results come back in the order of the documents.
Padding is told by lengths, never by a token's value. States that are not finite are counted before
any mask, mean or clamp could hide them, and fail their document; many such documents are an error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from nmoe_core.base.errors import HeadError
from nmoe_core.engine.packing import Residual
from nmoe_core.shards.documents import DocumentReader

BUFFER_BATCHES = 16
MAX_FAILED = 10
MAX_FAILED_SHARE = 0.01


class BackboneShape(Protocol):
    """The two numbers of a backbone's configuration that heads depend on."""

    @property
    def num_hidden_layers(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...


class Backbone(Protocol):
    """The part of `nmoe_core.engine.Transformer` that heads need."""

    @property
    def config(self) -> BackboneShape: ...

    @property
    def digest(self) -> str: ...

    @property
    def tokens_processed(self) -> int: ...

    def parameters(self) -> Iterator[Tensor]: ...

    def __call__(
        self,
        input_ids: Tensor | Residual,
        lengths: Tensor | None = None,
        *,
        return_hidden_states: tuple[int, ...] = (),
        up_to_layer: int | None = None,
        no_logits: bool = False,
    ) -> tuple[Tensor | None, Mapping[int, Tensor]]: ...


@dataclass(frozen=True, slots=True)
class Batch:
    """Documents padded together.

    `rows` are their positions in the buffer they came from; `input_ids` is int64 `[B, T]`,
    `lengths` int64 `[B]`, `names` the document ids.
    """

    rows: list[int]
    input_ids: Tensor
    lengths: Tensor
    names: list[str]


def read_documents(
    reader: DocumentReader, doc_ids: Sequence[str], eos_token_id: int, max_ctx: int
) -> list[np.ndarray]:
    """The tokens of documents that the backbone sees: uint32 `[1..max_ctx]` each.

    A document of nothing but its EOS is seen as that one token.
    """
    documents = []
    for doc_id in doc_ids:
        tokens = reader.tokens(doc_id, eos_token_id)[:max_ctx]
        documents.append(tokens if len(tokens) else np.array([eos_token_id], np.uint32))
    return documents


def content_digests(documents: Sequence[np.ndarray]) -> np.ndarray:
    """64 bits of the SHA-256 of each document's tokens as the heads see them: int64 `[N]`."""
    digests = [hashlib.sha256(np.asarray(tokens, "<u4").tobytes()).digest() for tokens in documents]
    return np.array([int.from_bytes(d[:8], "little", signed=True) for d in digests], np.int64)


def buffers(doc_ids: Sequence[str], max_batch: int) -> Iterator[Sequence[str]]:
    """Consecutive runs of documents that are sorted by length and scored together."""
    size = max_batch * BUFFER_BATCHES
    for start in range(0, len(doc_ids), size):
        yield doc_ids[start : start + size]


def batches(
    documents: Sequence[np.ndarray], names: Sequence[str], max_batch: int, device: torch.device
) -> Iterator[Batch]:
    """Batches of documents of similar length, shortest first; ties keep their order."""
    order = sorted(range(len(documents)), key=lambda i: len(documents[i]))
    for start in range(0, len(order), max_batch):
        yield collate(documents, names, order[start : start + max_batch], device)


def collate(
    documents: Sequence[np.ndarray], names: Sequence[str], rows: list[int], device: torch.device
) -> Batch:
    """Pad the documents at `rows` to the longest of them."""
    lengths = [len(documents[i]) for i in rows]
    input_ids = np.zeros((len(rows), max(lengths)), np.int64)
    for row, i in enumerate(rows):
        input_ids[row, : lengths[row]] = documents[i]
    return Batch(
        rows=rows,
        input_ids=torch.from_numpy(input_ids).to(device),
        lengths=torch.tensor(lengths, device=device),
        names=[names[i] for i in rows],
    )


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one CPU thread inside: the order of a sum, and so a last digit, may else change.

    Work on several cores is for several processes, each with its own shards.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def device_of(model: Backbone) -> torch.device:
    """Where the backbone's weights are."""
    return next(iter(model.parameters())).device


def tap_states(model: Backbone, batch: Batch, tap: int) -> tuple[Tensor, Tensor]:
    """Residual after block `tap`: `[B, T, H]`, and how many of its values are not finite: `[B]`."""
    # Not inference mode: these states enter the autograd graph of a head in training.
    with torch.no_grad():
        _, hidden = model(
            batch.input_ids,
            batch.lengths,
            return_hidden_states=(tap,),
            up_to_layer=tap,
            no_logits=True,
        )
    return hidden[tap], count_nonfinite(hidden[tap], batch.lengths)


def position_mask(lengths: Tensor, num_positions: int) -> Tensor:
    """Whether a position belongs to its document: bool `[B, num_positions]`."""
    return torch.arange(num_positions, device=lengths.device) < lengths[:, None]


def count_nonfinite(hidden: Tensor, lengths: Tensor) -> Tensor:
    """NaN and infinite values in each document's own states: int64 `[B]`."""
    mask = position_mask(lengths, hidden.shape[1])
    return (~torch.isfinite(hidden) & mask[:, :, None]).sum(dim=(1, 2))


def require_few_failed(failed: Mapping[str, str], num_documents: int) -> None:
    """Refuse when more documents failed than can be put down to the documents themselves.

    Args:
        failed: Reason by document id.
        num_documents: Of which so many were tried.

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
