"""Best-fit packing of documents into rows of `seq_len` tokens; reads only the index.

Best fit decreasing (Johnson 1973; for pre-training: Ding et al. 2024, "Fewer Truncations Improve
Language Modeling") over blocks of `BLOCK_DOCUMENTS` consecutive documents of a source, so only one
block is in memory, and documents change their order only within a block. A document of at most
`seq_len` tokens (its EOS counted) is never cut; a longer one fills complete rows and its rest is
packed. The bins of a block are in the order of their first documents. Costs about a microsecond per
document: once when the data are opened, to count rows, and again when the run reaches each block.

If rows are cropped (nanochat's best-fit cropping), they have no padding and each document begins in
one row only: a document that does not fit is cut off at the row's end, and its rest is in no row.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from loader.errors import FormatError
from loader.files.format import Manifest
from loader.files.spans import DocumentIndex, overlaps

# Number of packed blocks in the cache: about 18 bytes per document.
MAX_KEPT_BLOCKS = 512
BLOCK_DOCUMENTS = 1 << 14
# Pieces of a row in order: positions, lengths, and whether a piece ends its document.
Row = tuple[list[int], list[int], list[bool]]


class Bins(NamedTuple):
    """Packed rows of one block of documents.

    starts, lengths: int64 [num_pieces], the pieces of documents in the order of rows; starts count
    from the same position as the document spans. is_end: bool [num_pieces], whether the piece ends
    its document. rows: int64 [num_bins + 1], start of each row's pieces, and their end.
    """

    starts: np.ndarray
    lengths: np.ndarray
    is_end: np.ndarray
    rows: np.ndarray

    @property
    def num_bins(self) -> int:
        """Number of rows."""
        return len(self.rows) - 1


def pack(spans: np.ndarray, seq_len: int, crops: bool = False) -> Bins:
    """Pack a block of documents into rows of `seq_len` tokens. spans: int64 `[num_documents, 2]`,
    start and end of each document, end exclusive. crops: see `best_fit_cropped`."""
    if crops:
        bins, lengths = best_fit_cropped(spans[:, 1] - spans[:, 0], seq_len)
        document = np.flatnonzero(bins >= 0)
        bins = bins[document]
        lengths = lengths[document]
        starts = spans[document, 0]
    else:
        # Pieces of at most `seq_len` tokens, in order: their document, start and length.
        counts = -(-(spans[:, 1] - spans[:, 0]) // seq_len)
        document = np.repeat(np.arange(len(spans)), counts)
        nth = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
        starts = spans[document, 0] + nth * seq_len
        lengths = np.minimum(seq_len, spans[document, 1] - starts)
        bins = best_fit_decreasing(lengths, seq_len)
    is_end = starts + lengths == spans[document, 1]
    num_bins = int(bins.max()) + 1 if len(bins) else 0
    # Rows in the order of their first piece; pieces in the order of the data within a row, a
    # cropped one last.
    _, first = np.unique(bins, return_index=True)
    rank = np.empty(num_bins, np.int64)
    rank[np.argsort(first, kind="stable")] = np.arange(num_bins)
    order = np.lexsort((~is_end, rank[bins]))
    per_row = np.bincount(rank[bins], minlength=num_bins)
    return Bins(
        starts=starts[order],
        lengths=lengths[order],
        is_end=is_end[order],
        rows=np.concatenate([[0], np.cumsum(per_row)]),
    )


def best_fit_decreasing(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """The bin of each item: int64, numbered in the order in which bins are opened.

    Items are placed from the longest to the shortest (ties: the earlier item), each into the
    fullest bin with room for it (ties: the bin that reached this room last), else into a new bin.
    Lengths are positive and at most `capacity`.
    """
    found = [0] * len(lengths)
    order = np.argsort(-lengths, kind="stable")
    # with_room[r] has the bins with room for r tokens. Bit r of `occupied` says whether
    # with_room[r] has a bin, so that the smallest sufficient room is the lowest set bit of a
    # shifted integer.
    with_room: dict[int, list[int]] = {}
    occupied = num_bins = 0
    for item, length in zip(order.tolist(), lengths[order].tolist()):
        above = occupied >> length
        if above:
            room = length + (above & -above).bit_length() - 1
            stack = with_room[room]
            chosen = stack.pop()
            if not stack:
                occupied ^= 1 << room
        else:
            room = capacity
            chosen = num_bins
            num_bins += 1
        found[item] = chosen
        left = room - length
        if left:
            stack = with_room.setdefault(left, [])
            if not stack:
                occupied |= 1 << left
            stack.append(chosen)
    return np.array(found, np.int64)


def best_fit_cropped(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """The bin of each item, and its length there: int64 each; bin -1 of an item that is in none.

    Bins are filled one after the other: with the longest item that fits and, if none fits, with the
    beginning of the shortest item that is left (ties: the earlier item). The items of a last bin
    that is not full are in no bin. Lengths are positive.
    """
    found = np.full(len(lengths), -1)
    used = lengths.copy()
    # From the longest to the shortest item, the earlier of two last, so that it is taken first.
    order = np.lexsort((-np.arange(len(lengths)), -lengths))
    of_length: dict[int, list[int]] = {}  # items that fit into a bin
    too_long = []
    occupied = 0  # bit n says whether an item of length n is left
    for item, length in zip(order.tolist(), lengths[order].tolist()):
        if length > capacity:
            too_long.append(item)
        else:
            of_length.setdefault(length, []).append(item)
            occupied |= 1 << length
    room = capacity
    chosen = 0
    while occupied or too_long:
        fitting = occupied & ((2 << room) - 1)
        if occupied:
            length = (fitting or occupied & -occupied).bit_length() - 1
            items = of_length[length]
            item = items.pop()
            if not items:
                occupied ^= 1 << length
        else:
            item = too_long.pop()
            length = room
        found[item] = chosen
        used[item] = length = min(length, room)
        room -= length
        if not room:
            room = capacity
            chosen += 1
    found[found == chosen] = -1
    return found, used


class PackedRows:
    """Assigns documents to the rows of a best-fit packed stream; the constructor packs all
    documents. If `crops`, rows have no padding; see `best_fit_cropped`.

    capacities: rows of each source. row_tokens: uint32 `[num_rows]` of each source, tokens of
    documents in each row. Raises FormatError if a source has no index, or an index does not match
    its file (E-INDEX-...).
    """

    def __init__(
        self, manifests: Sequence[Manifest], index: DocumentIndex, seq_len: int, crops: bool = False
    ) -> None:
        if not index.is_known:
            raise FormatError(
                "packing by documents needs an index of each file",
                where=next(m.path for m in manifests if any(not e.index_path for e in m.shards)),
                do='prepare the data with a manifest, or set packing = "concat"',
                code="E-INDEX-MISSING",
            )
        counts = [entry.num_documents for manifest in manifests for entry in manifest.shards]
        first_document = np.array([0, *accumulate(counts)], np.int64)
        totals = [0, *accumulate(manifest.total_documents for manifest in manifests)]
        # First and last document of each block, and the start of each block and source on one axis
        # of rows.
        documents: list[tuple[int, int]] = []
        first_block = [0]
        for start, stop in pairwise(totals):
            cuts = [*range(start, stop, BLOCK_DOCUMENTS), stop]
            documents += pairwise(cuts)
            first_block.append(len(documents))

        def bins(block: int) -> Bins:
            spans = _document_spans(index, first_document, *documents[block])
            return pack(spans, seq_len, crops)

        # lru_cache is thread-safe; another lock could be held while the process forks.
        self._bins = lru_cache(MAX_KEPT_BLOCKS)(bins)
        blocks = (self._bins(i) for i in range(len(documents)))
        tokens = [np.add.reduceat(b.lengths, b.rows[:-1]).astype(np.uint32) for b in blocks]
        self._block_starts = np.array([0, *accumulate(map(len, tokens))], np.int64)
        self._source_starts = self._block_starts[first_block]
        self.capacities: list[int] = np.diff(self._source_starts).tolist()
        all_tokens = np.concatenate([np.empty(0, np.uint32), *tokens])
        self.row_tokens: list[np.ndarray] = np.split(all_tokens, self._source_starts[1:-1])

    def holders(self, source: int, spans: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
        """See `loader.rows.windows.WindowReader.holders`."""
        overlap = overlaps(spans)
        first, last = self._source_starts[source : source + 2].tolist()
        blocks = range(*np.searchsorted(self._block_starts, [first, last]).tolist())
        found = []
        for block in blocks:
            bins = self._bins(block)
            is_held = overlap(bins.starts, bins.starts + bins.lengths)
            rows = np.searchsorted(bins.rows, np.flatnonzero(is_held), "right") - 1
            found.append(int(self._block_starts[block]) - first + rows)
        held = np.concatenate([np.empty(0, np.int64), *found])
        return lambda windows: np.isin(windows, held)

    def rows(self, sources: np.ndarray, windows: np.ndarray) -> Iterator[Row]:
        """The pieces of documents in each row; sources, windows: int64 `[num_rows]`."""
        rows = self._source_starts[sources] + windows
        blocks = np.searchsorted(self._block_starts, rows, "right") - 1
        inside = rows - self._block_starts[blocks]
        for block, row in zip(blocks.tolist(), inside.tolist()):
            bins = self._bins(block)
            pieces = slice(bins.rows[row], bins.rows[row + 1])
            starts = bins.starts[pieces].tolist()
            lengths = bins.lengths[pieces].tolist()
            yield starts, lengths, bins.is_end[pieces].tolist()


def _document_spans(index: DocumentIndex, starts: np.ndarray, first: int, last: int) -> np.ndarray:
    """Spans on the axis of positions of documents `[first, last)` of all sources;
    `starts`: the first document of each file."""
    parts = []
    file = int(np.searchsorted(starts, first, "right")) - 1
    while first < last:
        a = first - int(starts[file])
        b = min(last, int(starts[file + 1])) - int(starts[file])
        ends = index.ends(file)
        edges = np.zeros(b - a + 1, np.int64)
        edges[0] = ends[a - 1] if a else 0
        edges[1:] = ends[a:b]
        edges += index.file_starts[file]
        parts.append(np.stack([edges[:-1], edges[1:]], axis=1))
        first = first + b - a
        file = file + 1
    return np.concatenate(parts) if parts else np.empty((0, 2), np.int64)
