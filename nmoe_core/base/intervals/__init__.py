"""Intervals, bounds and rank correlations; `benchmarks.statistics` simulates how often they hold.

Shares have exact intervals (Clopper-Pearson). Correlations and ratios have intervals by Student's t
and the influence of each document on the figure, which is the limit of the jackknife for small
weights: one pass over sorted values, and no draws. Families of documents widen them by the design
effect. No interval is given of fewer than `MIN_ITEMS` documents or families.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from nmoe_core.base.intervals.design import (
    MIN_ITEMS,
    NUM_MISSED,
    Design,
    Families,
    effective_count,
    t_half_width,
)

Interval = tuple[float, float]
Groups = Sequence[str] | np.ndarray


def exact_interval(num_hits: float, num_trials: float, delta: float = 0.05) -> Interval:
    """Interval that covers the share of hits with probability 1 - `delta` (Clopper-Pearson); counts
    may be fractional."""
    low = 1 - upper_bound(num_trials - num_hits, num_trials, delta / 2)
    return round(low, 6), round(upper_bound(num_hits, num_trials, delta / 2), 6)


def upper_bound(num_errors: float, num_trials: float, delta: float = 0.05) -> float:
    """Largest error rate that gives at most `num_errors` errors with probability `delta`
    (Clopper-Pearson); 1 without trials."""
    from scipy.special import betaincinv

    if num_errors >= num_trials:
        return 1.0
    return float(betaincinv(num_errors + 1, num_trials - num_errors, 1 - delta))


def lower_bound(num_errors: float, num_trials: float, delta: float = 0.05) -> float:
    """Smallest error rate that gives at least `num_errors` errors with probability `delta`; 0
    without trials."""
    return 1 - upper_bound(num_trials - num_errors, num_trials, delta) if num_errors else 0.0


def chance_of_at_most(most: float, num_trials: float, rate: float) -> float:
    """Probability of at most `most` errors in `num_trials` trials with the error rate `rate`;
    counts may be fractional."""
    from scipy.special import betainc

    return float(betainc(num_trials - most, most + 1, 1 - rate)) if most < num_trials else 1.0


def ratio_interval(parts: np.ndarray, wholes: np.ndarray) -> Interval | None:
    """95 % interval of sum(parts) / sum(wholes) over documents or families, `[N]` each, `parts` at
    most `wholes`. None if the few largest decide the sum: below `MIN_ITEMS` of effective size (Kish
    1965)."""
    total = wholes.sum()
    count = total**2 / (wholes**2).sum()
    if count < MIN_ITEMS:
        return None
    share = parts.sum() / total
    error = math.sqrt(((parts - share * wholes) ** 2).sum()) / total
    trials = max(count, MIN_ITEMS)
    if error > 0:
        trials = min(trials, share * (1 - share) / error**2)
    return exact_interval(share * trials, trials)


def mean_ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 0; tied values get the mean of their ranks."""
    places = np.unique(values, return_inverse=True)[1]
    counts = np.bincount(places)
    return (np.cumsum(counts) - (counts + 1) / 2)[places]


class _Correlation(NamedTuple):
    """A correlation, the influence of each document on it (`[N]`, sum 0), and the mean square
    influence of a document whose two values are unrelated."""

    value: float
    influence: np.ndarray
    unrelated: float

    def with_more(self, num_more: float) -> tuple[float, float]:
        """The correlation, and its variance, if there were more documents whose values are
        unrelated. The variance is the larger of the sample's own and that of normal values (Bonett
        and Wright 2000)."""
        num = len(self.influence)
        value = self.value * num / (num + num_more)
        normal = (1 - value**2) ** 2 * (1 + value**2 / 2) / (num + num_more - 3)
        total = (self.influence**2).sum() + num_more * self.unrelated
        return value, max(normal, float(total) / ((num + num_more) * (num + num_more - 1)))

    def interval(self, families: Families) -> Interval | None:
        """By Fisher's z. The interval holds the one with `NUM_MISSED` more documents whose values
        are unrelated: they lower a high correlation much. None of few documents or families."""
        design = Design.of(self.influence, families)
        if design is None:
            return None
        more = map(self.with_more, (0, NUM_MISSED))
        return _hull([_fisher(v, design.effect * each, design.degrees) for v, each in more])


