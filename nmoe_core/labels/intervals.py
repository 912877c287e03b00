"""Intervals: of a share (Wilson), of an error rate from above (Clopper-Pearson), of any statistic.

scipy is loaded where it is called, so that reading results needs none. Wilson's interval and the
bootstrap are written out: scipy's take no fractional counts, and no statistic that is undefined on
some draws.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

NUM_RESAMPLES = 200
Z95 = 1.959963984540054
Z975 = 2.241402727604947
Interval = tuple[float, float]


def wilson(num_hits: float, num_trials: float, z: float = Z95) -> Interval:
    """Interval of a share seen as `num_hits` of `num_trials` (Wilson 1927), `z` deviations wide.

    >>> [round(bound, 3) for bound in wilson(5, 10)]
    [0.237, 0.763]
    """
    if num_trials == 0:
        return 0.0, 1.0
    share, width = num_hits / num_trials, z**2 / num_trials
    centre = (share + width / 2) / (1 + width)
    spread = z * math.sqrt(share * (1 - share) / num_trials + width / num_trials / 4)
    half = spread / (1 + width)
    return max(0.0, centre - half), min(1.0, centre + half)


def upper_bound(num_errors: int, num_trials: int, delta: float = 0.05) -> float:
    """Largest error rate that gives so few errors with probability `delta` (Clopper-Pearson 1934).

    >>> round(upper_bound(0, 149), 4)
    0.0199
    """
    from scipy.special import betaincinv

    if num_errors >= num_trials:
        return 1.0
    return float(betaincinv(num_errors + 1, num_trials - num_errors, 1 - delta))


def lower_bound(num_errors: int, num_trials: int, delta: float = 0.05) -> float:
    """Smallest error rate that gives so many errors with probability `delta`; 0 of no trial.

    >>> round(lower_bound(5, 5), 4)
    0.5493
    """
    return 1 - upper_bound(num_trials - num_errors, num_trials, delta) if num_errors else 0.0


def chance_of_at_most(most: int, num_trials: int, rate: float) -> float:
    """Probability that `num_trials` with an error rate of `rate` have at most `most` errors.

    >>> round(chance_of_at_most(1, 2, 0.5), 6)
    0.75
    """
    from scipy.special import bdtr

    return float(bdtr(most, num_trials, rate)) if most < num_trials else 1.0


def bootstrap(statistic: Callable[[np.ndarray], float | None], num_items: int) -> Interval | None:
    """95 % percentile interval of a statistic of rows, drawn with replacement from a fixed seed.

    None where the statistic is undefined on more than half of the draws.
    """
    rng = np.random.default_rng(0)
    draws = (rng.integers(0, num_items, num_items) for _ in range(NUM_RESAMPLES))
    values = [v for draw in draws if (v := statistic(draw)) is not None]
    if len(values) < NUM_RESAMPLES // 2:
        return None
    low, high = np.quantile(values, [0.025, 0.975])
    return round(float(low), 6), round(float(high), 6)
