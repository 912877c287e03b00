"""Which texts hold passages of evaluation sets: 13 equal words in a row, as words are hashed.

An evaluation set is a JSONL file; every string in its objects counts, wherever it stands, if it has
13 words. Windows of 13 words are compared by a polynomial hash, and every hit word by word. As for
near duplicates, case, spacing and punctuation do not count, and a Chinese character is a word.
With 0.6 M windows, one core looks up about 100 million words per second, and 33 million with the
hashing of the words; with 2 M windows, which no cache holds, 35 and 21. Memory is about 25 bytes
per word of the sets.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numba import njit

from nmoe_core.attributes.kernels.bloom import Parts, bits, bloom, parts, place
from nmoe_core.attributes.kernels.words import mix, words
from nmoe_core.attributes.minhash import batches
from nmoe_core.base.errors import SourceError
from nmoe_core.base.fingerprint import Fingerprints
from nmoe_core.base.jsonl import read_objects

WINDOW_WORDS = 13
_AT_A_TIME = 1024  # windows
SCHEMA = pa.schema(
    [
        pa.field("contamination", pa.float32(), nullable=False),  # share of words, 0 to 1
        pa.field("contaminated_by", pa.string()),  # the set with most of these words
    ]
)
_BASE = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Evaluations:
    """The windows of some evaluation sets; pickles."""

    names: tuple[str, ...]
    digests: Fingerprints
    """SHA-256 of each file, by name."""
    hashes: np.ndarray
    """uint64 `[num_windows]`, ascending, each once."""
    places: np.ndarray
    """int64 `[num_windows]`: where the window begins in `words`."""
    words: np.ndarray
    """uint64: all words of all sets."""
    owners: np.ndarray
    """uint16 `[num_windows]`: the set of each window, the first of several."""

    @cached_property
    def filter(self) -> tuple[np.ndarray, np.uint64, Parts]:
        """What says whether a window is in the sets: `bloom` and `parts` of the hashes."""
        return *bloom(self.hashes), parts(self.hashes)

    @classmethod
    def read(cls, files: Mapping[str, Path]) -> "Evaluations":
        """Read the sets by their names. Raises SourceError: a file is missing, a line is no JSON
        object, or a file has no string of 13 words (E-CONTAMINATION-SET)."""
        digests, parts, owners, places, first = {}, [], [], [], 0
        for number, (name, path) in enumerate(files.items()):
            texts, digests[name] = _read(path)
            found = words(pa.array(texts, pa.large_string()))
            starts = _starts(found.bounds)
            if not len(starts):
                raise _bad_set(
                    path, f"no string of {WINDOW_WORDS} words", "JSON objects with texts"
                )
            parts.append(found.hashes)
            places.append(starts + first)
            owners.append(np.full(len(starts), number, np.uint16))
            first += len(found.hashes)
        flat = np.concatenate([*parts, np.empty(0, np.uint64)])
        at = np.concatenate([*places, np.empty(0, np.int64)])
        owner = np.concatenate([*owners, np.empty(0, np.uint16)])
        hashes, order = np.unique(_windows(flat)[at], return_index=True)
        return cls(tuple(files), digests, hashes, at[order], flat, owner[order])


def contamination(texts: pa.Array, evaluations: Evaluations) -> pa.Table:
    """How much of each text stands in the sets, by `SCHEMA`."""
    known = evaluations.places, evaluations.owners, evaluations.words
    shares = np.zeros(len(texts), np.float32)
    owners = np.full(len(texts), -1)
    for start, stop in batches(texts):
        found = words(texts.slice(start, stop - start))
        by_set = np.zeros(max(1, len(evaluations.names)), np.int64)
        results = shares[start:stop], owners[start:stop], by_set
        _scan(found.hashes, found.bounds, known, *evaluations.filter, results)
    names = pa.array(evaluations.names, pa.string()).take(pa.array(owners, mask=owners < 0))
    return pa.table([pa.array(shares), names], schema=SCHEMA)


def _read(path: Path) -> tuple[list[str], str]:
    digest = hashlib.sha256()
    try:
        rows = read_objects(
            path, lambda line, found: _bad_set(path, f"line {line}: {found}"), digest
        )
        texts = [text for _, row in rows for text in _strings(row)]
    except OSError as error:
        raise _bad_set(path, str(error.strerror)) from None
    return texts, digest.hexdigest()


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _strings(part)


def _bad_set(path: Path, found: str, expected: str = "one JSON object per line") -> SourceError:
    return SourceError(
        "evaluation set cannot be used",
        where=path,
        found=found,
        expected=expected,
        do="correct the path, or write the set as plain JSONL",
        code="E-CONTAMINATION-SET",
    )


def _starts(bounds: np.ndarray) -> np.ndarray:
    """Where windows begin that lie in one text."""
    last = np.repeat(bounds[1:], np.diff(bounds)) - WINDOW_WORDS
    places = np.arange(len(last))
    return places[places <= last]


@njit(cache=True)
def _windows(hashes):
    """The hash of the window that begins at each word: int64 `[num_words]`, the last 12 unused."""
    found = np.zeros(len(hashes), np.uint64)
    for i in range(len(hashes) - WINDOW_WORDS + 1):
        h = np.uint64(0)
        for k in range(WINDOW_WORDS):
            h = h * _BASE + hashes[i + k]
        found[i] = mix(h)
    return found


@njit(cache=True, inline="always")
def _equal(first, i, second, k):
    for j in range(WINDOW_WORDS):  # noqa: SIM110 (numba compiles loops, not generators)
        if first[i + j] != second[k + j]:
            return False
    return True


@njit(cache=True)
def _scan(hashes, bounds, known, passes, shift, among, results):
    """Words of each text that a verified window covers, and the set that covers most.

    Many windows are looked up in the filter one after the other, so that the processor waits for
    several places of memory at a time.
    """
    places, owners, set_words = known
    windows, begins, part_shift = among
    shares, names, by_set = results
    some, passed = np.empty(_AT_A_TIME, np.uint64), np.empty(_AT_A_TIME, np.int64)
    top = np.uint64(1)
    for _ in range(WINDOW_WORDS):
        top = top * _BASE
    for text in range(len(bounds) - 1):
        start, stop = bounds[text], bounds[text + 1]
        covered, covered_to, h, left = 0, start, np.uint64(0), np.uint64(0)
        by_set[:] = 0
        for i in range(start, min(stop, start + WINDOW_WORDS - 1)):
            h = h * _BASE + hashes[i]
        end = stop - WINDOW_WORDS + 1
        for begin in range(start, end, _AT_A_TIME):
            count, num_passed = min(_AT_A_TIME, end - begin), 0
            for k in range(count):
                first = begin + k
                h = h * _BASE + (hashes[first + WINDOW_WORDS - 1] - left * top)
                left = hashes[first]
                some[k] = mix(h)
            for k in range(count):
                wanted = bits(some[k])
                passed[num_passed] = k
                num_passed += passes[some[k] >> shift] & wanted == wanted
            for k in passed[:num_passed]:
                at = place(some[k], windows, begins, part_shift)
                if at < 0 or not _equal(hashes, begin + k, set_words, places[at]):
                    continue
                new = begin + k + WINDOW_WORDS - max(begin + k, covered_to)
                covered += new
                covered_to = begin + k + WINDOW_WORDS
                by_set[owners[at]] += new
        if covered:
            shares[text] = covered / (stop - start)
            names[text] = np.argmax(by_set)
