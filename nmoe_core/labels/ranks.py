"""Rank correlation, and intervals by resampling.

Rank correlation is implemented here because scipy's ranks and Spearman are 4 to 80 times slower,
and every bootstrap calls them 200 times. The bootstrap is implemented here because scipy's does not
support statistics that are undefined on some draws.
"""

from collections.abc import Callable, Sequence

import numpy as np

NUM_RESAMPLES = 200
MIN_ITEMS = 10  # with fewer items, percentile intervals cover far less than 95 %
Interval = tuple[float, float]


def bootstrap(
    statistic: Callable[[np.ndarray], float | None], num_items: int, edges: Interval = (-1.0, 1.0)
) -> Interval | None:
    """95 % percentile interval of a statistic, by bootstrap over rows with a fixed seed.

    Draws contain only rows of the sample, so they can agree by chance. If all draws give one value,
    or an end of the interval is at an edge of the statistic's range, the interval is widened by the
    largest share of other rows that a sample of this size misses with probability 2.5 %. Returns
    None if there are fewer than `MIN_ITEMS` items, or if the statistic is undefined on most draws.
    """
    if num_items < MIN_ITEMS:
        return None
    rng = np.random.default_rng(0)
    draws = (rng.integers(0, num_items, num_items) for _ in range(NUM_RESAMPLES))
    values = [v for draw in draws if (v := statistic(draw)) is not None]
    if len(values) < NUM_RESAMPLES // 2:
        return None
    low, high = np.quantile(values, [0.025, 0.975]).round(6).tolist()
    unseen = 1 - 0.025 ** (1 / num_items)
    least = max(edges[0], min(low, high - unseen)) if low == high or high >= edges[1] else low
    most = min(edges[1], max(high, low + unseen)) if low == high or low <= edges[0] else high
    return round(least, 6), round(most, 6)


def mean_ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 0; tied values get the mean of their ranks."""
    return _ranks(_places(values))


def spearman(a: np.ndarray, b: np.ndarray) -> float | None:
    """Rank correlation of two arrays `[N]`; None if one is constant or N is below 3."""
    return _correlation(_places(a), _places(b))


def spearman_interval(a: np.ndarray, b: np.ndarray) -> tuple[float, float] | None:
    """95 % bootstrap interval of the rank correlation; None as for `bootstrap`.

    Values are sorted only once: the ranks in a draw follow from how often the draw contains each
    value.
    """
    a = _places(a)
    b = _places(b)
    return bootstrap(lambda rows: _correlation(a[rows], b[rows]), len(a))


def within_groups(a: np.ndarray, b: np.ndarray, groups: Sequence[str] | np.ndarray) -> float | None:
    """Rank correlation within groups: the mean over the groups in which it is defined, weighted by
    group size."""
    return _within(_places(a), _places(b), _places(np.asarray(groups)))


def within_interval(a: np.ndarray, b: np.ndarray, groups: Sequence[str]) -> Interval | None:
    """95 % bootstrap interval of the rank correlation within groups; None as for `bootstrap`."""
    a = _places(a)
    b = _places(b)
    own = _places(np.asarray(groups))
    return bootstrap(lambda rows: _within(a[rows], b[rows], own[rows]), len(a))


def _within(a: np.ndarray, b: np.ndarray, groups: np.ndarray) -> float | None:
    total = weight = 0.0
    for group in range(int(groups.max(initial=-1)) + 1):
        member = groups == group
        if (value := _correlation(a[member], b[member])) is not None:
            total += value * member.sum()
            weight += member.sum()
    return float(total / weight) if weight else None


def _places(values: np.ndarray) -> np.ndarray:
    """The rank of each value among the distinct values: int64 `[N]`."""
    return np.unique(values, return_inverse=True)[1]


def _ranks(places: np.ndarray) -> np.ndarray:
    counts = np.bincount(places)
    return (np.cumsum(counts) - (counts + 1) / 2)[places]


def _correlation(a: np.ndarray, b: np.ndarray) -> float | None:
    if len(a) < 3:
        return None
    x = _ranks(a)
    y = _ranks(b)
    x = x - x.mean()
    y = y - y.mean()
    scale = float(np.sqrt((x @ x) * (y @ y)))
    return float(x @ y) / scale if scale > 0 else None
