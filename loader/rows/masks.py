"""The masked tokens of a plan, as spans on the axis of positions."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from loader.errors import PlanError
from loader.files.format import Manifest
from loader.plan.records import MaskedTokens

_Pieces = list[tuple[int, int]]


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

    def inside(self, source: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Number of masked tokens of each range of a source: int64 `[n]`. source: its start and its
        end on the axis. Ranges may go beyond the end: then they wrap."""
        start, end = source
        first, last = self.before(source)
        rounds, places = np.divmod(np.stack([starts, ends]) - start, end - start)
        return np.diff(rounds * (last - first) + self.before(start + places), axis=0)[0]

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
