"""Tokens of documents in the packed rows that a run has read; padding does not count.

Each row's number of tokens is kept, 4 bytes per row. Rows are summed in the order in which the run
reads them, on from the last place that was asked for, so a count at every step costs one step's
rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import pairwise

import numpy as np

_CHUNK = 1 << 20


class TokenCounts:
    """Tokens before a position, by source.

    Args:
        row_tokens: uint32 `[num_rows]` of each source, tokens of documents in each row.
        order: Rows of a source at places `[start, stop)` of the order in which it is read.
        passed: Rows of each source that were read before the run.
    """

    def __init__(
        self,
        row_tokens: Sequence[np.ndarray],
        order: Callable[[int, int, int], np.ndarray],
        passed: Sequence[int],
    ) -> None:
        self._row_tokens, self._order, self._passed = row_tokens, order, passed
        self._totals = [int(tokens.sum()) for tokens in row_tokens]
        # Of each source: an epoch, a place in it, and the tokens of the epoch before that place.
        self._last = [(0, 0, 0)] * len(row_tokens)

    def before(self, counts: Sequence[int]) -> list[int]:
        """Tokens in the first `counts[i]` rows that the run reads of each source i."""
        passed = self._passed_tokens
        return [
            self._first(source, rows + count) - before
            for source, (rows, count, before) in enumerate(zip(self._passed, counts, passed))
        ]

    @cached_property
    def _passed_tokens(self) -> list[int]:
        return [self._first(source, count) for source, count in enumerate(self._passed)]

    def _first(self, source: int, count: int) -> int:
        """Tokens in the first `count` rows of a source's order."""
        tokens = self._row_tokens[source]
        epoch, place = divmod(count, max(1, len(tokens)))
        known, start, found = self._last[source]
        if known != epoch or start > place:
            start, found = 0, 0
        for a, b in pairwise([*range(start, place, _CHUNK), place]):
            rows = self._order(source, epoch * len(tokens) + a, epoch * len(tokens) + b)
            found += int(tokens[rows].sum())
        self._last[source] = (epoch, place, found)
        return epoch * self._totals[source] + found
