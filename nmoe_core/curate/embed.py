"""Shallow document embeddings: the mean of a document's rows of the backbone's embedding table.

No forward pass and no other model: tokens are counted, the counts weight the table's rows in fp32,
the mean is L2-normalised. The EOS is left out; a document of nothing else is the zero row. A row
depends only on its document, not on the block it was computed in. Memory is bounded by the blocks:
`block_tokens` tokens and `BLOCK_DOCUMENTS` rows, whatever the length of a document or shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nmoe_core.errors import CurationError

if TYPE_CHECKING:
    import torch

EMBEDDING = "shallow-mean-l2"
BLOCK_TOKENS = 2**20
BLOCK_DOCUMENTS = 4096


class EmbeddingTable:
    """A backbone's token embeddings, read on first use; share one object between shards.

    Args:
        backbone: Digest of the checkpoint the table comes from.
        load: Returns the table, fp32 `[vocab, hidden]`.
    """

    def __init__(self, backbone: str, load: Callable[[], Any]) -> None:
        self.backbone = backbone
        self._load = load

    @classmethod
    def open(cls, checkpoint: Path) -> EmbeddingTable:
        """The table of a checkpoint directory; only its digest is computed here."""
        from nmoe_core.engine.checkpoint import checkpoint_digest, load_embedding_table

        return cls(checkpoint_digest(checkpoint), partial(load_embedding_table, checkpoint))

    @cached_property
    def rows(self) -> torch.Tensor:
        """fp32 `[vocab, hidden]`.

        Raises:
            CurationError: The table is not two-dimensional (E-CURATION-EMBEDDING).
        """
        import torch

        rows = torch.as_tensor(self._load()).to(torch.float32).contiguous()
        if rows.ndim != 2:
            raise _refuse("not an embedding table", f"shape {tuple(rows.shape)}", "[vocab, hidden]")
        return rows


def embed_documents(
    tokens: np.ndarray,
    spans: np.ndarray,
    table: EmbeddingTable,
    *,
    block_tokens: int = BLOCK_TOKENS,
) -> Iterator[np.ndarray]:
    """Yield the embeddings of documents block by block, in order: float32 `[block, hidden]`.

    Args:
        tokens: uint32 `[num_tokens]`, a mapped shard.
        spans: int64 `[num_documents, 2]`: start and end, the EOS being the last token of each.
        table: The backbone's table.
        block_tokens: Most tokens counted at once.

    Raises:
        CurationError: A token has no row in the table, or a row is not finite
            (E-CURATION-EMBEDDING).
    """
    lengths = spans[:, 1] - spans[:, 0] - 1
    for first, stop in _blocks(lengths, block_tokens):
        block = spans[first:stop]
        if len(block) == 1 and lengths[first] > block_tokens:
            counted = _count_long(tokens[block[0, 0] : block[0, 1] - 1], block_tokens)
        else:
            counted = _count(tokens, block)
        yield _normalised_means(*counted, lengths[first:stop], table.rows)


def _blocks(lengths: np.ndarray, block_tokens: int) -> Iterator[tuple[int, int]]:
    """Ranges of consecutive documents of at most `block_tokens` together, or of one document."""
    ends = np.cumsum(lengths)
    first = 0
    while first < len(lengths):
        limit = int(ends[first] - lengths[first]) + block_tokens
        stop = int(np.searchsorted(ends, limit, side="right"))
        stop = min(max(stop, first + 1), first + BLOCK_DOCUMENTS)
        yield first, stop
        first = stop


def _count(tokens: np.ndarray, spans: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Distinct ids of each document, ascending, how often each occurs, and where each starts."""
    texts = [tokens[start : end - 1] for start, end in spans.tolist()]
    document = np.repeat(np.arange(len(texts)), [len(text) for text in texts])
    keys = (document << 32) + np.concatenate(texts)
    distinct, counts = np.unique(keys, return_counts=True)
    offsets = np.searchsorted(distinct, np.arange(len(texts)) << 32)
    return distinct & (2**32 - 1), counts, offsets


def _count_long(text: np.ndarray, block_tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """As `_count` for one document, `block_tokens` at a time."""
    counts = np.zeros(int(text.max()) + 1, np.int64)
    for start in range(0, len(text), block_tokens):
        counts += np.bincount(text[start : start + block_tokens], minlength=len(counts))
    ids = np.flatnonzero(counts)
    return ids, counts[ids], np.zeros(1, np.int64)


def _normalised_means(
    ids: np.ndarray,
    counts: np.ndarray,
    offsets: np.ndarray,
    lengths: np.ndarray,
    rows: torch.Tensor,
) -> np.ndarray:
    import torch

    if len(ids) and int(ids.max()) >= len(rows):
        raise _refuse("token has no row in the table", int(ids.max()), f"below {len(rows)}")
    sums = torch.nn.functional.embedding_bag(
        torch.from_numpy(ids),
        rows,
        torch.from_numpy(offsets),
        mode="sum",
        per_sample_weights=torch.from_numpy(counts.astype(np.float32)),
    ).numpy()
    means = sums / np.maximum(lengths, 1).astype(np.float32)[:, None]
    norms = np.sqrt(np.sum(np.square(means, dtype=np.float64), axis=1))
    if not np.isfinite(norms).all():
        document = int(np.flatnonzero(~np.isfinite(norms))[0])
        raise _refuse("embedding is not finite", f"norm {norms[document]}", "finite table rows")
    return (means / np.where(norms > 0, norms, 1)[:, None]).astype(np.float32)


def _refuse(what: str, found: object, expected: str) -> CurationError:
    return CurationError(
        what,
        where="shallow embedding",
        found=found,
        expected=expected,
        do="use the backbone checkpoint that belongs to the tokenizer",
        code="E-CURATION-EMBEDDING",
    )
