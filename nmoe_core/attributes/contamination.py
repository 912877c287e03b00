"""Finds passages of evaluation sets in texts: 13 consecutive equal words, compared by word hashes.

Every string of an evaluation set is used, at any depth of its records (`sources.forms.strings`); a
string of fewer than 13 words is searched for as a whole. Strings of fewer than 8 words, such as
"Mars", occur in many uncontaminated texts; these strings are counted but not searched for, unless
`[contamination] min_words` is lower. Windows are compared by a polynomial hash, and each hit is
verified word by word. As in the search for near duplicates, case, spacing and punctuation are
ignored, and a Chinese character is a word. With 0.6 M windows, one core looks up about 100 million
words per second, or 33 million including word hashing; with 2 M windows, which exceed the CPU
cache, 35 and 21 million. Memory: about 25 bytes per word of the sets.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
from numba import njit

from nmoe_core.attributes.columns import SCHEMAS
from nmoe_core.attributes.kernels.bloom import Parts, bits, bloom, parts, place
from nmoe_core.attributes.minhash import batches
from nmoe_core.base.errors import SourceError
from nmoe_core.text.transforms.code_points import mix
from nmoe_core.text.transforms.words.hashes import BASE, Words, windows, words

WINDOW_WORDS = 13
MIN_WORDS = 8
_AT_A_TIME = 1024  # windows
SCHEMA = SCHEMAS["contamination"]


@dataclass(frozen=True)
class Windows:
    """All windows of one length."""

    num_words: int
    hashes: np.ndarray
    """uint64 `[num_windows]`: distinct hashes, ascending."""
    places: np.ndarray
    """int64 `[num_windows]`: index of each window's first word in the words of the sets."""
    owners: np.ndarray
    """uint16 `[num_windows]`: the first set that has the window."""

    @cached_property
    def filter(self) -> tuple[np.ndarray, np.uint64, Parts]:
        """The lookup structures of the hashes, see `bloom` and `parts`."""
        return *bloom(self.hashes), parts(self.hashes)


@dataclass(frozen=True)
class Evaluations:
    """The evaluation sets of a run. Can be pickled."""

    names: tuple[str, ...]
    words: np.ndarray
    """uint64: hashes of all words of all sets."""
    windows: tuple[Windows, ...]
    """Windows by length, longest first."""
    facts: dict[str, int]
    """Number of `evaluation_strings`, and of `short_strings` (not searched for)."""

    @classmethod
    def of(cls, sets: Mapping[str, Sequence[str]], min_words: int = MIN_WORDS) -> "Evaluations":
        """The windows of the strings of each set. Raises SourceError if no string of a set has
        `min_words` words (E-CONTAMINATION-SET)."""
        parts = []
        lengths = []
        owners = []
        for number, (name, texts) in enumerate(sets.items()):
            found = words(pa.array(texts, pa.large_string()))
            lengths.append(np.diff(found.bounds))
            if lengths[-1].max(initial=0) < min_words:
                raise SourceError(
                    "evaluation set cannot be used",
                    where=name,
                    found=f"no string of {min_words} words or more",
                    expected="records with texts",
                    do="correct the path, or lower contamination.min_words",
                    code="E-CONTAMINATION-SET",
                )
            parts.append(found.hashes)
            owners.append(np.full(len(found.hashes), number, np.uint16))
        flat = np.concatenate([*parts, np.empty(0, np.uint64)])
        owner = np.concatenate([*owners, np.empty(0, np.uint16)])
        length = np.concatenate([*lengths, np.empty(0, np.int64)])
        by_length = []
        for num_words in range(WINDOW_WORDS, min_words - 1, -1):
            at = _starts(length, num_words)
            if len(at):
                hashes, order = np.unique(windows(flat, num_words)[at], return_index=True)
                by_length.append(Windows(num_words, hashes, at[order], owner[at[order]]))
        short = int(np.count_nonzero(length < min_words))
        facts = {"evaluation_strings": len(length), "short_strings": short}
        return cls(tuple(sets), flat, tuple(by_length), facts)


def contamination(texts: pa.Array, evaluations: Evaluations) -> pa.Table:
    """The share of each text that occurs in the sets; columns as in `SCHEMA`."""
    shares = np.zeros(len(texts), np.float32)
    owners = np.full(len(texts), -1)
    for start, stop in batches(texts):
        found = words(texts.slice(start, stop - start))
        bounds = found.bounds
        of_words = sets_of_words(found, evaluations)
        covered = np.concatenate([[0], np.cumsum(of_words >= 0)])[bounds]
        counts = np.diff(covered)
        shares[start:stop] = counts / np.maximum(1, np.diff(bounds))
        for text in np.flatnonzero(counts).tolist():
            known_words = of_words[bounds[text] : bounds[text + 1]]
            owners[start + text] = np.bincount(known_words[known_words >= 0]).argmax()
    names = pa.array(evaluations.names, pa.string()).take(pa.array(owners, mask=owners < 0))
    return pa.table([pa.array(shares), names], schema=SCHEMA)


def sets_of_words(found: Words, evaluations: Evaluations) -> np.ndarray:
    """The number of the set that has a passage with each word, or -1: int64 `[num_words]`."""
    of_words = np.full(len(found.hashes), -1)
    for one in evaluations.windows:
        known = one.places, one.owners, evaluations.words, one.num_words
        _scan(found.hashes, found.bounds, known, *one.filter, of_words)
    return of_words


def _starts(lengths: np.ndarray, num_words: int) -> np.ndarray:
    """Starts of the windows that do not cross a text's end; a window of fewer than 13 words is a
    whole text."""
    ends = np.cumsum(lengths)
    if num_words < WINDOW_WORDS:
        return (ends - lengths)[lengths == num_words]
    last = np.repeat(ends, lengths) - num_words
    places = np.arange(len(last))
    return places[places <= last]


@njit(cache=True, inline="always")
def _equal(first, i, second, k, size):
    for j in range(size):  # noqa: SIM110 (numba compiles loops, not generators)
        if first[i + j] != second[k + j]:
            return False
    return True


@njit(cache=True)
def _scan(hashes, bounds, known, passes, shift, among, of_words):
    """Assign an evaluation set to each word that a verified window covers, unless the word already
    has a set.

    Many windows are looked up in the filter one after another, so that the processor overlaps their
    memory accesses.
    """
    places, owners, set_words, size = known
    windows, begins, part_shift = among
    some = np.empty(_AT_A_TIME, np.uint64)
    passed = np.empty(_AT_A_TIME, np.int64)
    top = np.uint64(1)
    for _ in range(size):
        top = top * BASE
    for text in range(len(bounds) - 1):
        start = bounds[text]
        stop = bounds[text + 1]
        h = np.uint64(0)
        left = np.uint64(0)
        for i in range(start, min(stop, start + size - 1)):
            h = h * BASE + hashes[i]
        end = stop - size + 1
        for begin in range(start, end, _AT_A_TIME):
            count = min(_AT_A_TIME, end - begin)
            num_passed = 0
            for k in range(count):
                first = begin + k
                h = h * BASE + (hashes[first + size - 1] - left * top)
                left = hashes[first]
                some[k] = mix(h)
            for k in range(count):
                wanted = bits(some[k])
                passed[num_passed] = k
                num_passed += passes[some[k] >> shift] & wanted == wanted
            for k in passed[:num_passed]:
                at = place(some[k], windows, begins, part_shift)
                if at < 0 or not _equal(hashes, begin + k, set_words, places[at], size):
                    continue
                for i in range(begin + k, begin + k + size):
                    if of_words[i] < 0:
                        of_words[i] = owners[at]
