"""Finds the sequences that read given documents, in one pass over the plan."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from loader.rows.documents import each_source, input_runs
from loader.rows.origins import Place
from loader.rows.stream import Stream


class Readings(NamedTuple):
    """The sequences whose inputs include a token of a document."""

    first: int
    last: int
    num: int


def readings_of(stream: Stream, places: Sequence[Place]) -> dict[Place, Readings]:
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
    for source, numbers, windows in each_source(stream, 0, stream.num_sequences if known else 0):
        at, positions, stops, _ = input_runs(stream, source, windows)
        low = np.searchsorted(ends, positions, side="right")
        held = np.searchsorted(starts, stops, side="left") - low
        rows = np.repeat(numbers[at], held)
        inside = np.arange(len(rows)) - np.repeat(np.cumsum(held) - held, held)
        documents = np.repeat(low, held) + inside
        pairs = np.unique(
            np.stack([rows, documents]), axis=1
        )  # a row can contain two pieces of one document
        for row, document in pairs.T.tolist():
            firsts[document] = min(firsts[document], row)
            lasts[document] = max(lasts[document], row)
            counts[document] += 1
    read = zip(order.tolist(), firsts.tolist(), lasts.tolist(), counts.tolist())
    return {known[i]: Readings(*found) for i, *found in read if found[2]}
