"""Removes paragraphs that an earlier place of the same split of a source has.

Paragraphs are equal if their words are; white space is ignored. The first paragraph in the order of
files and records is kept.
"""

from itertools import repeat
from typing import NamedTuple

import numpy as np

from nmoe_core.config.transforms import ParagraphsTable
from nmoe_core.text.transforms.batch import Batch
from nmoe_core.text.transforms.corpus import Keys, SharedKeys
from nmoe_core.text.transforms.edits import Edit
from nmoe_core.text.transforms.lines.cuts import cuts
from nmoe_core.text.transforms.lines.kernel import Lines, measure

RULE = "duplicate"


class _Paragraphs(NamedTuple):
    """The paragraphs of a batch that are long enough, in order."""

    lines: Lines
    texts: np.ndarray
    """int64: number of the text of each."""
    hashes: np.ndarray
    firsts: np.ndarray
    """int64: number of its first line."""
    lasts: np.ndarray


class Paragraphs:
    """The transform `paragraphs`; without `shared` it changes nothing."""

    def __init__(self, table: ParagraphsTable, shared: SharedKeys | None = None) -> None:
        self._table = table
        self._shared = shared

    def edits(self, batch: Batch) -> dict[int, list[Edit]]:
        """The paragraphs of each text that an earlier place has, by the number of the text."""
        if self._shared is None:
            return {}
        found = self._paragraphs(batch)
        owners = self._shared.find(found.hashes)
        is_own = owners == np.asarray(batch.rows, np.int64)[found.texts]
        own = np.flatnonzero(is_own)  # of these, the first in the text is kept
        is_kept = owners < 0
        pairs = np.stack([found.texts[own], found.hashes[own].astype(np.int64)])
        is_kept[own[np.unique(pairs, axis=1, return_index=True)[1]]] = True
        removed = np.flatnonzero(~is_kept)
        places = found.firsts[removed], found.lasts[removed]
        return dict(cuts(batch.texts, found.lines, *places, repeat(RULE)))

    def keys(self, batch: Batch) -> Keys:
        """A key of each paragraph that is long enough."""
        found = self._paragraphs(batch)
        return Keys(found.hashes, found.texts)

    def _paragraphs(self, batch: Batch) -> _Paragraphs:
        lines = measure(batch.payloads)
        solid = np.flatnonzero(lines.solid)
        texts = lines.texts_of(solid)
        is_first = np.ones(len(solid), np.bool_)
        if self._table.separator == "blank_line":
            is_first[1:] = (np.diff(solid) > 1) | (np.diff(texts) > 0)
        begins = np.flatnonzero(is_first)
        if not len(begins):
            return _Paragraphs(lines, texts, lines.hashes[:0], solid, solid)
        sizes = np.diff(begins, append=len(solid))
        # Odd factors make the sum depend on the order of the lines.
        numbers = np.arange(len(solid)) - np.repeat(begins, sizes)
        hashes = lines.hashes[solid] * (2 * numbers + 1).astype(np.uint64)
        chars = np.add.reduceat(lines.chars[solid], begins) + sizes - 1
        is_long = chars >= self._table.min_chars
        kept = begins[is_long]
        return _Paragraphs(
            lines,
            texts[kept],
            np.add.reduceat(hashes, begins)[is_long],
            solid[kept],
            solid[kept + sizes[is_long] - 1],
        )
