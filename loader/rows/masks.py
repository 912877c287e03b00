"""Targets that a plan masks: spans of tokens on the axis of positions, found by bisection."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from loader.errors import PlanError
from loader.files.format import Manifest
from loader.files.spans import IGNORE_INDEX
from loader.plan.records import MaskedTokens

_Pieces = list[tuple[int, int]]


class Masks:
    """The masked tokens of a plan's sources, whose manifests lie end to end in this order. Raises
    PlanError where a manifest has no such file, or the file fewer tokens (E-PLAN-FORMAT)."""

    def __init__(
        self, masked: Sequence[MaskedTokens], names: Sequence[str], manifests: Sequence[Manifest]
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
                    "no such tokens to mask",
                    where=f"source {row.source!r}: {row.file}",
                    found=f"tokens {row.start} to {row.end}",
                    expected=f"a file of the manifest, of {row.end} tokens or more",
                    code="E-PLAN-FORMAT",
                )
            spans.append((at + row.start, at + row.end))
        # Sorted by their ends as well: a span takes in those inside of it.
        merged: list[list[int]] = []
        for start, end in sorted(spans):
            if merged and start <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], end)
            else:
                merged.append([start, end])
        self._starts, self._ends = ([span[i] for span in merged] for i in (0, 1))

    def apply(self, targets: np.ndarray, pieces: _Pieces) -> None:
        """Mask the targets of one row. They lie in `pieces` of its source: (position, length)."""
        at = 0
        for position, length in pieces:
            i = bisect_right(self._ends, position)
            while i < len(self._ends) and self._starts[i] < position + length:
                first, stop = max(self._starts[i], position), min(self._ends[i], position + length)
                targets[at + first - position : at + stop - position] = IGNORE_INDEX
                i += 1
            at += length
