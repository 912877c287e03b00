"""Counts of what the rows of a run hold, by source: tokens of documents, or masked targets."""

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import pairwise

import numpy as np

_CHUNK = 1 << 20


class RowCounts:
    """Sums over the rows that the run has read of each source.

    Rows are summed in reading order from the last requested position, so a count at every step
    costs only the rows of one step, and about 10 million rows per second.

    of_rows: what each of some windows of a source holds: integers `[n]`. order: windows of a source
    at positions `[start, stop)` of its reading order. passed: rows of each source that were read
    before the run. sizes: rows of a pass over each source, if every pass holds the same.
    """

    def __init__(
        self,
        of_rows: Callable[[int, np.ndarray], np.ndarray],
        order: Callable[[int, int, int], np.ndarray],
        passed: Sequence[int],
        sizes: Sequence[int] = (),
    ) -> None:
        self._of_rows = of_rows
        self._order = order
        self._passed = passed
        self._sizes = sizes
        # For each source: a pass, a position in the pass, and the sum of the pass before it.
        self._last = [(0, 0 if sizes else n, 0) for n in passed]

    def before(self, counts: Sequence[int]) -> list[int]:
        """The sum over the first `counts[i]` rows that the run reads of each source i."""
        passed = self._of_passed
        return [
            self._first(source, rows + count) - before
            for source, (rows, count, before) in enumerate(zip(self._passed, counts, passed))
        ]

    @cached_property
    def _of_passed(self) -> list[int]:
        return [self._first(source, count) for source, count in enumerate(self._passed)]

    @cached_property
    def _of_passes(self) -> list[int]:
        return [self._sum(i, np.arange, 0, size) for i, size in enumerate(self._sizes)]

    def _first(self, source: int, count: int) -> int:
        """The sum over the first `count` rows of a source; without sizes, over those of the run."""
        size = self._sizes[source] if self._sizes else 0
        number, place = divmod(count, size) if size else (0, count)
        known, start, found = self._last[source]
        if known != number or start > place:
            start = 0 if self._sizes else self._passed[source]
            found = 0

        def in_order(a: int, b: int) -> np.ndarray:
            return self._order(source, number * size + a, number * size + b)

        found += self._sum(source, in_order, start, place)
        self._last[source] = (number, place, found)
        return number * self._of_passes[source] + found if number else found

    def _sum(
        self, source: int, windows: Callable[[int, int], np.ndarray], start: int, stop: int
    ) -> int:
        parts = pairwise([*range(start, stop, _CHUNK), stop])
        return sum(int(self._of_rows(source, windows(a, b)).sum()) for a, b in parts)
