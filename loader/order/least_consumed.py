"""Least-consumed interleave: always draws from the source with the fewest tokens per weight so far.

Every source has a clock, tokens / weight, which advances with each of its sequences. The next
sequence is from the source with the lowest clock; a hash of the source and its draw breaks ties.
Clocks are integers, exact if the weights have a common multiple below 2^48, else rounded at the
40th binary place. The clock values at which a source is drawn form an arithmetic progression. So a
binary search, O(sources x log n), finds the state after n sequences: the clock below which there
are n such values.
"""

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from loader.order.shuffle import hashes, key_of

_CHUNK = 4096
_FRACTION = 2**40
_MAX_UNIT = 2**48


class LeastConsumed:
    """An endless stream of sequences of `seq_len` tokens that keeps tokens / weight equal.
    `tokens`: tokens of each source that count as read at the start, below 0 for a debt to the
    source; `key` is the seed for ties."""

    def __init__(
        self, weights: Sequence[int], tokens: Sequence[int | Fraction], seq_len: int, key: int
    ) -> None:
        unit = _unit(weights, seq_len)
        self._prices = [_round_div(unit * seq_len, weight) for weight in weights]
        self._clocks = [_round_div(unit * count, weight) for count, weight in zip(tokens, weights)]
        self._keys = np.array([key_of(key, i) for i in range(len(weights))], np.uint64)

    def counts_before(self, n: int) -> np.ndarray:
        """Sequences of each source among the first `n`: int64 `[num_sources]`."""
        clock = self._clock_at(n)
        counts = self._counts_below(clock)
        for source in self._tied(clock, counts)[: n - sum(counts)]:
            counts[source] += 1
        return np.array(counts, np.int64)

    def sources(self, start: int, stop: int) -> np.ndarray:
        """Source of each sequence in `[start, stop)`: intp `[stop - start]`."""
        chunks = (self._chunk(at, min(stop, at + _CHUNK)) for at in range(start, stop, _CHUNK))
        return np.concatenate([np.empty(0, np.intp), *chunks])

    def first_exhaustion(self, quotas: Sequence[int]) -> int:
        """Number of sequences after which the first source has reached its quota; all quotas are
        above 0."""
        readings = zip(self._clocks, self._prices, quotas)
        last = [own + (quota - 1) * price for own, price, quota in readings]
        clock = min(last)
        counts = self._counts_below(clock)
        tied = self._tied(clock, counts)
        return sum(counts) + 1 + min(i for i, source in enumerate(tied) if last[source] == clock)

    def _counts_below(self, clock: int) -> list[int]:
        """Number of times that each source is drawn below a clock value."""
        return [max(0, -((own - clock) // price)) for own, price in zip(self._clocks, self._prices)]

    def _clock_at(self, n: int) -> int:
        """The clock at which sequence `n` is drawn."""
        low = min(self._clocks)
        high = min(own + n * price for own, price in zip(self._clocks, self._prices)) + 1
        # The highest clock value below which at most n sequences are drawn.
        while low < high:
            middle = (low + high + 1) // 2
            if sum(self._counts_below(middle)) <= n:
                low = middle
            else:
                high = middle - 1
        return low

    def _tied(self, clock: int, counts: Sequence[int]) -> list[int]:
        """Sources with this clock, in the order in which they are drawn."""
        readings = zip(self._clocks, self._prices, counts)
        tied = [i for i, (own, price, n) in enumerate(readings) if own + n * price == clock]
        if len(tied) < 2:
            return tied
        order = _tie_hashes(self._keys[tied], np.array([counts[i] for i in tied], np.int64))
        return [tied[i] for i in np.argsort(order, kind="stable")]

    def _chunk(self, start: int, stop: int) -> np.ndarray:
        first = self._clock_at(start)
        last = self._clock_at(stop) + 1
        counts = self._counts_below(first)
        ends = self._counts_below(last)
        active = [i for i, (a, b) in enumerate(zip(counts, ends)) if b > a]
        lengths = np.array([ends[i] - counts[i] for i in active], np.int64)
        columns = np.repeat(np.arange(len(active)), lengths)
        offsets = np.arange(len(columns)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        # Within a chunk clock values are close together. If sources with tiny weights spread them
        # over more than 63 bits, Python's exact integers are used.
        kind = np.int64 if last - first < 2**62 else object
        own = [self._clocks[i] + counts[i] * self._prices[i] - first for i in active]
        price = [self._prices[i] if ends[i] - counts[i] > 1 else 0 for i in active]
        clocks = np.array(own, kind)[columns] + np.array(price, kind)[columns] * offsets
        drawn = np.array([counts[i] for i in active], np.int64)[columns] + offsets
        ties = _tie_hashes(self._keys[np.array(active)[columns]], drawn)
        if kind is object:
            clocks = np.unique(clocks, return_inverse=True)[1]
        order = np.lexsort((ties, clocks))[start - sum(counts) : stop - sum(counts)]
        return np.array(active)[columns[order]]


def _round_div(numerator: int | Fraction, denominator: int) -> int:
    """The integer nearest to a fraction; halves go up."""
    return (2 * numerator + denominator) // (2 * denominator)


def _unit(weights: Sequence[int], seq_len: int) -> int:
    """The step of the clock per token for a source of weight 1, chosen so that a sequence of the
    heaviest source advances its clock by 2^40 to 2^48."""
    heaviest = max(weights)
    divisor = math.gcd(*weights)
    common = 1
    for weight in weights:
        common = math.lcm(common, weight // divisor)
        # A sequence advances a clock by unit x seq_len / weight; this multiple makes these steps
        # integers.
        if common * divisor * seq_len > _MAX_UNIT * heaviest:
            return -(-_FRACTION * heaviest // seq_len)
    return common * divisor * max(1, -(-_FRACTION * heaviest // (common * divisor * seq_len)))


def _tie_hashes(keys: np.ndarray, drawn: np.ndarray) -> np.ndarray:
    return hashes(0, (keys + drawn.astype(np.uint64)).astype(np.int64))
