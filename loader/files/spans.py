"""The documents in rows: spans from the `.idx` files, and the arrays that attention masks need.

A document's end comes from its index, never from token values. An index is checked against its
token file on first use, and is mapped, not loaded.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from loader.errors import FormatError
from loader.files.format import Manifest, ShardEntry, check_index
from loader.files.regular import regular
from loader.files.shard import INDEX_HEADER, IndexReader
from loader.files.tokens import claim, mapped, starts_of, unmap

IGNORE_INDEX = -100
Spans = Sequence[np.ndarray]


class DocumentIndex:
    """Document boundaries of all files of several sources. `is_known`: whether every file has an
    index. entries: the manifest and the entry of each file. file_starts: see `TokenFiles`. `fetch`
    copies the index of a file to this machine."""

    def __init__(
        self,
        manifests: Sequence[Manifest],
        fetch: Callable[[Manifest, ShardEntry], None] | None = None,
    ) -> None:
        self.entries = [(manifest, entry) for manifest in manifests for entry in manifest.shards]
        self.file_starts = starts_of([entry.num_tokens for _, entry in self.entries])
        # A directory without a manifest names no index.
        self.is_known = all(entry.index_path for _, entry in self.entries)

        self._fetch = fetch
        self._first = claim(self)

    def ends(self, file: int) -> np.ndarray:
        """Ends of a file's documents, counted from its first token: `<u8 [num_documents]`. Raises
        FormatError if the index is missing or malformed, or belongs to another file
        (E-INDEX-...)."""
        return mapped(self._first, file, self._map)

    def _map(self, file: int) -> np.ndarray:
        if self._fetch is not None:
            self._fetch(*self.entries[file])
        return _map_ends(*self.entries[file])

    def close(self) -> None:
        """Unmap all files; a later read maps them again."""
        unmap(self._first)

    def _file_at(self, position: int) -> int:
        return int(np.searchsorted(self.file_starts, position, "right")) - 1

    def documents(self, position: int, length: int) -> Iterator[tuple[int, int, int, int]]:
        """Every document with a token among the `length` tokens from `position` on: its file, and
        its number, start and end in the file. A document that is only partly in this range has its
        full span."""
        stop = position + length
        file = self._file_at(position)
        while (base := int(self.file_starts[file])) < stop:
            ends = self.ends(file)
            first = int(np.searchsorted(ends, np.uint64(max(0, position - base)), "right"))
            for i in range(first, len(ends)):
                start = int(ends[i - 1]) if i else 0
                if base + start >= stop:
                    break
                yield file, i, start, int(ends[i])
            file += 1

    def spans(self, position: int, length: int) -> np.ndarray:
        """Documents in the `length` tokens from `position` on: int64 `[num_documents, 2]`, counted
        from `position`. The first and the last may be parts of documents."""
        edges = [0]
        stop = position + length
        file = self._file_at(position)
        while edges[-1] < length:
            start = int(self.file_starts[file])
            ends = self.ends(file)
            first = int(np.searchsorted(ends, np.uint64(max(0, position - start)), "right"))
            last = int(np.searchsorted(ends, np.uint64(stop - start), "left"))
            edges += [int(end) + start - position for end in ends[first:last]]
            # Add the document that continues beyond the row, unless the row ends with the file.
            if last < len(ends):
                edges.append(length)
            file += 1
        return np.stack([edges[:-1], edges[1:]], axis=1)


def overlaps(spans: np.ndarray) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """A function from ranges of tokens, as two int64 `[n]` (starts and ends), to bool `[n]`:
    whether a range overlaps any of the spans, int64 `[num_spans, 2]`."""
    starts, stops = spans[np.argsort(spans[:, 0])].T
    # The furthest end of all spans up to each one; before the first span, the value is the smallest
    # integer.
    furthest = np.concatenate([[np.iinfo(np.int64).min], np.maximum.accumulate(stops)])

    def overlap(first: np.ndarray, end: np.ndarray) -> np.ndarray:
        return furthest[np.searchsorted(starts, end, "left")] > first

    return overlap


def cu_seqlens(spans: Spans, seq_len: int) -> np.ndarray:
    """Cumulative document lengths over all concatenated rows: int32 `[num_documents + 1]`.

    Variable-length attention kernels expect this form. The last value is `num_rows * seq_len`,
    since padding at the end of a row counts as a document.
    """
    edges = [np.append(row[:, 1] + i * seq_len, (i + 1) * seq_len) for i, row in enumerate(spans)]
    return np.unique(np.concatenate([[0], *edges])).astype(np.int32)


def position_ids(spans: Spans, seq_len: int) -> np.ndarray:
    """Position of each token in its document or part of a document: int64 `[num_rows, seq_len]`.

    Padding counts from 0 like a document.
    """
    edges = cu_seqlens(spans, seq_len).astype(np.int64)
    starts = np.repeat(edges[:-1], np.diff(edges))
    return (np.arange(len(starts)) - starts).reshape(len(spans), seq_len)


def document_ids(spans: Spans, seq_len: int) -> np.ndarray:
    """Number of each token's document in its row, -1 for padding: int64 `[num_rows, seq_len]`.

    Two tokens of a row may attend to each other if the numbers are equal and not -1.
    """
    found = np.full((len(spans), seq_len), -1, np.int64)
    for row, row_spans in zip(found, spans):
        for i, (start, end) in enumerate(row_spans.tolist()):
            row[start:end] = i
    return found


def attention_mask(document_ids: Any) -> Any:
    """An additive attention mask, causal and inside each document: float32 `[num_rows, 1, seq_len,
    seq_len]`, 0 or the lowest float32. Padding attends only to itself.

    Right for scaled_dot_product_attention and for models that add the mask to their scores (eager
    attention of transformers). document_ids: from the function of this name, as an array or as a
    tensor, on whose device the mask is made.
    """
    ids = document_ids[:, None, :]
    places = (ids >= -1).cumsum(-1)  # 1, 2, ... in each row
    is_same = (ids[..., None] == ids[..., None, :]) & (ids[..., None, :] != -1)
    is_before = places[..., None, :] < places[..., None]
    is_own = places[..., None, :] == places[..., None]
    return ~(is_same & is_before | is_own) * np.finfo(np.float32).min


def _map_ends(manifest: Manifest, entry: ShardEntry) -> np.ndarray:
    if not entry.index_path:
        raise FormatError(
            "the file has no index, so its document boundaries are unknown",
            where=manifest.shard_path(entry),
            do="build an index with `nmoe regenerate-index`, and name it in a manifest",
            code="E-INDEX-MISSING",
        )
    path = manifest.index_path(entry)
    check_index(IndexReader(path), entry)
    if not entry.num_documents:
        return np.empty(0, "<u8")
    body = np.memmap(regular(path), "<u8", "r", INDEX_HEADER.size, (entry.num_documents, 2))
    return np.asarray(body)[:, 1]
