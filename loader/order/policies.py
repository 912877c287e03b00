"""Which source each sequence of a stage comes from, as a pure function of its number.

Every policy is a stream that goes on for ever; a stage reads it until a source has met its quota,
then lets that source go and reads a new stream of the others, so that each quota is met and none
starves. Stretches before a position are opened once, at most one per source.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from loader.errors import PlanError
from loader.order.blocks import BLOCK_SIZE, paced_until_met
from loader.order.least_consumed import LeastConsumed
from loader.order.shuffle import key_of
from loader.order.swrr import swrr_until_met

POLICIES = ("swrr", "block", "least_consumed", "weighted_random", "epoch_weighted")


def weight_unit(policy: str) -> int:
    """What the integer weights of a stage sum to, but for rounding. `swrr` makes a table of that
    size; the others lose no weight above 10^-18 of the sum."""
    return 10**6 if policy == "swrr" else 10**18


class Picks(Protocol):
    """An order of sources."""

    def counts_before(self, n: int) -> np.ndarray:
        """Sequences of each source among the first `n`: int64 `[num_sources]`."""
        ...

    def sources(self, start: int, stop: int) -> np.ndarray:
        """Source of each sequence in `[start, stop)`: an unsigned or intp array."""
        ...


class Schedule(Picks, Protocol):
    """Order of sources in one stage."""

    num_sequences: int


# Weights, quotas and sequences drawn before, of the sources that have not met their quota; seed.
OpenStretch = Callable[[list[int], list[int], list[int], int], tuple[Picks, int]]


class Sequential:
    """Each source whole, one after the other. Args: `quotas`, sequences per source."""

    def __init__(self, quotas: Sequence[int]) -> None:
        self._quotas = np.array(quotas, np.int64)
        self._ends = np.cumsum(self._quotas)
        self.num_sequences = int(self._ends[-1])

    def counts_before(self, n: int) -> np.ndarray:
        return np.clip(n - (self._ends - self._quotas), 0, self._quotas)

    def sources(self, start: int, stop: int) -> np.ndarray:
        return np.searchsorted(self._ends, np.arange(start, stop), side="right")


@dataclass(frozen=True, slots=True)
class _Segment:
    """Sequences `[start, stop)`: one set of active sources.

    base: int64 [num_sources], sequences of each source before `start`. active: intp [k].
    """

    start: int
    stop: int
    base: np.ndarray
    active: np.ndarray
    picks: Picks

    def counts_before(self, n: int) -> np.ndarray:
        counts = self.base.copy()
        counts[self.active] += self.picks.counts_before(n - self.start)
        return counts


class UntilMet:
    """A policy's streams until quotas are met. `open_stretch` makes the stream of some sources and
    says for how many sequences it is good: until a source has had its quota, or longer where it
    exceeds none."""

    def __init__(
        self, open_stretch: OpenStretch, weights: Sequence[int], quotas: Sequence[int], key: int
    ) -> None:
        for i, (weight, quota) in enumerate(zip(weights, quotas, strict=True)):
            if quota > 0 and weight <= 0:
                raise PlanError("a quota without weight", where=f"source {i}", found=quota)
        self._open_stretch, self._key = open_stretch, key
        self._weights = list(weights)
        self._quotas = np.array(quotas, np.int64)
        self._segments: list[_Segment] = []
        self.num_sequences = int(self._quotas.sum())

    def counts_before(self, n: int) -> np.ndarray:
        if n == 0:
            return np.zeros(len(self._quotas), np.int64)
        return self._segment_at(n - 1).counts_before(n)

    def sources(self, start: int, stop: int) -> np.ndarray:
        parts = [np.empty(0, np.intp)]
        while start < stop:
            segment = self._segment_at(start)
            end = min(stop, segment.stop)
            picks = segment.picks.sources(start - segment.start, end - segment.start)
            parts.append(segment.active[picks])
            start = end
        return np.concatenate(parts)

    def _segment_at(self, n: int) -> _Segment:
        """The segment that holds sequence `n`; earlier ones are made on the way."""
        if not 0 <= n < self.num_sequences:
            raise IndexError(f"sequence {n} of {self.num_sequences}")
        segments = self._segments
        while not segments or segments[-1].stop <= n:
            start, base = 0, np.zeros(len(self._quotas), np.int64)
            if segments:
                start = segments[-1].stop
                base = segments[-1].counts_before(start)
            left = self._quotas - base
            active = np.flatnonzero(left > 0)
            weights = [self._weights[i] for i in active]
            key = key_of(self._key, len(segments))
            quotas, drawn = left[active].tolist(), base[active].tolist()
            picks, length = self._open_stretch(weights, quotas, drawn, key)
            segments.append(_Segment(start, start + length, base, active, picks))
        return segments[bisect_right(segments, n, key=lambda s: s.start) - 1]


def make_schedule(
    policy: str,
    weights: Sequence[int],
    quotas: Sequence[int],
    *,
    key: int = 0,
    seq_len: int = 1,
    pass_sequences: int = 1,
) -> Schedule:
    """The order of sources in a stage.

    Args:
        policy: One of `POLICIES`.
        weights, quotas: Integer weight, and number of sequences, of each source.
        key: Seed of the stage.
        seq_len: Tokens of a sequence; `least_consumed` counts them.
        pass_sequences: Sequences in one pass over all data: an epoch of `epoch_weighted`.

    Raises:
        PlanError: A source has a quota and no weight.
    """
    block_sizes = {"block": BLOCK_SIZE, "epoch_weighted": pass_sequences}
    block_size = block_sizes.get(policy, sum(quotas))

    def open_stretch(
        weights: list[int], quotas: list[int], drawn: list[int], key: int
    ) -> tuple[Picks, int]:
        if policy == "swrr":
            return swrr_until_met(weights, quotas)
        if policy == "least_consumed":
            stream = LeastConsumed(weights, [seq_len * n for n in drawn], seq_len, key)
            return stream, stream.first_met(quotas)
        return paced_until_met(weights, quotas, block_size, key)

    return UntilMet(open_stretch, weights, quotas, key)
