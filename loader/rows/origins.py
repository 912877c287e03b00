"""Finds the documents of a sequence of the stream, and the sequences of a document.

Combines the positions of rows with the index files: no token is read and no step is replayed. Both
results are pure functions of the plan, like the stream.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from loader.rows.stream import Stream

_SCAN = 1 << 20  # number of sequences located together


class Origin(NamedTuple):
    """A document, or a part of one, in the inputs of a row.

    path: the token file. document: number of the document in the file. start, end: its tokens in
    the file, end exclusive and past the EOS. first, stop: the part of these tokens that is in the
    row. row_start: position of `first` in the row.
    """

    path: Path
    document: int
    start: int
    end: int
    first: int
    stop: int
    row_start: int


class RowOrigins(NamedTuple):
    """The source, windows and documents of one sequence of the stream."""

    sequence: int
    source: str
    window: int
    documents: list[Origin]


def origins(stream: Stream, n: int) -> RowOrigins:
    """The documents of global sequence `n`, in the order of its tokens. Raises IndexError if `n` is
    out of range, and FormatError if an index is missing or does not match its file
    (E-INDEX-...)."""
    sources, windows = stream.schedule.locate(n, n + 1)
    source = int(sources[0])
    window = int(windows[0])
    found = []
    row_start = 0
    paths = stream.files.paths()
    for position, length in stream.reader.pieces(source, window):
        for file, document, start, end in stream.index.documents(position, length):
            base = int(stream.index.file_starts[file])
            first = max(start, position - base)
            stop = min(end, position + length - base)
            path = paths[file]
            found.append(Origin(path, document, start, end, first, stop, row_start))
            row_start += stop - first
    return RowOrigins(n, stream.source_names[source], window, found)


class Place(NamedTuple):
    """Tokens `[start, end)` of a token file of a source."""

    source: str
    path: Path
    start: int
    end: int


def readings(stream: Stream, places: Iterable[Place], stop: int | None = None) -> Iterator[int]:
    """The global sequences among the first `stop` whose inputs contain a token of any of these
    places, in ascending order. Tests every sequence, about 10 million per second. Raises ValueError
    if the stream does not read one of the files."""
    number = {path: i for i, path in enumerate(stream.files.paths())}
    spans: dict[int, list[tuple[int, int]]] = {}
    for place in places:
        if place.path not in number:
            raise ValueError(f"the stream does not read {place.path}")
        base = int(stream.index.file_starts[number[place.path]])
        column = stream.source_names.index(place.source)
        spans.setdefault(column, []).append((base + place.start, base + place.end))
    tests = [(c, stream.reader.holders(c, np.array(own, np.int64))) for c, own in spans.items()]
    last = stream.num_sequences if stop is None else min(stop, stream.num_sequences)
    for n in range(0, last, _SCAN):
        sources, windows = stream.schedule.locate(n, min(n + _SCAN, last))
        is_held = np.zeros(len(sources), np.bool_)
        for column, holds in tests:
            of_source = np.flatnonzero(sources == column)
            is_held[of_source] = holds(windows[of_source])
        yield from (n + np.flatnonzero(is_held)).tolist()