def _correlation(a: np.ndarray, b: np.ndarray) -> _Correlation | None:
    num = len(a)
    if num < 3:
        return None
    x = mean_ranks(a) / num
    y = mean_ranks(b) / num
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return None
    x -= x.mean()
    y -= y.mean()
    own = x @ x / num
    other = y @ y / num
    # A document changes the products of its own ranks, and the ranks of all documents above it.
    both = x * y + _above(a, y) + _above(b, x)
    of_own = x * x + 2 * _above(a, x)
    of_other = y * y + 2 * _above(b, y)
    scale = math.sqrt(own * other)
    value = float(x @ y) / num / scale
    influence = both / scale - value / 2 * (of_own / own + of_other / other)
    return _Correlation(value, influence - influence.mean(), value**2)


def _above(values: np.ndarray, summed: np.ndarray) -> np.ndarray:
    """Per document, the mean of `summed` over documents with higher values; ties count half."""
    places = np.unique(values, return_inverse=True)[1]
    sums = np.bincount(places, summed)
    return (summed.sum() - np.cumsum(sums) + sums / 2)[places] / len(values)


def spearman(a: np.ndarray, b: np.ndarray) -> float | None:
    """Rank correlation of two arrays `[N]`; None if one is constant or N is below 3."""
    found = _correlation(a, b)
    return None if found is None else found.value


def spearman_interval(a: np.ndarray, b: np.ndarray, families: Families = None) -> Interval | None:
    """95 % interval of the rank correlation, by Fisher's z; None if undefined, or of few items."""
    found = _unbiased(a, b)
    return None if found is None else found.interval(families)


def _unbiased(a: np.ndarray, b: np.ndarray) -> _Correlation | None:
    """The rank correlation without the bias of small samples; None of fewer than `MIN_ITEMS`
    documents."""
    from scipy.stats import kendalltau

    found = _correlation(a, b)
    if found is None or len(a) < MIN_ITEMS:
        return None
    # Without ties, the expectation of r is rho - 3 (rho - tau) / (n + 1) (Kendall 1948).
    tau: Any = kendalltau(a, b)  # scipy's stubs lack the attributes
    bias = 3 * (found.value - tau.statistic) / (len(a) - 2)
    return found._replace(value=min(max(found.value + bias, -1.0), 1.0))


def _fisher(value: float, variance: float, degrees: float) -> Interval:
    within = min(max(value, -0.999999), 0.999999)
    half = t_half_width(math.sqrt(variance) / (1 - within**2), degrees)
    z = math.atanh(within)
    low = min(math.tanh(z - half), value)
    return round(low, 6), round(max(math.tanh(z + half), value), 6)


def _hull(intervals: Sequence[Interval]) -> Interval:
    return min(low for low, _ in intervals), max(high for _, high in intervals)


def gain_interval(
    ours: np.ndarray, theirs: np.ndarray, oracle: np.ndarray, families: Families = None
) -> Interval | None:
    """95 % interval of spearman(ours, oracle) - spearman(theirs, oracle), of the same documents;
    None as for `spearman_interval`."""
    own = _correlation(ours, oracle)
    other = _correlation(theirs, oracle)
    if own is None or other is None:
        return None
    influence = own.influence - other.influence
    design = Design.of(influence, families)
    if design is None:
        return None
    num = len(oracle)
    gain = own.value - other.value
    unrelated = NUM_MISSED * num / design.num_families * (1 - own.value * other.value)
    total = (influence**2).sum() + unrelated
    error = math.sqrt(design.effect * total / (num * (num - 1)))
    half = t_half_width(error, design.degrees)
    return round(max(gain - half, -2.0), 6), round(min(gain + half, 2.0), 6)


def within_groups(
    a: np.ndarray, b: np.ndarray, groups: Groups, families: Families = None
) -> float | None:
    """Rank correlation within groups: the mean over the groups of at least `MIN_ITEMS` documents
    and families in which it is defined, weighted by their size. Each is corrected for the bias of
    small samples; with a hundred documents the correction is below 0.01."""
    found = _within(a, b, groups, families)
    return None if found is None else found[0]


