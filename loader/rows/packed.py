"""Rows of best-fit packed documents: inputs, targets and spans.

A row holds whole documents one after another and then padding. Inputs are padded with the EOS
token; targets are the next token of the same document, and `IGNORE_INDEX` (-100, what PyTorch's
cross entropy leaves out) at each document's last token and at padding. So every token but the first
of its document is predicted once, and none from another document.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise

import numpy as np

from loader.errors import FormatError
from loader.files.format import Manifest
from loader.files.spans import IGNORE_INDEX, DocumentIndex
from loader.files.tokens import TokenFiles
from loader.rows.packing import BLOCK_DOCUMENTS, Bins, pack

# Packed blocks that are kept: some 18 bytes a document.
MAX_KEPT_BLOCKS = 512


class PackedReader:
    """Rows of a best-fit packed stream.

    All documents are packed once when the data is opened, to count rows; that takes about a second
    a million documents.

    Args:
        manifests: One per source.
        files: Their tokens.
        index: Their documents.
        seq_len: Tokens of a row.
        pad_token_id: What padding holds in inputs.

    Attributes:
        capacities: Rows of each source.
        row_tokens: uint32 `[num_rows]` of each source, tokens of documents in each row.

    Raises:
        FormatError: A source has no index, or an index is not of its file (E-INDEX-...).
    """

    def __init__(
        self,
        manifests: Sequence[Manifest],
        files: TokenFiles,
        index: DocumentIndex,
        seq_len: int,
        pad_token_id: int,
    ) -> None:
        self._files, self._index, self._seq_len = files, index, seq_len
        self._pad_token_id = pad_token_id
        self._file_starts: list[int] = files.file_starts.tolist()
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

    def read(
        self, sources: np.ndarray, windows: np.ndarray, inputs: np.ndarray, targets: np.ndarray
    ) -> None:
        """Fill rows.

        Args:
            sources, windows: int64 `[num_rows]`, what each row is.
            inputs, targets: `[num_rows, seq_len]` of a signed integer type.
        """
        starts_of, tokens_of = self._file_starts, self._files.tokens
        for row, (starts, lengths, is_end) in enumerate(self._rows(sources, windows)):
            at, row_inputs, row_targets = 0, inputs[row], targets[row]
            for start, length, ends in zip(starts, lengths, is_end):
                file = bisect_right(starts_of, start) - 1
                offset = start - starts_of[file]
                # With the token after it where the document goes on in another row.
                tokens = tokens_of(file)[offset : offset + length + (not ends)]
                row_inputs[at : at + length] = tokens[:length]
                row_targets[at : at + len(tokens) - 1] = tokens[1:]
                at += length
                if ends:
                    row_targets[at - 1] = IGNORE_INDEX
            row_inputs[at:], row_targets[at:] = self._pad_token_id, IGNORE_INDEX

    def spans(self, sources: np.ndarray, windows: np.ndarray) -> tuple[np.ndarray, ...]:
        """Documents of each row: int64 `[num_documents, 2]`; padding is in none."""
        found = []
        for _, lengths, _ in self._rows(sources, windows):
            edges = [0, *accumulate(lengths)]
            found.append(np.stack([edges[:-1], edges[1:]], axis=1))
        return tuple(found)

    def pieces(self, source: int, window: int) -> list[tuple[int, int]]:
        """Position and length of each document's tokens in a row."""
        ((starts, lengths, _),) = self._rows(np.array([source]), np.array([window]))
        return list(zip(starts, lengths))

    def holders(self, source: int, position: int, stop: int) -> Callable[[np.ndarray], np.ndarray]:
        """See `loader.rows.stream.Stream.holders`."""
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

    def _rows(
        self, sources: np.ndarray, windows: np.ndarray
    ) -> Iterator[tuple[list[int], list[int], list[bool]]]:
        rows = self._source_starts[sources] + windows
        blocks = np.searchsorted(self._block_starts, rows, "right") - 1
        inside = rows - self._block_starts[blocks]
        for block, row in zip(blocks.tolist(), inside.tolist()):
            with self._lock:
                bins = self._block(block)
            pieces = slice(bins.rows[row], bins.rows[row + 1])
            yield (
                bins.starts[pieces].tolist(),
                bins.lengths[pieces].tolist(),
                bins.is_end[pieces].tolist(),
            )

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
            edges += self._files.file_starts[file]
            parts.append(np.stack([edges[:-1], edges[1:]], axis=1))
            first, file = first + b - a, file + 1
        return np.concatenate(parts) if parts else np.empty((0, 2), np.int64)


def _row_tokens(bins: Bins) -> np.ndarray:
    """Tokens of documents in each row: uint32 `[num_bins]`."""
    ends = np.concatenate([[0], np.cumsum(bins.lengths)])
    return np.diff(ends[bins.rows]).astype(np.uint32)


def require_index(index: DocumentIndex, manifests: Sequence[Manifest]) -> None:
    """Refuse packing by documents where they are not known. Raises FormatError."""
    if not index.is_known():
        raise FormatError(
            "packing by documents needs an index of each file",
            where=next(m.path for m in manifests if any(not e.index_path for e in m.shards)),
            do='prepare the data with a manifest, or set packing = "concat"',
            code="E-INDEX-MISSING",
        )
