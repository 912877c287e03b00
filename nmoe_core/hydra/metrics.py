"""How well predictions agree with the oracle, and what source or length alone would have given.

Rank correlations use mean ranks for ties. A predictor that knows only a document's source, or only
its length, is shown beside every head: agreement below it says that nothing was learned about the
text. Intervals are percentile bootstraps with a fixed seed, so they repeat.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nmoe_core.hydra.scores import DIMENSIONS, aggregate

NUM_RESAMPLES = 200
NUM_LENGTH_GROUPS = 10


def mean_ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 0, ties sharing their mean: float64 `[N]`."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts + 1) / 2)[inverse]


def spearman(a: np.ndarray, b: np.ndarray) -> float | None:
    """Rank correlation of two arrays `[N]`; None when one is constant or N is below 3."""
    if len(a) < 3:
        return None
    x, y = mean_ranks(a), mean_ranks(b)
    x, y = x - x.mean(), y - y.mean()
    scale = float(np.sqrt((x @ x) * (y @ y)))
    return float(x @ y) / scale if scale > 0 else None


def spearman_interval(a: np.ndarray, b: np.ndarray) -> tuple[float, float] | None:
    """95 % bootstrap interval of the rank correlation; None when it is not defined."""
    rng = np.random.default_rng(0)
    draws = (rng.integers(0, len(a), len(a)) for _ in range(NUM_RESAMPLES))
    values = [v for draw in draws if (v := spearman(a[draw], b[draw])) is not None]
    if len(values) < NUM_RESAMPLES // 2:
        return None
    low, high = np.quantile(values, [0.025, 0.975])
    return round(float(low), 6), round(float(high), 6)


def within_groups(a: np.ndarray, b: np.ndarray, groups: Sequence[str]) -> float | None:
    """Rank correlation inside each group, averaged by the size of the groups that have one."""
    names = np.asarray(groups)
    total = weight = 0.0
    for name in sorted(set(groups)):
        member = names == name
        value = spearman(a[member], b[member])
        if value is not None:
            total += value * member.sum()
            weight += member.sum()
    return float(total / weight) if weight else None


def group_means(
    train_groups: Sequence[Any], train_values: np.ndarray, groups: Sequence[Any]
) -> np.ndarray:
    """Predict each item of `groups` by its group's mean in training, or by the overall mean."""
    sums: dict[Any, list[float]] = {}
    for group, value in zip(train_groups, train_values.tolist()):
        sums.setdefault(group, []).append(value)
    means = {group: float(np.mean(values)) for group, values in sums.items()}
    overall = float(train_values.mean())
    return np.array([means.get(group, overall) for group in groups])


def length_groups(train_lengths: np.ndarray, lengths: np.ndarray) -> tuple[list[int], list[int]]:
    """Group numbers of both sets by the deciles of the training lengths."""
    edges = np.quantile(train_lengths, np.arange(1, NUM_LENGTH_GROUPS) / NUM_LENGTH_GROUPS)
    return np.digitize(train_lengths, edges).tolist(), np.digitize(lengths, edges).tolist()


def agreement(predicted: np.ndarray, oracle: np.ndarray, sources: Sequence[str]) -> dict[str, Any]:
    """Agreement of predicted scores `[N, 5]` with the oracle's.

    Returns:
        `n`; `mae` and `r2` of each dimension, in grades; `spearman` of the uniform aggregate with
        its `spearman_ci95`, and `spearman_within_source`. Undefined values are None.
    """
    error = predicted - oracle
    mae, mse, spread = np.abs(error).mean(0), (error**2).mean(0), oracle.var(0)
    a, b = aggregate(predicted), aggregate(oracle)
    return {
        "n": len(oracle),
        "mae": {name: _round(value) for name, value in zip(DIMENSIONS, mae)},
        "r2": {
            name: _round(1 - m / s) if s > 0 else None
            for name, m, s in zip(DIMENSIONS, mse, spread)
        },
        "spearman": _round(spearman(a, b)),
        "spearman_ci95": spearman_interval(a, b),
        "spearman_within_source": _round(within_groups(a, b, sources)),
    }


def baselines(
    train: tuple[np.ndarray, Sequence[str], np.ndarray],
    val: tuple[np.ndarray, Sequence[str], np.ndarray],
) -> dict[str, Any]:
    """What predictors that do not read the text reach on val, after the same training labels.

    Args:
        train: The oracle's scores `[N, 5]`, sources, and document lengths `[N]` in tokens.
        val: The same of the val documents.

    Returns:
        `spearman_source_only`, `spearman_length_only`, and `mae_mean_only` of each dimension.
    """
    fitted, truth = aggregate(train[0]), aggregate(val[0])
    by_source = group_means(train[1], fitted, val[1])
    train_groups, val_groups = length_groups(train[2], val[2])
    by_length = group_means(train_groups, fitted, val_groups)
    constant = np.abs(val[0] - train[0].mean(0)).mean(0)
    return {
        "spearman_source_only": _round(spearman(by_source, truth)),
        "spearman_length_only": _round(spearman(by_length, truth)),
        "mae_mean_only": {name: _round(value) for name, value in zip(DIMENSIONS, constant)},
    }


def _round(value: float | None) -> float | None:
    return None if value is None else round(float(value), 6)
