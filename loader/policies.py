"""Which source each sequence of a stage comes from, as a pure function of its number.

A schedule answers two questions for any position without replaying the stage: how many sequences
of each source lie before it, and which sources follow. `Swrr` is smooth weighted round-robin: every
pick adds each weight to its accumulator, takes the largest (ties: the earlier source) and charges
it the sum of weights. Its accumulators return to zero after W / gcd picks, so one period is a table
and any position costs a lookup. A source that has met its quota leaves; the others start again from
zero accumulators with their own table, so no source starves. While no quota is met the sequence is
the classical one. A table of 10^6 picks takes about half a second, once per set of sources.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Protocol

import numpy as np

from loader.errors import PlanError

_MARK_EVERY = 4096


class Schedule(Protocol):
    """Order of sources in one stage."""

    num_sequences: int

    def counts_before(self, n: int) -> np.ndarray:
        """Sequences of each source among the first `n`: int64 `[num_sources]`."""
        ...

    def sources(self, start: int, stop: int) -> np.ndarray:
        """Source of each sequence in `[start, stop)`: intp `[stop - start]`."""
        ...


class Sequential:
    """Each source whole, one after the other. Args: `quotas`, sequences per source."""

    def __init__(self, quotas: Sequence[int]) -> None:
        self._quotas = np.array(quotas, np.int64)
        self._ends = np.cumsum(self._quotas)
        self.num_sequences = int(self._ends[-1])

    def counts_before(self, n: int) -> np.ndarray:
        """See `Schedule`."""
        return np.clip(n - (self._ends - self._quotas), 0, self._quotas)

    def sources(self, start: int, stop: int) -> np.ndarray:
        """See `Schedule`."""
        return np.searchsorted(self._ends, np.arange(start, stop), side="right")


class Swrr:
    """Smooth weighted round-robin until quotas are met.

    Args:
        weights: Fixed-point weights, one per source.
        quotas: Sequences of each source; the stage ends when all are met.
        stop_at_first: End the stage when the first quota is met instead.

    Raises:
        PlanError: A source has a quota and no weight, so its quota can never be met.
    """

    def __init__(
        self, weights: Sequence[int], quotas: Sequence[int], *, stop_at_first: bool = False
    ) -> None:
        for i, (weight, quota) in enumerate(zip(weights, quotas, strict=True)):
            if quota > 0 and weight <= 0:
                raise PlanError("a quota without weight", where=f"source {i}", found=quota)
        self._weights = np.array(weights, np.int64)
        self._quotas = np.array(quotas, np.int64)
        self._segments: list[_Segment] = []
        self.num_sequences = int(self._quotas.sum())
        if stop_at_first and self.num_sequences:
            self.num_sequences = self._segment_at(0).stop

    def counts_before(self, n: int) -> np.ndarray:
        """See `Schedule`."""
        if n == 0:
            return np.zeros(len(self._quotas), np.int64)
        segment = self._segment_at(n - 1)
        return segment.counts_before(n)

    def sources(self, start: int, stop: int) -> np.ndarray:
        """See `Schedule`."""
        parts = [np.empty(0, np.intp)]
        while start < stop:
            segment = self._segment_at(start)
            end = min(stop, segment.stop)
            picks = segment.table.picks_between(start - segment.start, end - segment.start)
            parts.append(segment.active[picks])
            start = end
        return np.concatenate(parts)

    def _segment_at(self, n: int) -> _Segment:
        """The segment that holds pick `n`; earlier ones are made on the way."""
        if not 0 <= n < self.num_sequences:
            raise IndexError(f"sequence {n} of {self.num_sequences}")
        while not self._segments or self._segments[-1].stop <= n:
            self._segments.append(self._next_segment())
        return self._segments[bisect_right(self._segments, n, key=lambda s: s.start) - 1]

    def _next_segment(self) -> _Segment:
        start, base = 0, np.zeros(len(self._quotas), np.int64)
        if self._segments:
            start = self._segments[-1].stop
            base = self._segments[-1].counts_before(start)
        left = self._quotas - base
        active = np.flatnonzero(left > 0)
        weights = self._weights[active]
        weights //= np.gcd.reduce(weights)
        period = int(weights.sum())
        table = _period_table(tuple(weights.tolist()), min(period, int(left.sum())))
        # The pick that meets a quota is the last of its segment.
        last = min(table.nth_pick(i, int(left[source]) - 1) for i, source in enumerate(active))
        return _Segment(start, start + int(last) + 1, base, active, table)


@dataclass(frozen=True, slots=True)
class _Segment:
    """Picks `[start, stop)`: one set of active sources, from zero accumulators.

    base: int64 [num_sources], picks of each source before `start`. active: intp [k], its sources.
    """

    start: int
    stop: int
    base: np.ndarray
    active: np.ndarray
    table: _PeriodTable

    def counts_before(self, n: int) -> np.ndarray:
        counts = self.base.copy()
        counts[self.active] += self.table.counts_before(n - self.start)
        return counts


@dataclass(frozen=True, slots=True)
class _PeriodTable:
    """The first picks of one period: all of it, or as many as the stage can use.

    weights: int64 [k], picks of each source in a period. picks: uint8 or uint16 [length].
    marks: int64 [length // 4096 + 1, k], counts before every 4,096th pick.
    """

    period: int
    weights: np.ndarray
    picks: np.ndarray
    marks: np.ndarray

    def counts_before(self, n: int) -> np.ndarray:
        full, rest = divmod(n, self.period)
        mark = rest // _MARK_EVERY
        tail = np.bincount(self.picks[mark * _MARK_EVERY : rest], minlength=len(self.weights))
        return full * self.weights + self.marks[mark] + tail

    def picks_between(self, start: int, stop: int) -> np.ndarray:
        first = start % self.period
        if first + stop - start <= len(self.picks):
            return self.picks[first : first + stop - start]
        return self.picks[np.arange(start, stop) % self.period]

    def nth_pick(self, source: int, n: int) -> float:
        """Number of the pick that takes `source` for the n-th time (from 0).

        Where the table is only a part of the period and does not reach that pick, some number past
        its end.
        """
        full, rest = divmod(n, int(self.weights[source]))
        inside = np.flatnonzero(self.picks == source)
        if rest >= len(inside):
            return math.inf
        return full * self.period + int(inside[rest])


@lru_cache(maxsize=32)
def _period_table(weights: tuple[int, ...], length: int) -> _PeriodTable:
    """Make a table of `length` picks. Cached: ranks in one process and equal stages share it."""
    period = sum(weights)
    picks = np.frombuffer(_swrr_picks(weights, length), np.uint8 if len(weights) <= 256 else "u2")
    blocks = [
        np.bincount(picks[i : i + _MARK_EVERY], minlength=len(weights))
        for i in range(0, length, _MARK_EVERY)
    ]
    marks = np.array(list(accumulate(blocks, initial=np.zeros(len(weights), np.int64))))
    return _PeriodTable(period, np.array(weights, np.int64), picks, marks)


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
