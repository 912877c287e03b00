"""Smooth weighted round-robin as a table of one period.

Every pick adds each weight to its source's accumulator, picks the source with the largest (ties:
the earlier source) and subtracts the sum of weights from it. After a period, the sum of weights
over their gcd, the accumulators are zero again, so any position is a table lookup. If accumulators
start at what earlier stages still owe each source instead of zero, the picks repeat only after some
first picks (the lead), usually one period of them. A table of 10^6 picks takes about half a second,
once per set of weights.
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
OWED_UNIT = 10**6  # parts of a sequence, in which debts to sources are counted


def swrr_until_met(
    weights: Sequence[int], quotas: Sequence[int], owed: Sequence[int]
) -> tuple[PeriodTable, int]:
    """Picks with accumulators that start at the debts to sources, in 1 / OWED_UNIT sequences, and
    the number of picks after which the first source has reached its quota."""
    divisor = math.gcd(*weights)
    reduced = tuple(weight // divisor for weight in weights)
    period = sum(reduced)
    length = sum(quotas)
    if any(owed):
        table = period_table(reduced, length, tuple(own * period // OWED_UNIT for own in owed))
    else:
        table = period_table(reduced, min(period, length))
    last = min(table.nth_pick(source, quota - 1) for source, quota in enumerate(quotas))
    return table, int(last) + 1


@dataclass(frozen=True, slots=True)
class PeriodTable:
    """The first picks of an order: a lead and one period that repeats, or as many picks as the
    stage can use.

    lead: picks before the period. weights: int64 [k], picks of each source in a period. picks:
    uint8 or uint16 [length]. marks: int64 [length // 4096 + 1, k], counts before every 4,096th
    pick.
    """

    period: int
    lead: int
    weights: np.ndarray
    picks: np.ndarray
    marks: np.ndarray

    def counts_before(self, n: int) -> np.ndarray:
        """Picks of each source among the first `n`: int64 `[k]`."""
        full = max(0, n - self.lead) // self.period
        rest = n - full * self.period
        mark = rest // _MARK_EVERY
        tail = np.bincount(self.picks[mark * _MARK_EVERY : rest], minlength=len(self.weights))
        return full * self.weights + self.marks[mark] + tail

    def sources(self, start: int, stop: int) -> np.ndarray:
        """Source of each pick in `[start, stop)`: uint8 or uint16 `[stop - start]`."""
        first = start - max(0, start - self.lead) // self.period * self.period
        if first + stop - start <= len(self.picks):
            return self.picks[first : first + stop - start]
        at = np.arange(first, first + stop - start)
        return self.picks[at - np.maximum(0, at - self.lead) // self.period * self.period]

    def nth_pick(self, source: int, n: int) -> float:
        """Number of the pick that takes `source` for the n-th time (from 0); infinity if the table
        is too short for this pick."""
        inside = np.flatnonzero(self.picks == source)
        if n < len(inside):
            return int(inside[n])
        if len(self.picks) < self.lead + self.period:
            return math.inf
        full, rest = divmod(n - len(inside), int(self.weights[source]))
        first = len(inside) - int(self.weights[source])
        return (full + 1) * self.period + int(inside[first + rest])


@lru_cache(maxsize=32)
def period_table(weights: tuple[int, ...], length: int, start: tuple[int, ...] = ()) -> PeriodTable:
    """A table of at most `length` picks; the accumulators start at `start`, or at zero. Cached, so
    that ranks in one process and equal stages share a table."""
    period = sum(weights)
    num_sources = len(weights)
    charged = np.array(weights, np.int64)
    if start:
        charged += start
    parts = []
    lead = 0
    done = 0
    is_periodic = False
    while done < length and not is_periodic:
        lead = done
        before = charged.copy()
        parts.append(_swrr_picks(charged, weights, min(period, length - lead)))
        done += len(parts[-1])
        is_periodic = bool((charged == before).all())
    picks = np.frombuffer(b"".join(parts), np.uint8 if num_sources <= 256 else "u2")
    blocks = [
        np.bincount(picks[i : i + _MARK_EVERY], minlength=num_sources)
        for i in range(0, len(picks), _MARK_EVERY)
    ]
    marks = np.array(list(accumulate(blocks, initial=np.zeros(num_sources, np.int64))))
    return PeriodTable(period, lead, np.array(weights, np.int64), picks, marks)


def _swrr_picks(charged: np.ndarray, weights: tuple[int, ...], length: int) -> array[int]:
    """The next `length` picks. `charged` has the accumulators after the next weights were
    added; each pick changes `charged` in place."""
    num_sources = len(weights)
    period = sum(weights)
    # Row k is added to the accumulators after source k was picked: one addition per pick.
    gains = np.tile(np.array(weights, np.int64), (num_sources, 1))
    gains[np.diag_indices(num_sources)] -= period
    rows = list(gains)
    largest = charged.argmax
    add = np.add
    picks = array("B" if num_sources <= 256 else "H", bytes(length * (1 + (num_sources > 256))))
    for i in range(length):
        k = largest()
        picks[i] = k  # pyright: ignore[reportArgumentType,reportCallIssue]
        add(charged, rows[k], charged)
    return picks
