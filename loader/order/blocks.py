"""Exact shares at block ends in closed form, random order inside a block.

After n sequences source i has had floor(n x share + phase), its phase a fraction drawn once, and
the heaviest source has the rest. So a source is never more than one sequence from its share at a
block's end, however small the share and long the run, and no position costs more than another.
`block` has blocks of 2,048 sequences, `epoch_weighted` of one pass over the data, `weighted_random`
a single one: drawing without replacement. Block-deterministic mixing as in levanter, without its
rounding per block.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from loader.order.arrangement import Arrangement
from loader.order.shuffle import key_of

BLOCK_SIZE = 2048


class Pace:
    """An endless stream with fixed shares: after `sum(shares)` sequences a source has had exactly
    its share. A block has more than `block_size` sequences where the heaviest source could not give
    way to all others within one. `key` says which phases and orders."""

    def __init__(self, shares: Sequence[int], block_size: int, key: int) -> None:
        self._shares, self._key = list(shares), key
        self._total = sum(shares)
        self._filler = max(range(len(self._shares)), key=self._shares.__getitem__)
        least = -(-(len(self._shares) - 1) * self._total // self._shares[self._filler])
        self._size = max(1, block_size, least)
        self._phases = [key_of(key, i) * self._total >> 64 for i in range(len(self._shares))]
        self._number, self._block = -1, Arrangement([0] * len(self._shares), 0)
        self._before = [0] * len(self._shares)

    def counts_at(self, n: int) -> list[int]:
        """Sequences of each source among the first `n`, where `n` is a block's end."""
        counts = [
            (n * share + phase) // self._total for share, phase in zip(self._shares, self._phases)
        ]
        counts[self._filler] += n - sum(counts)
        return counts

    def counts_before(self, n: int) -> np.ndarray:
        """Sequences of each source among the first `n`: int64 `[num_sources]`."""
        if n == 0:
            return np.zeros(len(self._shares), np.int64)
        start, _ = self._open(n - 1)
        return np.array(self._before, np.int64) + self._block.counts_before(n - start)

    def sources(self, start: int, stop: int) -> np.ndarray:
        """Source of each sequence in `[start, stop)`: uint8 or uint16 `[stop - start]`."""
        parts = []
        while start < stop:
            first, end = self._open(start)
            parts.append(self._block.sources(start - first, min(stop, end) - first))
            start = end
        return np.concatenate(parts) if parts else np.empty(0, np.uint8)

    def first_met(self, quotas: Sequence[int]) -> int:
        """Number of sequences after which a source has first had its quota (each above 0)."""
        met = min(
            -(-(quota * self._total - phase) // share)
            for quota, share, phase in zip(quotas, self._shares, self._phases)
        )
        # The closed form of the filler is another, within the number of sources.
        met += len(quotas)
        blocks = range(self._number_of(max(met - 1, 0)) + 1)
        number = bisect_left(blocks, True, key=lambda b: self._is_met(self._end(b), quotas))
        start = self._end(number - 1)
        inside = range(start + 1, self._end(number) + 1)
        return inside[
            bisect_left(inside, True, key=lambda n: bool((self.counts_before(n) >= quotas).any()))
        ]

    def _is_met(self, end: int, quotas: Sequence[int]) -> bool:
        return any(count >= quota for count, quota in zip(self.counts_at(end), quotas))

    def _number_of(self, n: int) -> int:
        # The rest of a period that is no whole block belongs to its last one.
        per_period = max(1, self._total // self._size)
        period, inside = divmod(n, self._total)
        return period * per_period + min(inside // self._size, per_period - 1)

    def _end(self, number: int) -> int:
        per_period = max(1, self._total // self._size)
        period, inside = divmod(number + 1, per_period)
        return period * self._total + inside * self._size

    def _open(self, n: int) -> tuple[int, int]:
        """Open the block that holds sequence `n`; its start and end."""
        number = self._number_of(n)
        start, end = self._end(number - 1), self._end(number)
        if number != self._number:
            self._before = self.counts_at(start)
            counts = [b - a for a, b in zip(self._before, self.counts_at(end))]
            self._number, self._block = number, Arrangement(counts, key_of(self._key, -1, number))
        return start, end


def paced_until_met(
    weights: Sequence[int], quotas: Sequence[int], block_size: int, key: int
) -> tuple[Pace, int]:
    """The stream of some sources, and for how many sequences it is good: until a source has first
    had its quota. Quotas that are the weights' shares, rounded, are followed themselves; then all
    are met together at the end.
    """
    total, num_sequences = sum(weights), sum(quotas)
    if all(abs(q * total - w * num_sequences) <= total for q, w in zip(quotas, weights)):
        return Pace(quotas, block_size, key), num_sequences
    scale = max(1, -(-block_size // total))
    pace = Pace([weight * scale for weight in weights], block_size, key)
    return pace, pace.first_met(quotas)