def within_interval(
    a: np.ndarray, b: np.ndarray, groups: Groups, families: Families = None
) -> Interval | None:
    """95 % interval of `within_groups`, with the degrees of freedom of Welch and Satterthwaite;
    None if it is undefined."""
    found = _within(a, b, groups, families)
    return None if found is None else _hull([_fisher(*one) for one in found[1]])


def _within(
    a: np.ndarray, b: np.ndarray, groups: Groups, families: Families
) -> tuple[float, list[tuple[float, float, float]]] | None:
    """The correlation within groups; and value, variance and degrees without and with more
    documents, as in `_Correlation.interval`."""
    names = np.asarray(groups)
    drawn = np.arange(len(a)) if families is None else families
    found: list[_Correlation] = []
    used: list[np.ndarray] = []
    for name in np.unique(names):
        member = np.flatnonzero(names == name)
        one = _unbiased(a[member], b[member])
        if one is not None and effective_count(drawn[member]) >= MIN_ITEMS:
            found.append(one)
            used.append(member)
    if not found:
        return None
    rows = None if families is None else families[np.concatenate(used)]
    design = Design.of(np.concatenate([one.influence for one in found]), rows)
    if design is None:
        return None
    sizes = np.array([len(one.influence) for one in found])
    weights = sizes / sizes.sum()
    both: list[tuple[float, float, float]] = []
    for num_more in (0, NUM_MISSED):
        values, variances = np.array(
            [one.with_more(num_more * w) for one, w in zip(found, weights)]
        ).T
        each = weights**2 * variances
        total = float(each.sum())
        degrees = total**2 / float((each**2 / (sizes - 1)).sum()) if total else 1.0
        degrees = min(degrees, design.degrees)
        both.append((float(weights @ values), total * design.effect, degrees))
    return both[0][0], both


def auc(scores: np.ndarray, positive: np.ndarray) -> float | None:
    """Probability that a positive item scores above a negative item, with ties counted as half;
    None if all items are of one class."""
    num_positive = int(positive.sum())
    num_negative = int((~positive).sum())
    if num_positive == 0 or num_negative == 0:
        return None
    rank_sum = float(mean_ranks(scores)[positive].sum())
    return (rank_sum - num_positive * (num_positive - 1) / 2) / (num_positive * num_negative)


def auc_interval(
    scores: np.ndarray, positive: np.ndarray, families: Families = None
) -> Interval | None:
    """95 % interval of `auc`: the exact interval with the number of trials that gives the variance
    of Hanley and McNeil (1982), so its width is not zero at an AUC of 1. None if there are fewer
    than `MIN_ITEMS` items or families, or if all items are of one class."""
    area = auc(scores, positive)
    if area is None:
        return None
    m = int(positive.sum())
    n = int((~positive).sum())
    # Either class may have the wider spread of scores, so take the larger of both variances.
    first = (1 - area) / (2 - area)
    second = area / (1 + area)
    more = max(first, second)
    fewer = min(first, second)
    trials = m * n / (1 + (max(m, n) - 1) * more + (min(m, n) - 1) * fewer)
    # DeLong's variance (1988) is larger if one class is much wider than the other.
    ranks = mean_ranks(scores)
    above = (ranks[positive] - mean_ranks(scores[positive])) / n
    below = (ranks[~positive] - mean_ranks(scores[~positive])) / m
    variance = float(above.var() / m + below.var() / n)
    if variance > 0:
        trials = min(trials, area * (1 - area) / variance)
    influence = np.concatenate([(above - above.mean()) / m, (below.mean() - below) / n])
    order = np.argsort(~positive, kind="stable")
    design = Design.of(influence, None if families is None else families[order])
    if design is None:
        return None
    trials = design.trials(trials)
    return exact_interval(area * trials, trials)


def concordance(a: np.ndarray, b: np.ndarray) -> float | None:
    """Lin's concordance, which equals Cohen's kappa with quadratic weights if values are grades;
    None if all values are equal."""
    expected = a.var() + b.var() + (a.mean() - b.mean()) ** 2
    return float(1 - ((a - b) ** 2).mean() / expected) if expected > 0 else None


