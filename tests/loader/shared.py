"""What tests of the loader share: opening and reading one, and twins of its policies."""

from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from loader import DeterministicLoader, build_loader


def open_loader(cfg: object, *args: Any, **kwargs: Any) -> DeterministicLoader:
    """A loader of numpy arrays; arguments as those of `build_loader`."""
    return build_loader(cfg, *args, backend="numpy", **kwargs)[0]


def rows_of(batches: Iterable[tuple[Any, Any]]) -> np.ndarray:
    """Batches as rows of seq_len + 1."""
    return np.concatenate([np.concatenate([i, t[:, -1:]], axis=1) for i, t in batches])


def all_rows(loader: DeterministicLoader) -> np.ndarray:
    """What is left of a loader as rows of seq_len + 1."""
    if loader.step == loader.num_steps:
        return np.empty((0, loader.plan.seq_len + 1), np.int64)
    return rows_of(loader)


def remainders(n: int, weights: dict[str, int], owed: dict[str, Fraction]) -> dict[str, int]:
    """Sequences of each source: its share and what it is owed, by largest remainder. A source that
    is ahead by more than its share gets none, and takes no part."""
    names = list(weights)
    while True:
        rest, total = n - sum(owed[x] for x in names), sum(weights[x] for x in names)
        ideal = {x: rest * Fraction(weights[x], total) + owed[x] for x in names}
        if all(share >= 0 for share in ideal.values()):
            break
        names = [x for x in names if ideal[x] >= 0]
    shares = {x: int(ideal[x]) for x in names}
    by_rest = sorted(names, key=lambda x: shares[x] - ideal[x])
    for x in by_rest[: n - sum(shares.values())]:
        shares[x] += 1
    return {x: shares.get(x, 0) for x in weights}


def check_least_consumed(
    picks: Sequence[str], weights: dict[str, int], owed: dict[str, Fraction]
) -> None:
    """Each pick is of the source that has given least for its weight, of those that give more."""
    drawn = {name: -owed.get(name, Fraction(0)) for name in weights}
    left = {name: picks.count(name) for name in weights}
    for name in picks:
        level = {n: drawn[n] / weights[n] for n in weights if left[n]}
        assert level[name] <= min(level.values()) + Fraction(1, 10**6)
        drawn[name] += 1
        left[name] -= 1
