"""The positions of a sentence in token files, and the documents that have it."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np

from loader.rows.origins import Place
from nmoe_core.audit.seen.index_files import Part


class Occurrence(NamedTuple):
    """Tokens `[start, end)` of a token file that spell the sentence."""

    part: Part
    start: int
    end: int

    @property
    def document(self) -> int:
        """Number, in the file, of the document of the occurrence."""
        return int(np.searchsorted(self.part.file.spans[:, 1], self.start, "right"))


class Spans(NamedTuple):
    """The occurrences in a part of an index, as arrays, since a short text may have millions.

    tokens: start and end of each occurrence in the token file, ascending: int64 `[n, 2]`.
    """

    part: Part
    tokens: np.ndarray

    @property
    def num_documents(self) -> int:
        """Number of documents with an occurrence. A part holds complete documents, so no document
        is counted twice."""
        ends = self.part.file.spans[:, 1]
        return len(np.unique(np.searchsorted(ends, self.tokens[:, 0], "right")))

    def places(self, source: str) -> Iterator[Place]:
        """Merged token ranges of a source of the plan: occurrences that overlap or touch are one
        place."""
        if not len(self.tokens):
            return
        starts = self.tokens[:, 0]
        ends = np.maximum.accumulate(self.tokens[:, 1])
        cuts = np.flatnonzero(starts[1:] > ends[:-1]) + 1
        first = np.append(0, cuts)
        last = np.append(cuts, len(starts)) - 1
        path = self.part.token_file
        for start, end in zip(starts[first].tolist(), ends[last].tolist()):
            yield Place(source, path, start, end)


def occurrences(found: Iterable[Spans], most: int | None = None) -> list[Occurrence]:
    """The first `most` occurrences, by default all."""
    each = (Occurrence(part, *own) for part, tokens in found for own in tokens[:most].tolist())
    return list(islice(each, most))
