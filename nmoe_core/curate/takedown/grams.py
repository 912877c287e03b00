"""Hashes the 50-grams of texts and finds them in token files.

A gram is 50 consecutive token ids of a text; a text with fewer tokens is one gram. For each gram,
its SHA-256 is stored, so a record of grams holds no text. The hashes of one or two windows of the
gram are stored too; the search finds the gram by them. A gram of 50 tokens has one window; a
shorter gram has two windows, its first and its last 2^k tokens, which together cover the gram. The
hash of a window is a polynomial modulo 2^64, computed as a difference of prefix sums times an
inverse power, so a pass takes the same time for any window size. Each hit is checked by its
SHA-256, so hits are exact, and all occurrences are found. One core scans about 60 million tokens
per second for each of at most 7 window sizes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import numpy as np

GRAM_TOKENS = 50
GRAMS = np.dtype(
    [("first", "<u8"), ("last", "<u8"), ("sha256", "V32"), ("text", "<u4"), ("length", "u1")]
)
_CHUNK = 2**19
_BASE = 0x9E3779B97F4A7C15
_MIX = np.uint64(0xD1342543DE82EF95)
_FILTER_BITS = 6  # a filter has 2^6 slots per gram: about 1.5 % of windows pass by chance
_MOST_FILTER_BITS = 27  # 128 MB; with over 2 million grams, more windows pass


class Hit(NamedTuple):
    """The number of a gram, and the positions where it begins: int64 `[n]`."""

    gram: int
    positions: np.ndarray


def grams_of(tokens: np.ndarray, text: int, every: int = 1) -> np.ndarray:
    """The distinct grams of a text's tokens `[n]` (without BOS and EOS), as rows of dtype `GRAMS`;
    `text` is the number of the text, which each row holds. If `every` is above 1, only one gram of
    each `every` successive grams is taken, by its hash, so that a passage of `GRAM_TOKENS + every -
    1` tokens has a gram wherever it begins."""
    length = min(len(tokens), GRAM_TOKENS)
    parts = [np.empty(0, GRAMS)]
    for start in range(0, len(tokens) - length + 1 if length else 0, _CHUNK):
        part = np.asarray(tokens[start : start + _CHUNK + length - 1], "<u4")
        hashes = _hashes(part, window_size(length))
        rows = np.lib.stride_tricks.sliding_window_view(part, length)
        at = np.arange(len(rows))
        if every > 1:
            windows = np.lib.stride_tricks.sliding_window_view(
                hashes[: len(rows)] * _MIX, min(every, len(rows))
            )
            at = np.unique(windows.argmin(axis=1) + at[: len(windows)])
        digests = [hashlib.sha256(row.tobytes()).digest() for row in rows[at]]
        found = np.empty(len(at), GRAMS)
        found["first"] = hashes[at]
        found["last"] = hashes[at + length - window_size(length)]
        found["sha256"] = np.frombuffer(b"".join(digests), "V32")
        found["text"] = text
        found["length"] = length
        parts.append(found)
    return distinct(np.concatenate(parts))


def distinct(grams: np.ndarray) -> np.ndarray:
    """The first row of each gram, in the order of rows."""
    digests = np.ascontiguousarray(grams["sha256"]).view("S32")
    return grams[np.sort(np.unique(digests, return_index=True)[1])]


def window_size(length: int) -> int:
    """Number of tokens in the windows of a gram of `length` tokens."""
    return length if length == GRAM_TOKENS else 1 << (length.bit_length() - 1)


class GramIndex:
    """Finds grams in tokens. The grams are rows `[n]` of dtype `GRAMS`, without repeats (see
    `distinct`)."""

    def __init__(self, grams: np.ndarray) -> None:
        self.grams = grams
        sizes = np.array([0, *map(window_size, range(1, GRAM_TOKENS + 1))])[grams["length"]]
        self._by_size = {}
        for size in np.unique(sizes).tolist():
            chosen = np.flatnonzero(sizes == size)
            chosen = chosen[np.argsort(grams["first"][chosen], kind="stable")]
            bits = int(len(chosen) - 1).bit_length() + _FILTER_BITS
            bits = min(max(10, bits), _MOST_FILTER_BITS)
            shift = np.uint64(64 - bits)
            passes = np.zeros(1 << bits, np.bool_)
            passes[grams["first"][chosen] * _MIX >> shift] = True
            self._by_size[size] = chosen, grams["first"][chosen], passes, shift

    def hits(self, tokens: np.ndarray) -> Iterator[Hit]:
        """Yield the occurrences in the tokens of a file, uint32 or uint16 `[n]`. Several hits of
        one gram may be yielded, with ascending positions."""
        for start in range(0, len(tokens), _CHUNK):
            part = np.asarray(tokens[start : start + _CHUNK + GRAM_TOKENS - 1], "<u4")
            sums = _sums(part)
            for size in self._by_size:
                if size <= len(part):
                    for gram, positions in self._in_chunk(part, sums, size):
                        yield Hit(gram, start + positions)

    def _in_chunk(
        self, part: np.ndarray, sums: np.ndarray, size: int
    ) -> Iterator[tuple[int, np.ndarray]]:
        chosen, keys, passes, shift = self._by_size[size]
        hashes = _hashes(part, size, sums)
        at = np.flatnonzero(passes[hashes[:_CHUNK] * _MIX >> shift])
        low, high = (np.searchsorted(keys, hashes[at], side) for side in ("left", "right"))
        counts = high - low
        # Pair each position of a window with every gram that starts with this window.
        places = np.repeat(at, counts)
        inside = np.arange(len(places)) - np.repeat(np.cumsum(counts) - counts, counts)
        grams = chosen[np.repeat(low, counts) + inside]
        last = places + self.grams["length"][grams] - size
        is_good = last < len(hashes)
        is_good[is_good] = hashes[last[is_good]] == self.grams["last"][grams[is_good]]
        grams = grams[is_good]
        places = places[is_good]
        order = np.argsort(grams, kind="stable")
        unique, firsts = np.unique(grams[order], return_index=True)
        for gram, found in zip(unique.tolist(), np.split(places[order], firsts[1:])):
            length = int(self.grams["length"][gram])
            sha256 = self.grams["sha256"][gram]
            if len(exact := _equal(part, found, length, sha256.tobytes())):
                yield gram, exact


def _equal(part: np.ndarray, places: np.ndarray, length: int, sha256: bytes) -> np.ndarray:
    """Select the positions at which the next `length` tokens have this digest."""
    while len(places):
        rows = part[places[:, None] + np.arange(length)]
        is_same = (rows == rows[0]).all(axis=1)
        if hashlib.sha256(rows[0].tobytes()).digest() == sha256:
            return places[is_same]
        places = places[~is_same]  # windows with equal hashes but different tokens
    return places


@cache
def _powers() -> tuple[np.ndarray, np.ndarray]:
    """The powers of the base and of its inverse: uint64 `[chunk]` each."""
    size = _CHUNK + GRAM_TOKENS
    found = []
    for base in (_BASE, pow(_BASE, -1, 2**64)):
        factors = np.full(size, base, np.uint64)
        factors[0] = 1
        found.append(np.multiply.accumulate(factors))
    return found[0], found[1]


def _sums(part: np.ndarray) -> np.ndarray:
    sums = np.zeros(len(part) + 1, np.uint64)
    np.cumsum(part * _powers()[0][: len(part)], out=sums[1:])
    return sums


def _hashes(part: np.ndarray, size: int, sums: np.ndarray | None = None) -> np.ndarray:
    """The hash of the `size` tokens from each position on: uint64 `[n - size + 1]`."""
    sums = _sums(part) if sums is None else sums
    return (sums[size:] - sums[:-size]) * _powers()[1][: len(sums) - size]
