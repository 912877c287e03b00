"""The source of each sequence of a stage, as a pure function of the sequence's number.

Every policy is an endless stream. A stage reads it until a source has reached its quota, then drops
this source and reads a new stream of the others (the next stretch), so that every source reaches
its quota. Stretches before a position are opened once, at most one per source.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple, Protocol

import numpy as np

from loader.errors import PlanError
from loader.order.blocks import BLOCK_SIZE, paced_until_met
from loader.order.least_consumed import LeastConsumed
from loader.order.shuffle import key_of
from loader.order.swrr import OWED_UNIT, swrr_until_met

POLICIES = ("swrr", "block", "least_consumed", "weighted_random", "epoch_weighted")


def weight_unit(policy: str) -> int:
    """The sum of a stage's integer weights, up to rounding. `swrr` makes a table of this size; the
    other policies keep every weight above 10^-18 of the sum."""
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


class Shares(NamedTuple):
    """For each source of a stage: its integer weight, its number of sequences and, after a remix,
    its debt, in units of 1 / OWED_UNIT sequences."""

    weights: Sequence[int]
    quotas: Sequence[int]
    owed: Sequence[int] = ()


# Opens a stretch, from the shares of the sources that have not reached their quota, the sequences
# already drawn from each, and a seed. Returns the stream of these sources, and the number of
# sequences for which it is valid.
OpenStretch = Callable[[Shares, list[int], int], tuple[Picks, int]]


class Sequential:
    """Reads each source up to its quota, one source after the other. `quotas`: sequences per
    source."""

    def __init__(self, quotas: Sequence[int]) -> None:
        self._quotas = np.array(quotas, np.int64)
        self._ends = np.cumsum(self._quotas)
        self.num_sequences = int(self._ends[-1])

    def counts_before(self, n: int) -> np.ndarray:
        return np.clip(n - (self._ends - self._quotas), 0, self._quotas)

    def sources(self, start: int, stop: int) -> np.ndarray:
        return np.searchsorted(self._ends, np.arange(start, stop), side="right")


@dataclass(frozen=True, slots=True)
class Stretch:
    """Sequences `[start, stop)` of a longer order, drawn from a part of its sources.

    base: int64 [num_sources], sequences of each source before `start`. columns: intp [k], the
    sources that `picks` counts. lr_scale: the learning rate's factor.
    """

    start: int
    stop: int
    base: np.ndarray
    columns: np.ndarray
    picks: Picks
    lr_scale: float = 1.0

    def counts_before(self, n: int) -> np.ndarray:
        """Sequences of each source among the first `n` of the longer order."""
        counts = self.base.copy()
        counts[self.columns] += self.picks.counts_before(n - self.start)
        return counts

    def sources(self, start: int, stop: int) -> np.ndarray:
        """Source of each sequence in `[start, stop)` of the longer order."""
        return self.columns[self.picks.sources(start - self.start, stop - self.start)]


class UntilMet:
    """A policy's streams until all sources have reached their quotas. `open_stretch` makes the
    stream of the remaining sources and returns the number of sequences for which it is valid: until
    a source has reached its quota, or longer if no source exceeds its quota in this time."""

    def __init__(self, open_stretch: OpenStretch, shares: Shares, key: int) -> None:
        for i, (weight, quota) in enumerate(zip(shares.weights, shares.quotas, strict=True)):
            if quota > 0 and weight <= 0:
                raise PlanError(
                    "a source has a quota but no weight", where=f"source {i}", found=quota
                )
        self._open_stretch = open_stretch
        self._key = key
        self._weights = shares.weights
        self._owed = shares.owed or [0] * len(shares.quotas)
        self._quotas = np.array(shares.quotas, np.int64)
        self._stretches: list[Stretch] = []
        self.num_sequences = int(self._quotas.sum())

    def counts_before(self, n: int) -> np.ndarray:
        if n == 0:
            return np.zeros(len(self._quotas), np.int64)
        return self._stretch_at(n - 1).counts_before(n)

    def sources(self, start: int, stop: int) -> np.ndarray:
        parts = [np.empty(0, np.intp)]
        while start < stop:
            stretch = self._stretch_at(start)
            end = min(stop, stretch.stop)
            parts.append(stretch.sources(start, end))
            start = end
        return np.concatenate(parts)

    def _stretch_at(self, n: int) -> Stretch:
        """The stretch that contains sequence `n`; earlier stretches are opened first."""
        if not 0 <= n < self.num_sequences:
            raise IndexError(f"sequence {n} of {self.num_sequences}")
        # A new list replaces the old list, since a thread that reads ahead uses the old list too.
        found = self._stretches
        while not found or found[-1].stop <= n:
            start = found[-1].stop if found else 0
            base = found[-1].counts_before(start) if found else np.zeros_like(self._quotas)
            left = self._quotas - base
            active = np.flatnonzero(left > 0)
            shares = Shares(
                [self._weights[i] for i in active.tolist()],
                left[active].tolist(),
                [self._owed[i] for i in active.tolist()],
            )
            key = key_of(self._key, len(found))
            picks, length = self._open_stretch(shares, base[active].tolist(), key)
            self._stretches = found = [*found, Stretch(start, start + length, base, active, picks)]
        return found[bisect_right(found, n, key=lambda stretch: stretch.start) - 1]


def make_schedule(
    policy: str, shares: Shares, *, key: int = 0, seq_len: int = 1, pass_sequences: int = 1
) -> Schedule:
    """The order of sources in a stage.

    key: seed of the stage. seq_len: tokens of a sequence, which `least_consumed` counts.
    pass_sequences: sequences in one pass over all data, an epoch of `epoch_weighted`. Raises
    PlanError if a source has a quota and no weight.
    """
    block_sizes = {"block": BLOCK_SIZE, "epoch_weighted": pass_sequences}
    block_size = block_sizes.get(policy, sum(shares.quotas))

    def open_stretch(shares: Shares, drawn: list[int], key: int) -> tuple[Picks, int]:
        weights, quotas, owed = shares
        if policy == "least_consumed":
            behind = [n - Fraction(own, OWED_UNIT) if own else n for n, own in zip(drawn, owed)]
            stream = LeastConsumed(weights, [seq_len * n for n in behind], seq_len, key)
            return stream, stream.first_exhaustion(quotas)
        if any(drawn):
            owed = [0] * len(quotas)  # the first stretch adds all debts to the shares
        if policy == "swrr":
            return swrr_until_met(weights, quotas, owed)
        return paced_until_met(weights, quotas, block_size, key, owed)

    return UntilMet(open_stretch, shares, key)
