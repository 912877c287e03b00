"""The masked tokens of a plan, as spans on the axis of positions."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import numpy as np

from loader.errors import PlanError
from loader.files.format import Manifest
from loader.plan.records import MaskedTokens

_Pieces = list[tuple[int, int]]
_CHUNK = 1 << 20


class Masks:
    """Masked tokens of the sources of a plan, with their manifests in the order of the axis, and
    the token that replaces them. Raises PlanError if a file or its tokens do not exist
    (E-PLAN-FORMAT)."""

    def __init__(
        self,
        masked: Sequence[MaskedTokens],
        names: Sequence[str],
        manifests: Sequence[Manifest],
        token: int,
    ) -> None:
        files = [(name, e) for name, manifest in zip(names, manifests) for e in manifest.shards]
        sizes = [entry.num_tokens for _, entry in files]
        axis = zip(files, accumulate(sizes, initial=0))
        places = {(name, entry.path): (at, entry.num_tokens) for (name, entry), at in axis}
        spans = []
        for row in masked:
            at, size = places.get((row.source, row.file), (0, 0))
            if row.end > size:
                raise PlanError(
                    "the tokens to mask do not exist",
                    where=f"source {row.source!r}: {row.file}",
                    found=f"tokens {row.start} to {row.end}",
                    expected=f"a file of the manifest with at least {row.end} tokens",
                    code="E-PLAN-FORMAT",
                )
            spans.append((at + row.start, at + row.end))
        # Overlapping spans are merged, in ascending order.
        merged: list[list[int]] = []
        for start, end in sorted(spans):
            if merged and start <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], end)
            else:
                merged.append([start, end])
        self._token = token
        self._starts = [start for start, _ in merged]
        self._ends = [end for _, end in merged]
        spans_of = np.array(merged, np.int64).reshape(-1, 2)
        self._bounds = spans_of[:, 0], np.append(0, spans_of[:, 1])
        self._sums = np.append(0, np.cumsum(spans_of[:, 1] - spans_of[:, 0]))

    def before(self, positions: np.ndarray) -> np.ndarray:
        """Number of masked tokens before each position of the axis: int64 `[n]` to int64 `[n]`."""
        starts, ends = self._bounds
        i = np.searchsorted(starts, positions, "right")
        return self._sums[i] - np.maximum(0, ends[i] - positions)

    def apply(self, row: np.ndarray, pieces: _Pieces) -> None:
        """Replace the masked tokens of the row. `pieces`: position and length of each contiguous
        piece of the row's tokens."""
        at = 0
        for position, length in pieces:
            i = bisect_right(self._ends, position)
            while i < len(self._ends) and self._starts[i] < position + length:
                first = max(self._starts[i], position)
                stop = min(self._ends[i], position + length)
                row[at + first - position : at + stop - position] = self._token
                i += 1
            at += length


class MaskedCounts:
    """Counts masked targets before a position, by source. Counting continues from the last
    requested position, at about 10 million windows per second.

    runs: start and end of contiguous targets in windows of a source: int64 `[n]` each, on the axis
    without wrapping. order, passed: see `loader.rows.packed.TokenCounts`. source_starts: starts of
    the sources on the axis, and their end.
    """

    def __init__(
        self,
        masks: Masks,
        runs: Callable[[int, np.ndarray], tuple[np.ndarray, np.ndarray]],
        order: Callable[[int, int, int], np.ndarray],
        passed: Sequence[int],
        source_starts: np.ndarray,
    ) -> None:
        self._masks = masks
        self._runs = runs
        self._order = order
        self._passed = passed
        self._spans = list(pairwise(source_starts.tolist()))
        # Per source: the window count of the last call, and the masked targets in that many
        # windows. The next call continues there.
        self._last = [(0, 0)] * len(passed)

    def before(self, counts: Sequence[int]) -> list[int]:
        """Number of masked targets in the first `counts[i]` windows that the run reads of each
        source i."""
        for source, (count, passed) in enumerate(zip(counts, self._passed)):
            start, found = self._last[source] if self._last[source][0] <= count else (0, 0)
            for a, b in pairwise([*range(start, count, _CHUNK), count]):
                windows = self._order(source, passed + a, passed + b)
                starts, ends = self._runs(source, windows)
                found += int((self._up_to(source, ends) - self._up_to(source, starts)).sum())
            self._last[source] = count, found
        return [found for _, found in self._last]

    def _up_to(self, source: int, positions: np.ndarray) -> np.ndarray:
        """Number of masked tokens of a source before positions; positions after the source's end
        wrap."""
        start, end = self._spans[source]
        first, total = self._masks.before(np.array([start, end]))
        rounds, places = np.divmod(positions - start, end - start)
        return rounds * (total - first) + self._masks.before(start + places) - first
