"""Which documents are in each row of a best-fit packed stream.

All documents are packed once when the data is opened, to count rows; that takes about a second per
million documents. Packed blocks are kept, some 18 bytes per document, up to `MAX_KEPT_BLOCKS`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from loader.errors import FormatError
from loader.files.format import Manifest
from loader.files.spans import DocumentIndex
from loader.order.packing import BLOCK_DOCUMENTS, Bins, pack

MAX_KEPT_BLOCKS = 512


class Row(NamedTuple):
    """Pieces of documents, in order: their positions, their lengths, and whether each ends its
    document."""

    starts: list[int]
    lengths: list[int]
    is_end: list[bool]


class PackedRows:
    """Rows of a best-fit packed stream.

    Args:
        manifests: One per source.
        index: Their documents.
        seq_len: Tokens of a row.

    Attributes:
        capacities: Rows of each source.
        row_tokens: uint32 `[num_rows]` of each source, tokens of documents in each row.

    Raises:
        FormatError: A source has no index, or an index is not of its file (E-INDEX-...).
    """

    def __init__(self, manifests: Sequence[Manifest], index: DocumentIndex, seq_len: int) -> None:
        if not index.is_known():
            raise FormatError(
                "packing by documents needs an index of each file",
                where=next(m.path for m in manifests if any(not e.index_path for e in m.shards)),
                do='prepare the data with a manifest, or set packing = "concat"',
                code="E-INDEX-MISSING",
            )
        self._index, self._seq_len = index, seq_len
        counts = [entry.num_documents for manifest in manifests for entry in manifest.shards]
        self._first_document = np.array([0, *accumulate(counts)], np.int64)
        self._kept: dict[int, Bins] = {}
        self._lock = threading.Lock()  # a prefetch thread reads rows, the caller asks for spans
        totals = [0, *accumulate(manifest.total_documents for manifest in manifests)]
        # Documents of each block, and on one axis of rows where each block and source starts.
        self._blocks: list[tuple[int, int]] = []
        first_block = [0]
        for start, stop in pairwise(totals):
            cuts = [*range(start, stop, BLOCK_DOCUMENTS), stop]
            self._blocks += pairwise(cuts)
            first_block.append(len(self._blocks))
        tokens = [_row_tokens(self._block(i)) for i in range(len(self._blocks))]
        self._block_starts = np.array([0, *accumulate(map(len, tokens))], np.int64)
        self._source_starts = self._block_starts[first_block]
        self.capacities: list[int] = np.diff(self._source_starts).tolist()
        all_tokens = np.concatenate([np.empty(0, np.uint32), *tokens])
        self.row_tokens: list[np.ndarray] = np.split(all_tokens, self._source_starts[1:-1])

    def holders(self, source: int, position: int, stop: int) -> Callable[[np.ndarray], np.ndarray]:
        """See `loader.rows.windows.WindowReader.holders`."""
        first, last = self._source_starts[source : source + 2].tolist()
        blocks = range(*np.searchsorted(self._block_starts, [first, last]).tolist())
        found = []
        for block in blocks:
            with self._lock:
                bins = self._block(block)
            is_held = (bins.starts < stop) & (position < bins.starts + bins.lengths)
            rows = np.searchsorted(bins.rows, np.flatnonzero(is_held), "right") - 1
            found.append(int(self._block_starts[block]) - first + rows)
        held = np.concatenate([np.empty(0, np.int64), *found])
        return lambda windows: np.isin(windows, held)

    def rows(self, sources: np.ndarray, windows: np.ndarray) -> Iterator[Row]:
        """The rows of some windows: int64 `[num_rows]` each."""
        rows = self._source_starts[sources] + windows
        blocks = np.searchsorted(self._block_starts, rows, "right") - 1
        inside = rows - self._block_starts[blocks]
        for block, row in zip(blocks.tolist(), inside.tolist()):
            with self._lock:
                bins = self._block(block)
            pieces = slice(bins.rows[row], bins.rows[row + 1])
            columns = (bins.starts, bins.lengths, bins.is_end)
            yield Row(*(column[pieces].tolist() for column in columns))

    def _block(self, block: int) -> Bins:
        found = self._kept.pop(block, None)
        if found is None:
            if len(self._kept) >= MAX_KEPT_BLOCKS:
                del self._kept[next(iter(self._kept))]
            found = pack(self._document_spans(*self._blocks[block]), self._seq_len)
        self._kept[block] = found
        return found

    def _document_spans(self, first: int, last: int) -> np.ndarray:
        """Spans on the axis of positions of documents `[first, last)` of all sources."""
        parts, starts = [], self._first_document
        file = int(np.searchsorted(starts, first, "right")) - 1
        while first < last:
            a, b = first - int(starts[file]), min(last, int(starts[file + 1])) - int(starts[file])
            ends = self._index.ends(file)
            edges = np.zeros(b - a + 1, np.int64)
            edges[0] = ends[a - 1] if a else 0
            edges[1:] = ends[a:b]
            edges += self._index.file_starts[file]
            parts.append(np.stack([edges[:-1], edges[1:]], axis=1))
            first, file = first + b - a, file + 1
        return np.concatenate(parts) if parts else np.empty((0, 2), np.int64)


def _row_tokens(bins: Bins) -> np.ndarray:
    """Tokens of documents in each row: uint32 `[num_bins]`."""
    ends = np.concatenate([[0], np.cumsum(bins.lengths)])
    return np.diff(ends[bins.rows]).astype(np.uint32)
