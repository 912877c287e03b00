"""Smooth weighted round-robin as a table of one period.

Every pick adds each weight to its source's accumulator, takes the largest (ties: the earlier
source) and charges it the sum of weights. The accumulators are back at zero after W / gcd picks, so
any position is a lookup. A table of 10^6 picks takes about half a second, once per set of weights.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import numpy as np

_MARK_EVERY = 4096


def swrr_until_met(weights: Sequence[int], quotas: Sequence[int]) -> tuple[PeriodTable, int]:
    """Picks from zero accumulators, and after how many of them a source has first had its quota."""
    divisor = math.gcd(*weights)
    reduced = tuple(weight // divisor for weight in weights)
    table = period_table(reduced, min(sum(reduced), sum(quotas)))
    last = min(table.nth_pick(source, quota - 1) for source, quota in enumerate(quotas))
    return table, int(last) + 1


@dataclass(frozen=True, slots=True)
class PeriodTable:
    """The first picks of one period: all of it, or as many as the stage can use.

    weights: int64 [k], picks of each source in a period. picks: uint8 or uint16 [length].
    marks: int64 [length // 4096 + 1, k], counts before every 4,096th pick.
    """

    period: int
    weights: np.ndarray
    picks: np.ndarray
    marks: np.ndarray

    def counts_before(self, n: int) -> np.ndarray:
        """Picks of each source among the first `n`: int64 `[k]`."""
        full, rest = divmod(n, self.period)
        mark = rest // _MARK_EVERY
        tail = np.bincount(self.picks[mark * _MARK_EVERY : rest], minlength=len(self.weights))
        return full * self.weights + self.marks[mark] + tail

    def sources(self, start: int, stop: int) -> np.ndarray:
        """Source of each pick in `[start, stop)`: uint8 or uint16 `[stop - start]`."""
        first = start % self.period
        if first + stop - start <= len(self.picks):
            return self.picks[first : first + stop - start]
        return self.picks[np.arange(start, stop) % self.period]

    def nth_pick(self, source: int, n: int) -> float:
        """Number of the pick that takes `source` for the n-th time (from 0); infinity where the
        table is a part of the period that does not reach that pick."""
        full, rest = divmod(n, int(self.weights[source]))
        inside = np.flatnonzero(self.picks == source)
        if rest >= len(inside):
            return math.inf
        return full * self.period + int(inside[rest])


@lru_cache(maxsize=32)
def period_table(weights: tuple[int, ...], length: int) -> PeriodTable:
    """Make a table of `length` picks. Cached: ranks in one process and equal stages share it."""
    period = sum(weights)
    picks = np.frombuffer(_swrr_picks(weights, length), np.uint8 if len(weights) <= 256 else "u2")
    blocks = [
        np.bincount(picks[i : i + _MARK_EVERY], minlength=len(weights))
        for i in range(0, length, _MARK_EVERY)
    ]
    marks = np.array(list(accumulate(blocks, initial=np.zeros(len(weights), np.int64))))
    return PeriodTable(period, np.array(weights, np.int64), picks, marks)


def _swrr_picks(weights: tuple[int, ...], length: int) -> array[int]:
    num_sources, period = len(weights), sum(weights)
    # Row k is what the accumulators gain after k was picked: one addition per pick.
    gains = np.tile(np.array(weights, np.int64), (num_sources, 1))
    gains[np.diag_indices(num_sources)] -= period
    rows = list(gains)
    charged = np.array(weights, np.int64)
    largest, add = charged.argmax, np.add
    picks = array("B" if num_sources <= 256 else "H", bytes(length * (1 + (num_sources > 256))))
    for i in range(length):
        k = largest()
        picks[i] = k  # pyright: ignore[reportArgumentType,reportCallIssue]
        add(charged, rows[k], charged)
    return picks
