"""Interleaving by blocks: exact shares at the end of a block, random order inside it.

At a block's end, after n sequences, floor(n x share + owed + phase) of them are from source i; the
phase is a fraction that is drawn once. The source with the largest weight gets the remaining
sequences. So at a block's end each other source is never more than one sequence from its share, for
any share and any length of the run, and reading any position costs the same. The policy `block` has
blocks of 2,048 sequences, `epoch_weighted` has blocks of one pass over the data, and
`weighted_random` has a single block, which is drawing without replacement. This is
block-deterministic mixing as in levanter, without its rounding per block.

A block's order is a random arrangement of its counts; any part of it is computed without the rest.
The block is halved until a part holds at most 16,384 sequences; each half's share of a source is
drawn from the hypergeometric law (above 32, from its normal approximation), and each last part is
shuffled as a whole. Reading a position costs one path of halvings, O(sources x log(size)); the
nodes of the last path stay in memory.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import floor, sqrt

import numpy as np

from loader.order.shuffle import hashes, key_of, mix64
from loader.order.swrr import OWED_UNIT

BLOCK_SIZE = 2048
LEAF_SIZE = 16_384
_EXACT = 32
_FIELDS = 16
# Mean and standard deviation of the sum of 16 uniform 16-bit numbers.
_SUM_MEAN = _FIELDS * (2**16 - 1) / 2
_SUM_SD = sqrt(_FIELDS * (2**32 - 1) / 12)


class Pace:
    """An endless stream with fixed shares: `sum(shares)` sequences contain exactly the share of
    each source. A block is longer than `block_size` sequences if the source with the largest weight
    would otherwise take too many of them. `key` seeds phases and orders. owed: the amount that each
    source gets besides its share, in 1 / OWED_UNIT sequences; with `in_shares` the shares already
    include it.
    """

    def __init__(
        self,
        shares: Sequence[int],
        block_size: int,
        key: int,
        owed: Sequence[int] = (),
        in_shares: bool = False,
    ) -> None:
        unit, count = (OWED_UNIT, len(shares)) if any(owed) else (1, len(shares))
        given = owed if any(owed) else [0] * count
        self._rates = [n * unit - own * in_shares for n, own in zip(shares, given)]
        self._key = key
        self._period = sum(shares)
        self._total = sum(shares) * unit
        self._filler = max(range(count), key=self._rates.__getitem__)
        left = self._total - sum(self._rates) + self._rates[self._filler]
        # The most sequences that each of the other sources can get in a block above its rate.
        most = (count - 1) * (2 if any(owed) else 1)
        least = -(-most * self._total // left) if left > 0 else self._period
        self._size = max(1, block_size, least)
        self._phases = [
            (key_of(key, i) * self._total >> 64) + own * self._period for i, own in enumerate(given)
        ]
        # Replaced in one assignment, since the thread that reads ahead and the main thread both use
        # this value.
        self._opened = -1, [0] * count, Arrangement([0] * count, 0)

    def counts_at(self, n: int) -> list[int]:
        """Sequences of each source among the first `n`, where `n` is a block's end."""
        if n == 0:
            return [0] * len(self._rates)
        counts = [
            max(0, (n * rate + phase) // self._total)
            for rate, phase in zip(self._rates, self._phases)
        ]
        counts[self._filler] += n - sum(counts)
        return counts

    def counts_before(self, n: int) -> np.ndarray:
        """Sequences of each source among the first `n`: int64 `[num_sources]`."""
        if n == 0:
            return np.zeros(len(self._rates), np.int64)
        start, _, before, block = self._open(n - 1)
        return np.array(before, np.int64) + block.counts_before(n - start)

    def sources(self, start: int, stop: int) -> np.ndarray:
        """Source of each sequence in `[start, stop)`: uint8 or uint16 `[stop - start]`."""
        parts = []
        while start < stop:
            first, end, _, block = self._open(start)
            parts.append(block.sources(start - first, min(stop, end) - first))
            start = end
        return np.concatenate(parts) if parts else np.empty(0, np.uint8)

    def first_exhaustion(self, quotas: Sequence[int]) -> int:
        """Number of sequences after which the first source has reached its quota; all quotas are
        above 0."""
        met = min(
            -(-(quota * self._total - phase) // rate)
            for quota, rate, phase in zip(quotas, self._rates, self._phases)
        )
        # The source with the largest weight gets the remaining sequences, so this formula is not
        # exact for this source: it is off by less than twice the number of sources.
        met += 2 * len(quotas)
        blocks = range(self._number_of(max(met - 1, 0)) + 1)

        def is_met(counts: Iterable[int]) -> bool:
            return any(count >= quota for count, quota in zip(counts, quotas))

        number = bisect_left(blocks, True, key=lambda b: is_met(self.counts_at(self._end(b))))
        inside = range(self._end(number - 1) + 1, self._end(number) + 1)
        return inside[bisect_left(inside, True, key=lambda n: is_met(self.counts_before(n)))]

    def _number_of(self, n: int) -> int:
        # If a period ends with an incomplete block, this block is joined to the complete block
        # before it.
        per_period = max(1, self._period // self._size)
        period, inside = divmod(n, self._period)
        return period * per_period + min(inside // self._size, per_period - 1)

    def _end(self, number: int) -> int:
        per_period = max(1, self._period // self._size)
        period, inside = divmod(number + 1, per_period)
        return period * self._period + inside * self._size

    def _open(self, n: int) -> tuple[int, int, list[int], "Arrangement"]:
        """Open the block that contains sequence `n`. Returns its start and end, the number of
        sequences of each source before it, and its order."""
        number = self._number_of(n)
        start = self._end(number - 1)
        end = self._end(number)
        known, before, block = self._opened
        if number != known:
            before = self.counts_at(start)
            counts = [b - a for a, b in zip(before, self.counts_at(end))]
            block = Arrangement(counts, key_of(self._key, -1, number))
            self._opened = number, before, block
        return start, end, before, block


def paced_until_met(
    weights: Sequence[int], quotas: Sequence[int], block_size: int, key: int, owed: Sequence[int]
) -> tuple[Pace, int]:
    """The stream of sources, and its length: the number of sequences after which the first source
    has reached its quota. If the quotas are the rounded shares of the weights plus debts, the
    stream follows the quotas, so that all sources reach them together at the end.
    """
    total = sum(weights)
    num_sequences = sum(quotas)
    off = (
        abs((quota * OWED_UNIT - own) * total - weight * num_sequences * OWED_UNIT)
        for quota, weight, own in zip(quotas, weights, owed)
    )
    if max(off) <= total * OWED_UNIT:
        return Pace(quotas, block_size, key, owed, in_shares=True), num_sequences
    scale = max(1, -(-block_size // total))
    pace = Pace([weight * scale for weight in weights], block_size, key, owed)
    return pace, pace.first_exhaustion(quotas)


@dataclass(frozen=True, slots=True)
class _Node:
    """Elements `[start, stop)`. counts: elements of each source in it. before: elements of each
    source before it."""

    start: int
    stop: int
    key: int
    counts: list[int]
    before: list[int]


class Arrangement:
    """A random arrangement of `counts[i]` elements of each source i; `key` is the seed."""

    def __init__(self, counts: Sequence[int], key: int) -> None:
        self.size = sum(counts)
        self._dtype = np.uint8 if len(counts) <= 256 else np.uint16
        self._path = [_Node(0, self.size, key, list(counts), [0] * len(counts))]
        self._leaf = self._path[0], np.empty(0, self._dtype)

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
        leaf, sources = self._leaf
        if not (len(sources) and leaf.start <= n < leaf.stop):
            path = [node for node in self._path if node.start <= n < node.stop]
            while path[-1].stop - path[-1].start > LEAF_SIZE:
                path.append(_half(path[-1], n))
            leaf = path[-1]
            ordered = np.repeat(np.arange(len(leaf.counts), dtype=self._dtype), leaf.counts)
            shuffled = np.argsort(hashes(leaf.key, np.arange(len(ordered))), kind="stable")
            sources = ordered[shuffled]
            self._path = path
            self._leaf = (leaf, sources)
        return leaf, sources


def _half(node: _Node, n: int) -> _Node:
    """The half of a node that contains element `n`."""
    size = node.stop - node.start
    middle = node.start + size // 2
    left = _left_counts(node.counts, size, size // 2, node.key)
    if n < middle:
        return _Node(node.start, middle, key_of(node.key, 0), left, node.before)
    right = [count - part for count, part in zip(node.counts, left)]
    before = [count + part for count, part in zip(node.before, left)]
    return _Node(middle, node.stop, key_of(node.key, 1), right, before)


def _left_counts(counts: list[int], size: int, left_size: int, key: int) -> list[int]:
    """Number of elements of each source among `left_size` elements drawn from `size`: multivariate
    hypergeometric, source by source, each conditioned on the earlier sources."""
    fields = hashes(key, np.arange(4 * len(counts))).astype("<u8").view("<u2")
    normals = (fields.reshape(-1, _FIELDS).sum(axis=1) - _SUM_MEAN) / _SUM_SD
    left = []
    for i, (count, normal) in enumerate(zip(counts, normals.tolist())):
        drawn = _hypergeometric(count, size, left_size, normal, key_of(key, i)) if count else 0
        left.append(drawn)
        size = size - count
        left_size = left_size - drawn
    return left


def _hypergeometric(count: int, size: int, draws: int, normal: float, key: int) -> int:
    """Draw from the hypergeometric law: of `size` elements `count` are marked; the number of marked
    ones among `draws` drawn elements."""
    if count > size - count:
        return draws - _hypergeometric(size - count, size, draws, -normal, key)
    if draws > size - draws:
        return count - _hypergeometric(count, size, size - draws, -normal, key)
    few = min(count, draws)
    many = max(count, draws)
    if few <= _EXACT:
        return _draw_each(few, size, many, key)
    mean, rest = divmod(few * many, size)
    variance = few * many * (size - few) / size * ((size - many) / size) / (size - 1)
    drawn = mean + floor(normal * sqrt(variance) + rest / size + 0.5)
    return min(max(drawn, 0), few)


def _draw_each(num_draws: int, size: int, marked: int, key: int) -> int:
    left = marked
    for j in range(num_draws):
        # A 64-bit fraction of the rest, compared without a division.
        left -= (mix64(key + j) * (size - j)) >> 64 < left
    return marked - left