def concordance_interval(
    a: np.ndarray, b: np.ndarray, families: Families = None
) -> Interval | None:
    """95 % interval of `concordance`, by Fisher's z; None if it is undefined, or if fewer than
    `MIN_ITEMS` documents or families have another grade than the commonest one."""
    return _interval_of_grades(np.column_stack([a, b]), _concordance, families)


def _interval_of_grades(
    grades: np.ndarray, measure: Callable[[np.ndarray], _Correlation | None], families: Families
) -> Interval | None:
    """If most documents have one grade, the others decide the agreement. So some others are needed,
    and the upper end is as high as without the two documents or families that lower it most."""
    drawn = np.arange(len(grades)) if families is None else families
    found = measure(grades)
    interval = None if found is None else found.interval(families)
    if found is None or interval is None:
        return None
    is_given = ~np.isnan(grades)
    values, counts = np.unique(grades[is_given], return_counts=True)
    is_other = (is_given & (grades != values[counts.argmax()])).any(axis=1)
    if not is_other.any() or effective_count(drawn[is_other]) < MIN_ITEMS:
        return None
    low, high = interval
    places = np.unique(drawn, return_inverse=True)[1]
    sums = np.bincount(places, found.influence)
    order = np.argsort(sums[places])
    order = order[~np.isin(places[order], np.argsort(sums)[:2])]
    rest = measure(grades[order])
    if rest is None:
        return low, high
    more = rest.interval(None if families is None else drawn[order])
    return low, 1.0 if more is None else max(high, more[1])


def _concordance(grades: np.ndarray) -> _Correlation | None:
    a, b = grades.T
    value = concordance(a, b)
    if value is None:
        return None
    x = a - a.mean()
    y = b - b.mean()
    apart = a.mean() - b.mean()
    expected = a.var() + b.var() + apart**2
    own = value * (x**2 + 2 * apart * x) / expected
    other = value * (y**2 - 2 * apart * y) / expected
    influence = 2 * x * y / expected - own - other
    unrelated = own.var() + other.var() + 4 * x.var() * y.var() / expected**2
    return _Correlation(value, influence - influence.mean(), float(unrelated))


def alpha(grades: np.ndarray) -> float | None:
    """Krippendorff's alpha with squared differences. `grades` is `[N, R]` of N documents and R
    raters, NaN if a rater gave none. Documents with fewer than two grades do not count; None if all
    grades are equal. Of two raters, it is close to `concordance`."""
    found = _apart_and_spread(grades)
    if found is None:
        return None
    num, apart, spread = found
    return float(1 - (num.sum() - 1) / num.sum() * apart.sum() / spread.sum())


def alpha_interval(grades: np.ndarray, families: Families = None) -> Interval | None:
    """95 % interval of `alpha`, by Fisher's z; None as for `concordance_interval`."""
    is_shared = (~np.isnan(grades)).sum(axis=1) >= 2
    drawn = None if families is None else families[is_shared]
    return _interval_of_grades(grades[is_shared], _alpha, drawn)


def _alpha(grades: np.ndarray) -> _Correlation | None:
    value = alpha(grades)
    found = _apart_and_spread(grades)
    if value is None or found is None:
        return None
    # Grades of different documents are unrelated.
    shifted = (np.roll(column, i * (len(grades) // 2 + 1)) for i, column in enumerate(grades.T))
    unrelated = _apart_and_spread(np.column_stack(list(shifted)))
    if unrelated is None:
        return None
    influence, of_unrelated = (
        ((1 - value) * spread - apart) / found[2].mean() for _, apart, spread in (found, unrelated)
    )
    return _Correlation(value, influence - influence.mean(), float(of_unrelated.var()))


def _apart_and_spread(grades: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Per document with at least two grades: their number, their mean squared difference in pairs
    times this number over two, and their squared distances from the mean of all grades. None if all
    grades are equal."""
    num = (~np.isnan(grades)).sum(axis=1)
    kept = grades[num >= 2]
    num = num[num >= 2]
    if not len(num) or np.nanmin(kept) == np.nanmax(kept):
        return None
    apart = np.nanvar(kept, axis=1) * num**2 / (num - 1)
    return num, apart, np.nansum((kept - np.nanmean(kept)) ** 2, axis=1)
