"""Removes passages that an earlier document of the same split of a source has.

A passage is at least `min_words` consecutive equal words; case, spacing and punctuation are
ignored. The first document in the order of files and records keeps it. From each other document,
the passage goes with what stands between its words and before the next one.
"""

from collections.abc import Sequence

import numpy as np

from nmoe_core.config.transforms import PassagesTable
from nmoe_core.text.transforms.batch import Batch
from nmoe_core.text.transforms.corpus import Keys, SharedKeys
from nmoe_core.text.transforms.edits import Edit
from nmoe_core.text.transforms.search import column_of
from nmoe_core.text.transforms.words.hashes import Words, windows, words

RULE = "passage"


class Passages:
    """The transform `passages`; without `shared` it changes nothing."""

    def __init__(self, table: PassagesTable, shared: SharedKeys | None = None) -> None:
        self._size = table.min_words
        self._shared = shared

    def edits(self, batch: Batch) -> dict[int, list[Edit]]:
        """The passages of each text that an earlier document has, by the number of the text."""
        if self._shared is None:
            return {}
        found, starts = _words(batch.payloads)
        places, texts = self._windows(found)
        owners = self._shared.find(windows(found.hashes, self._size)[places])
        rows = np.asarray(batch.rows, np.int64)[texts]
        removed = np.flatnonzero((owners >= 0) & (owners != rows))
        offsets = np.cumsum([0, *map(len, batch.payloads)])
        edits = {}
        for i in np.unique(texts[removed]).tolist():
            own = places[removed[slice(*np.searchsorted(texts[removed], (i, i + 1)))]]
            begins, ends = _joined(own, self._size)
            stops = starts[np.minimum(ends, found.bounds[-1] - 1)]
            stops[ends == found.bounds[i + 1]] = offsets[i + 1]
            spans = np.stack([starts[begins], stops], axis=1) - offsets[i]
            edits[i] = _cuts(batch.payloads[i], spans)
        return edits

    def keys(self, batch: Batch) -> Keys:
        """A key of each window of words."""
        found, _ = _words(batch.payloads)
        places, texts = self._windows(found)
        return Keys(windows(found.hashes, self._size)[places], texts)

    def _windows(self, found: Words) -> tuple[np.ndarray, np.ndarray]:
        """First word of each window that is in one text, and the number of the text."""
        counts = np.maximum(0, np.diff(found.bounds) - self._size + 1)
        texts = np.repeat(np.arange(len(counts)), counts)
        within = np.arange(len(texts)) - np.repeat(np.cumsum(counts) - counts, counts)
        return found.bounds[texts] + within, texts


def _words(payloads: Sequence[bytes]) -> tuple[Words, np.ndarray]:
    starts = np.empty(sum(map(len, payloads)), np.int64)
    return words(column_of(payloads), starts), starts


def _joined(places: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """First word of each run of windows that overlap or touch, and the word after its last."""
    is_first = np.diff(places, prepend=places[:1] - size - 1) > size
    lasts = np.append(np.flatnonzero(is_first)[1:], len(places)) - 1
    return places[is_first], places[lasts] + size


def _cuts(payload: bytes, spans: np.ndarray) -> list[Edit]:
    """Edits that remove spans of bytes, int64 `[spans, 2]`; edits count characters."""
    is_first_byte = np.frombuffer(payload, np.uint8) & 0xC0 != 0x80
    chars = np.append(0, np.cumsum(is_first_byte))
    return [Edit(start, end, RULE) for start, end in chars[spans].tolist()]
