"""The documents of many rows at once, by number: what `loader.rows.origins` finds for one row.

The documents of a source are numbered from 0, in the order of its files. Memory: 8 bytes for each
document of the sources that are asked for.
"""

from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

import numpy as np

from loader.rows.stream import Stream

_CHUNK = 1 << 17  # number of sequences located together


class RowDocuments(NamedTuple):
    """Parts of documents in rows, int64 `[n]` each, ascending by row: the place of the row among
    the rows that were asked for, the number of the document in its source, and its number of tokens
    in the inputs of the row. A document that a row has twice, since its source wraps inside the
    row, is listed once, with the sum."""

    rows: np.ndarray
    documents: np.ndarray
    tokens: np.ndarray


class DocumentFile(NamedTuple):
    """A token file of a source: its number in the stream, and the numbers of its documents,
    `[first, stop)`."""

    number: int
    first: int
    stop: int


class DocumentTable:
    """The documents of a stream. Raises FormatError if an index is missing or does not match its
    file (E-INDEX-...), when a source is asked for."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self._edges: dict[int, np.ndarray] = {}
        entries = enumerate(stream.index.entries)
        grouped = groupby(entries, lambda row: id(row[1][0]))  # by the manifest, so by the source
        self._files = [[file for file, _ in rows] for _, rows in grouped]

    def files(self, source: int) -> list[DocumentFile]:
        """The token files of a source, in order."""
        found = []
        start = 0
        for file in self._files[source]:
            stop = start + len(self.stream.index.ends(file))
            found.append(DocumentFile(file, start, stop))
            start = stop
        return found

    def edges(self, source: int) -> np.ndarray:
        """Positions on the axis of tokens: the start of each document of a source, and the end of
        the last one: int64 `[num_documents + 1]`."""
        if source not in self._edges:
            index = self.stream.index
            parts = [self.stream.files.source_starts[source : source + 1]]
            for file, *_ in self.files(source):
                parts.append(index.ends(file).astype(np.int64) + index.file_starts[file])
            self._edges[source] = np.concatenate(parts)
        return self._edges[source]

    def of_rows(self, source: int, windows: np.ndarray) -> RowDocuments:
        """The documents in the inputs of windows of a source: int64 `[n]`, as `locate` has them."""
        edges = self.edges(source)
        rows, starts, stops, wraps = input_runs(self.stream, source, windows)
        first = np.searchsorted(edges, starts, "right") - 1
        counts = np.searchsorted(edges, stops, "left") - first
        run = np.repeat(np.arange(len(rows)), counts)
        before = np.cumsum(counts) - counts
        documents = first[run] + np.arange(len(run)) - before[run]
        tokens = np.minimum(stops[run], edges[documents + 1])
        tokens -= np.maximum(starts[run], edges[documents])
        has_tokens = tokens > 0
        found = RowDocuments(rows[run][has_tokens], documents[has_tokens], tokens[has_tokens])
        return _merged(found, len(edges)) if wraps else found

    def each(self, start: int, stop: int) -> Iterator[tuple[int, np.ndarray, RowDocuments]]:
        """Sequences `[start, stop)` of the stream, some of one source at a time: the source, their
        numbers (int64, ascending), and their documents."""
        for source, numbers, windows in each_source(self.stream, start, stop):
            yield source, numbers, self.of_rows(source, windows)

    def before(self, source: int) -> Iterator[RowDocuments]:
        """The documents of the windows of a source that another run read before the plan."""
        passed = int(self.stream.schedule.passed[source])
        for n in range(0, passed, _CHUNK):
            windows = self.stream.schedule.windows_of(source, n, min(n + _CHUNK, passed))
            yield self.of_rows(source, windows)


def each_source(
    stream: Stream, start: int, stop: int
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Sequences `[start, stop)` of a stream, some of one source at a time: the source, their
    numbers (ascending) and their windows: int64 `[n]` each."""
    for n in range(start, stop, _CHUNK):
        sources, windows = stream.schedule.locate(n, min(n + _CHUNK, stop))
        for source in np.flatnonzero(np.bincount(sources)).tolist():
            rows = np.flatnonzero(sources == source)
            yield source, n + rows, windows[rows]


def input_runs(
    stream: Stream, source: int, windows: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, bool]:
    """Row, start and end of each contiguous run of inputs of windows of a source, int64 `[n]` each,
    and whether a row wraps: then rows are not in order."""
    first, end = stream.files.source_starts[source : source + 2].tolist()
    rows, starts, stops = stream.reader.input_runs(source, windows)
    parts = []
    while (over := stops > end).any():  # once, unless the source is shorter than a row
        parts.append((rows, starts, np.minimum(stops, end)))
        rows = rows[over]
        stops = first + stops[over] - end
        starts = np.full(len(rows), first)
    if not parts:
        return rows, starts, stops, False
    rows, starts, stops = map(np.concatenate, zip(*parts, (rows, starts, stops)))
    return rows, starts, stops, True


def _merged(found: RowDocuments, num_documents: int) -> RowDocuments:
    keys, place = np.unique(found.rows * num_documents + found.documents, return_inverse=True)
    tokens = np.zeros(len(keys), np.int64)
    np.add.at(tokens, place, found.tokens)
    rows, documents = np.divmod(keys, num_documents)
    return RowDocuments(rows, documents, tokens)
