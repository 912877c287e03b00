"""Finds passages of evaluation sets in texts: 13 consecutive equal words, compared by word hashes.

An evaluation set is a JSONL file. Every string of at least 8 words in its objects is used, at any
depth; a string of fewer than 13 words is searched for as a whole. Shorter strings, such as "Mars",
occur in many uncontaminated texts; the loader of a set counts these strings but does not search for
them. Windows are compared by a polynomial hash, and each hit is verified word by word. As in the
search for near duplicates, case, spacing and punctuation are ignored, and a Chinese character is a
word. With 0.6 M windows, one core looks up about 100 million words per second, or 33 million
including word hashing; with 2 M windows, which exceed the CPU cache, 35 and 21 million. Memory:
about 25 bytes per word of the sets.
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

from nmoe_core.attributes.columns import SCHEMAS
from nmoe_core.attributes.kernels.bloom import Parts, bits, bloom, parts, place
from nmoe_core.attributes.kernels.word_hashes import words
from nmoe_core.attributes.minhash import batches
from nmoe_core.base.errors import SourceError
from nmoe_core.base.fingerprint import Fingerprints
from nmoe_core.base.jsonl import read_objects
from nmoe_core.text.transforms.code_points import mix

WINDOW_WORDS = 13
LEAST_WORDS = 8
_AT_A_TIME = 1024  # windows
SCHEMA = SCHEMAS["contamination"]
_BASE = np.uint64(0x9E3779B97F4A7C15)


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
    digests: Fingerprints
    """SHA-256 of each file, by name."""
    words: np.ndarray
    """uint64: hashes of all words of all sets."""
    windows: tuple[Windows, ...]
    """Windows by length, longest first."""
    facts: dict[str, int]
    """Number of `evaluation_strings`, and of `short_strings` (not searched for)."""

    @classmethod
    def read(cls, files: Mapping[str, Path]) -> "Evaluations":
        """Read the sets; `files` maps the name of each set to its path. Raises SourceError if a
        file is missing, a line is not a JSON object, or a file has no string of 8 words
        (E-CONTAMINATION-SET)."""
        digests = {}
        parts = []
        lengths = []
        owners = []
        for number, (name, path) in enumerate(files.items()):
            texts, digests[name] = _read(path)
            found = words(pa.array(texts, pa.large_string()))
            lengths.append(np.diff(found.bounds))
            if lengths[-1].max(initial=0) < LEAST_WORDS:
                raise _bad_set(
                    path, f"no string of {LEAST_WORDS} words or more", "JSON objects with texts"
                )
            parts.append(found.hashes)
            owners.append(np.full(len(found.hashes), number, np.uint16))
        flat = np.concatenate([*parts, np.empty(0, np.uint64)])
        owner = np.concatenate([*owners, np.empty(0, np.uint16)])
        length = np.concatenate([*lengths, np.empty(0, np.int64)])
        windows = []
        for num_words in range(WINDOW_WORDS, LEAST_WORDS - 1, -1):
            at = _starts(length, num_words)
            if len(at):
                hashes, order = np.unique(_windows(flat, num_words)[at], return_index=True)
                windows.append(Windows(num_words, hashes, at[order], owner[at[order]]))
        short = int(np.count_nonzero(length < LEAST_WORDS))
        facts = {"evaluation_strings": len(length), "short_strings": short}
        return cls(tuple(files), digests, flat, tuple(windows), facts)


def contamination(texts: pa.Array, evaluations: Evaluations) -> pa.Table:
    """The share of each text that occurs in the sets; columns as in `SCHEMA`."""
    shares = np.zeros(len(texts), np.float32)
    owners = np.full(len(texts), -1)
    for start, stop in batches(texts):
        hashes, bounds = words(texts.slice(start, stop - start))
        of_words = np.full(len(hashes), -1)
        for one in evaluations.windows:
            known = one.places, one.owners, evaluations.words, one.num_words
            _scan(hashes, bounds, known, *one.filter, of_words)
        covered = np.concatenate([[0], np.cumsum(of_words >= 0)])[bounds]
        counts = np.diff(covered)
        shares[start:stop] = counts / np.maximum(1, np.diff(bounds))
        for text in np.flatnonzero(counts).tolist():
            known_words = of_words[bounds[text] : bounds[text + 1]]
            owners[start + text] = np.bincount(known_words[known_words >= 0]).argmax()
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
        do="correct the path, or convert the set to uncompressed JSONL",
        code="E-CONTAMINATION-SET",
    )


def _starts(lengths: np.ndarray, num_words: int) -> np.ndarray:
    """Starts of the windows that do not cross a text's end; a window of fewer than 13 words is a
    whole text."""
    ends = np.cumsum(lengths)
    if num_words < WINDOW_WORDS:
        return (ends - lengths)[lengths == num_words]
    last = np.repeat(ends, lengths) - num_words
    places = np.arange(len(last))
    return places[places <= last]


@njit(cache=True)
def _windows(hashes, size):
    """The hash of the window that starts at each word; the last entries are unused."""
    found = np.zeros(len(hashes), np.uint64)
    for i in range(len(hashes) - size + 1):
        h = np.uint64(0)
        for k in range(size):
            h = h * _BASE + hashes[i + k]
        found[i] = mix(h)
    return found


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
        top = top * _BASE
    for text in range(len(bounds) - 1):
        start = bounds[text]
        stop = bounds[text + 1]
        h = np.uint64(0)
        left = np.uint64(0)
        for i in range(start, min(stop, start + size - 1)):
            h = h * _BASE + hashes[i]
        end = stop - size + 1
        for begin in range(start, end, _AT_A_TIME):
            count = min(_AT_A_TIME, end - begin)
            num_passed = 0
            for k in range(count):
                first = begin + k
                h = h * _BASE + (hashes[first + size - 1] - left * top)
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
