"""A random arrangement of a multiset, any part of which is found without making the rest.

It is drawing without replacement. The range is halved until a part holds at most 16,384 elements;
each half's share of a source is drawn from the hypergeometric law (above 32 elements, from its
normal approximation), a leaf is shuffled in whole. A position costs one path, O(sources x
log(size)); the nodes of the last path are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, sqrt

import numpy as np

from loader.order.shuffle import hashes, key_of, mix64

LEAF_SIZE = 16_384
_EXACT = 32
_FIELDS = 16
# Sum of 16 uniform 16-bit numbers: its mean, and its standard deviation.
_SUM_MEAN = _FIELDS * (2**16 - 1) / 2
_SUM_SD = sqrt(_FIELDS * (2**32 - 1) / 12)


@dataclass(frozen=True, slots=True)
class _Node:
    """Elements `[start, stop)`; counts: of each source in it; before: of each before it."""

    start: int
    stop: int
    key: int
    counts: list[int]
    before: list[int]


class Arrangement:
    """One arrangement of `counts[i]` elements of each source i; `key` says which."""

    def __init__(self, counts: Sequence[int], key: int) -> None:
        self.size = sum(counts)
        self._dtype = np.uint8 if len(counts) <= 256 else np.uint16
        self._path = [_Node(0, self.size, key, list(counts), [0] * len(counts))]
        self._leaf, self._leaf_sources = self._path[0], np.empty(0, self._dtype)

    def counts_before(self, n: int) -> np.ndarray:
        """Elements of each source among the first `n`: int64 `[num_sources]`."""
        if n == 0 or n == self.size:
            root = self._path[0]
            return np.array(root.counts if n else root.before, np.int64)
        leaf, sources = self._leaf_at(n - 1)
        inside = np.bincount(sources[: n - leaf.start], minlength=len(leaf.counts))
        return np.array(leaf.before, np.int64) + inside

    def sources(self, start: int, stop: int) -> np.ndarray:
        """Source of each element in `[start, stop)`: uint8 or uint16 `[stop - start]`."""
        parts = [np.empty(0, self._dtype)]
        while start < stop:
            leaf, sources = self._leaf_at(start)
            parts.append(sources[start - leaf.start : stop - leaf.start])
            start = leaf.stop
        return np.concatenate(parts)

    def _leaf_at(self, n: int) -> tuple[_Node, np.ndarray]:
        if not (len(self._leaf_sources) and self._leaf.start <= n < self._leaf.stop):
            while not self._path[-1].start <= n < self._path[-1].stop:
                self._path.pop()
            while self._path[-1].stop - self._path[-1].start > LEAF_SIZE:
                self._path.append(_half(self._path[-1], n))
            leaf = self._leaf = self._path[-1]
            ordered = np.repeat(np.arange(len(leaf.counts), dtype=self._dtype), leaf.counts)
            shuffled = np.argsort(hashes(leaf.key, np.arange(len(ordered))), kind="stable")
            self._leaf_sources = ordered[shuffled]
        return self._leaf, self._leaf_sources


def _half(node: _Node, n: int) -> _Node:
    """The half of a node that holds element `n`."""
    size = node.stop - node.start
    middle = node.start + size // 2
    left = _left_counts(node.counts, size, size // 2, node.key)
    if n < middle:
        return _Node(node.start, middle, key_of(node.key, 0), left, node.before)
    right = [count - part for count, part in zip(node.counts, left)]
    before = [count + part for count, part in zip(node.before, left)]
    return _Node(middle, node.stop, key_of(node.key, 1), right, before)


def _left_counts(counts: list[int], size: int, left_size: int, key: int) -> list[int]:
    """Share of each source when `left_size` of `size` elements are drawn: multivariate
    hypergeometric, source after source given those before it."""
    fields = hashes(key, np.arange(4 * len(counts))).astype("<u8").view("<u2")
    normals = (fields.reshape(-1, _FIELDS).sum(axis=1) - _SUM_MEAN) / _SUM_SD
    left = []
    for i, (count, normal) in enumerate(zip(counts, normals.tolist())):
        drawn = _hypergeometric(count, size, left_size, normal, key_of(key, i)) if count else 0
        left.append(drawn)
        size, left_size = size - count, left_size - drawn
    return left


def _hypergeometric(count: int, size: int, draws: int, normal: float, key: int) -> int:
    """How many of `count` marked elements are among `draws` of `size`."""
    if count > size - count:
        return draws - _hypergeometric(size - count, size, draws, -normal, key)
    if draws > size - draws:
        return count - _hypergeometric(count, size, size - draws, -normal, key)
    few, many = min(count, draws), max(count, draws)
    if few <= _EXACT:
        return _draw_each(few, size, many, key)
    mean, rest = divmod(few * many, size)
    variance = few * many * (size - few) / size * ((size - many) / size) / (size - 1)
    drawn = mean + floor(normal * sqrt(variance) + rest / size + 0.5)
    return min(max(drawn, 0), few)


def _draw_each(num_draws: int, size: int, marked: int, key: int) -> int:
    left = marked
    for j in range(num_draws):
        # A 64-bit fraction of what is left, compared without a division.
        left -= (mix64(key + j) * (size - j)) >> 64 < left
    return marked - left
