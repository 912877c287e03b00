"""Shallow document embeddings: the mean of a document's rows of the backbone's embedding table.

No forward pass and no other model: rows are summed in fp32 over runs of `SEGMENT_TOKENS`, runs in
fp64, and the mean is L2-normalised. The EOS is left out; a document without text is the zero
row. A row depends only on its document, not on the block it was computed in. Memory is bounded by
the blocks: `block_tokens` tokens and `BLOCK_DOCUMENTS` rows, whatever the length of a document.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nmoe_core.base.errors import CurationError
from nmoe_core.curate.topics.embedding_table import PROJECTION, read_table, table_digest

if TYPE_CHECKING:
    import torch

EMBEDDING = "shallow-mean-l2"
DEFAULT_WIDTH = 256
BLOCK_TOKENS = 2**20
BLOCK_DOCUMENTS = 4096
SEGMENT_TOKENS = 2048


class EmbeddingTable:
    """A backbone's token embeddings, read on first use; share one object between shards.

    Args:
        backbone: Digest of the table.
        load: Returns the table, fp32 `[vocab, width]`.
        max_width: Width that `load` projects wider tables to; 0 where it never does.
    """

    def __init__(self, backbone: str, load: Callable[[], Any], max_width: int = 0) -> None:
        self.backbone = backbone
        self.method = f"{EMBEDDING}/{PROJECTION}-{max_width}" if max_width else EMBEDDING
        self._load = load

    @classmethod
    def open(cls, checkpoint: Path, max_width: int = DEFAULT_WIDTH) -> EmbeddingTable:
        """The table of a checkpoint directory; only its digest is computed here.

        Args:
            checkpoint: Safetensors checkpoint, Hugging Face or `original/` names.
            max_width: Wider tables are projected to it, once; 0 keeps the full width.
        """
        load = partial(read_table, checkpoint, max_width)
        return cls(table_digest(checkpoint), load, max_width)

    @cached_property
    def rows(self) -> torch.Tensor:
        """fp32 `[vocab, width]`.

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
    """Yield the embeddings of documents block by block, in order: float32 `[block, width]`.

    Args:
        tokens: uint32 `[num_tokens]`, a mapped shard.
        spans: int64 `[num_documents, 2]`: start and end, the EOS being the last token of each.
        table: The backbone's table.
        block_tokens: Most tokens pooled at once.

    Raises:
        CurationError: A token has no row in the table, or a row is not finite
            (E-CURATION-EMBEDDING).
    """
    lengths = spans[:, 1] - spans[:, 0] - 1
    for run in runs_within(lengths, block_tokens, BLOCK_DOCUMENTS):
        texts = [tokens[start : end - 1] for start, end in spans[run].tolist()]
        yield pool(texts, table.rows, block_tokens=block_tokens)


def pool(
    texts: Sequence[np.ndarray], rows: torch.Tensor, *, block_tokens: int = BLOCK_TOKENS
) -> np.ndarray:
    """L2-normalised mean rows of token sequences: float32 `[N, width]`, zero for empty ones.

    Args:
        texts: Token ids of each document, without EOS.
        rows: fp32 `[vocab, width]`.
        block_tokens: Most ids gathered at once, in whole segments; longer texts go in pieces.

    Raises:
        CurationError: As `embed_documents`.
    """
    lengths = np.array([len(text) for text in texts], np.int64)
    step = max(1, block_tokens // SEGMENT_TOKENS) * SEGMENT_TOKENS
    sums = np.zeros((len(texts), rows.shape[1]), np.float64)
    for document in np.flatnonzero(lengths > step).tolist():
        text = texts[document]
        for start in range(0, len(text), step):
            sums[document] += _segment_sums([text[start : start + step]], rows)[0]
    short = np.flatnonzero((lengths > 0) & (lengths <= step))
    if len(short):
        sums[short] = _segment_sums([texts[i] for i in short.tolist()], rows)
    return _normalised(sums / np.maximum(lengths, 1)[:, None])


def runs_within(lengths: np.ndarray, most: int, count: int) -> Iterator[slice]:
    """Consecutive items, at most `count` and `most` in length together, or one longer item."""
    ends = np.cumsum(lengths)
    first = 0
    while first < len(lengths):
        limit = int(ends[first] - lengths[first]) + most
        stop = int(np.searchsorted(ends, limit, side="right"))
        stop = min(max(stop, first + 1), first + count)
        yield slice(first, stop)
        first = stop


def _segment_sums(texts: list[np.ndarray], rows: torch.Tensor) -> np.ndarray:
    """Sums of the rows of texts that are not empty: float64 `[N, width]`."""
    import torch

    ids = np.concatenate(texts, dtype=np.uint32, casting="unsafe")
    if int(ids.max()) >= len(rows):
        raise _refuse("token has no row in the table", int(ids.max()), f"below {len(rows)}")
    lengths = np.array([len(text) for text in texts], np.int64)
    num_segments = -(-lengths // SEGMENT_TOKENS)
    first_segment = np.cumsum(num_segments) - num_segments
    rank = np.arange(int(num_segments.sum())) - np.repeat(first_segment, num_segments)
    offsets = np.repeat(np.cumsum(lengths) - lengths, num_segments) + rank * SEGMENT_TOKENS
    # Checked ids fit 31 bits: the same bytes as int32 save a copy.
    segments = torch.nn.functional.embedding_bag(
        torch.from_numpy(ids.view(np.int32)),
        rows,
        torch.from_numpy(offsets.astype(np.int32)),
        mode="sum",
    ).numpy()
    sums = segments[first_segment].astype(np.float64)
    later = np.flatnonzero(rank)
    np.add.at(sums, np.repeat(np.arange(len(texts)), num_segments)[later], segments[later])
    return sums


def _normalised(means: np.ndarray) -> np.ndarray:
    norms = np.sqrt(np.sum(np.square(means), axis=1))
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
