"""Finds the sequences that read given documents, in one pass over the plan."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from loader.rows.origins import Place
from loader.rows.stream import Stream
from loader.rows.windows import WindowReader

_SCAN = 1 << 18  # sequences per block


class Readings(NamedTuple):
    """The sequences whose inputs include a token of a document."""

    first: int
    last: int
    num: int


def readings_of(stream: Stream, seq_len: int, places: Sequence[Place]) -> dict[Place, Readings]:
    """Readings of documents by the train stream of a plan, without documents that the stream never
    reads.

    A document is read if its tokens are inputs, as in `nmoe explain`. Checks all sequences of the
    plan, about 5 million per second if rows are windows, for any number of documents.
    """
    files = {path: number for number, path in enumerate(stream.files.paths())}
    known = [place for place in places if place.path in files]
    bases = stream.files.file_starts
    starts = np.array([bases[files[one.path]] + one.start for one in known], np.int64)
    ends = np.array([bases[files[one.path]] + one.end for one in known], np.int64)
    order = np.argsort(starts)
    starts = starts[order]
    ends = ends[order]
    lasts = np.full(len(known), -1, np.int64)
    counts = np.zeros(len(known), np.int64)
    firsts = np.full(len(known), stream.num_sequences, np.int64)
    for sequences, positions, lengths in _pieces(stream, seq_len) if known else ():
        low = np.searchsorted(ends, positions, side="right")
        numbers = np.searchsorted(starts, positions + lengths, side="left") - low
        rows = np.repeat(sequences, numbers)
        inside = np.arange(len(rows)) - np.repeat(np.cumsum(numbers) - numbers, numbers)
        documents = np.repeat(low, numbers) + inside
        pairs = np.unique(
            np.stack([rows, documents]), axis=1
        )  # a row can contain two pieces of one document
        for row, document in pairs.T.tolist():
            firsts[document] = min(firsts[document], row)
            lasts[document] = max(lasts[document], row)
            counts[document] += 1
    read = zip(order.tolist(), firsts.tolist(), lasts.tolist(), counts.tolist())
    return {known[i]: Readings(*found) for i, *found in read if found[2]}


def _pieces(stream: Stream, seq_len: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Contiguous input tokens, as sequence, position and length: int64 `[n]` each."""
    reader = stream.reader
    for n in range(0, stream.num_sequences, _SCAN):
        sources, windows = stream.schedule.locate(n, min(n + _SCAN, stream.num_sequences))
        sequences = n + np.arange(len(sources))
        if isinstance(reader, WindowReader):
            positions, lengths = reader.extents(sources, windows)
            # the remaining windows wrap around the end of their source
            is_whole = lengths > seq_len
            yield sequences[is_whole], positions[is_whole], lengths[is_whole] - 1
            left = np.flatnonzero(~is_whole).tolist()
            found = [(i, reader.pieces(int(sources[i]), int(windows[i]))) for i in left]
        else:
            rows = reader.rows(sources, windows)
            found = [(i, list(zip(*row[:2]))) for i, row in enumerate(rows)]
        flat = [(n + i, *piece) for i, pieces in found for piece in pieces]
        yield tuple(np.array(flat, np.int64).reshape(-1, 3).T)  # pyright: ignore[reportReturnType]
