"""Agreement of predicted scores with the oracle's, with intervals, and the predictors to beat.

Every head is compared with predictors that know only a document's source or only its length. If a
head does not agree better than these predictors, it has learned nothing from the text.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from nmoe_core.base.intervals import spearman, spearman_interval, within_groups, within_interval
from nmoe_core.base.intervals.design import Families
from nmoe_core.labels.scores import QUALITY, Scale, rounded

NUM_LENGTH_GROUPS = 10


def quadratic_kappa(predicted: np.ndarray, truth: np.ndarray, num_grades: int) -> float | None:
    """Cohen's kappa with quadratic weights, of grades 0..num_grades-1; None if all grades are
    equal."""
    from sklearn.metrics import cohen_kappa_score

    if np.ptp(np.concatenate([predicted, truth])) == 0:
        return None
    grades = range(num_grades)
    return float(cohen_kappa_score(predicted, truth, labels=grades, weights="quadratic"))


def average_precision(scores: np.ndarray, positive: np.ndarray) -> float | None:
    """Mean precision over the positives; documents with equal scores are ranked together."""
    from sklearn.metrics import average_precision_score

    return float(average_precision_score(positive, scores)) if positive.any() else None


def isotonic(scores: np.ndarray, outcomes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Isotonic regression: fit a non-decreasing function of the score to the outcomes, by least
    squares.

    Returns ascending distinct scores and the value at each, for `numpy.interp`.
    """
    from scipy.optimize import isotonic_regression

    points, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    means = np.bincount(inverse, outcomes) / counts
    return points, isotonic_regression(means, weights=counts).x


def calibration_error(probabilities: np.ndarray, outcomes: np.ndarray, num_bins: int = 15) -> float:
    """Expected calibration error, in bins of equal count (Naeini et al. 2015)."""
    order = np.argsort(probabilities, kind="stable")
    gaps = [
        abs(float(probabilities[rows].mean() - outcomes[rows].mean())) * len(rows)
        for rows in np.array_split(order, min(num_bins, len(order)))
    ]
    return sum(gaps) / len(order)


def regression_line(x: np.ndarray, y: np.ndarray) -> tuple[float, float] | None:
    """Intercept and slope by least squares; None if `x` is constant."""
    from scipy.stats import linregress

    if np.ptp(x) == 0:
        return None
    line: Any = linregress(x, y)  # scipy's stubs lack the attributes
    return float(line.intercept), float(line.slope)


def agreement(
    predicted: np.ndarray,
    oracle: np.ndarray,
    sources: Sequence[str],
    scale: Scale = QUALITY,
    families: Families = None,
) -> dict[str, Any]:
    """Agreement of predicted scores `[N, D]` with the oracle's, overall and within sources.

    `mae`, `r2` and `qwk` are given per dimension, in grades; `dimensions` holds the rank
    correlations per dimension. All other figures describe the aggregate. Undefined values are None.
    """
    a = scale.aggregate(predicted)
    b = scale.aggregate(oracle)
    error = predicted - oracle
    columns = list(zip(scale.names, error.T, predicted.T, oracle.T))
    grades = dict(zip(scale.names, zip(scale.lowest, scale.highest)))
    kappas = {}
    for name, _, x, y in columns:
        low, high = grades[name]
        kappa = quadratic_kappa(np.rint(x) - low, np.rint(y) - low, high - low + 1)
        kappas[name] = rounded(kappa)
    per_source = {}
    for name in sorted(set(sources)):
        member = np.asarray(sources) == name
        per_source[name] = {
            "n": int(member.sum()),
            "spearman": rounded(spearman(a[member], b[member])),
            "mae_aggregate": rounded(np.abs(a - b)[member].mean()),
        }
    return {
        "n": len(oracle),
        **({} if families is None else {"families": len(np.unique(families))}),
        "mae": {name: rounded(np.abs(e).mean()) for name, e, _, _ in columns},
        "r2": {name: rounded(_explained(x, y)) for name, _, x, y in columns},
        "qwk": kappas,
        "dimensions": {name: _correlations(x, y, sources, families) for name, _, x, y in columns},
        **_correlations(a, b, sources, families),
        "mae_aggregate": rounded(np.abs(a - b).mean()),
        "r2_aggregate": rounded(_explained(a, b)),
        "per_source": per_source,
    }


def _explained(predicted: np.ndarray, truth: np.ndarray) -> float | None:
    """R2: the share of the truth's variance that the prediction explains; None if the truth is
    constant."""
    spread = float(truth.var())
    return 1 - float(((predicted - truth) ** 2).mean()) / spread if spread > 0 else None


def _correlations(
    a: np.ndarray, b: np.ndarray, sources: Sequence[str], families: Families
) -> dict[str, Any]:
    """`spearman` and `spearman_within_source`, each with a 95 % interval."""
    return {
        "spearman": rounded(spearman(a, b)),
        "spearman_ci95": spearman_interval(a, b, families),
        "spearman_within_source": rounded(within_groups(a, b, sources, families)),
        "spearman_within_source_ci95": within_interval(a, b, sources, families),
    }


def baselines(
    train: tuple[np.ndarray, Sequence[str], np.ndarray],
    val: tuple[np.ndarray, Sequence[str], np.ndarray],
    scale: Scale = QUALITY,
) -> dict[str, Any]:
    """Metrics, on val, of predictors that do not read the text; they are fitted on the training
    labels.

    `train` and `val` are triples: the oracle's scores `[N, D]`, the sources, and the lengths `[N]`
    in tokens, 0 if not known.
    """
    fitted = scale.aggregate(train[0])
    truth = scale.aggregate(val[0])
    by_source = _group_means(train[1], fitted, val[1])
    edges = np.quantile(train[2], np.arange(1, NUM_LENGTH_GROUPS) / NUM_LENGTH_GROUPS)
    by_length = _group_means(np.digitize(train[2], edges), fitted, np.digitize(val[2], edges))
    constant = np.abs(val[0] - train[0].mean(0)).mean(0)
    return {
        "spearman_source_only": rounded(spearman(by_source, truth)),
        "spearman_length_only": rounded(spearman(by_length, truth)),
        "spearman_length_only_within_source": rounded(within_groups(by_length, truth, val[1])),
        "mae_mean_only": scale.by_name(constant),
    }


def _group_means(train_groups: Any, train_values: np.ndarray, groups: Any) -> np.ndarray:
    """Predict each item of `groups` by the training mean of its group, or by the overall mean if
    training lacks the group."""
    names, inverse = np.unique(np.asarray(train_groups), return_inverse=True)
    means = [train_values[inverse == i].mean() for i in range(len(names))]
    by_name = dict(zip(names.tolist(), means))
    overall = train_values.mean()
    return np.array([by_name.get(group, overall) for group in np.asarray(groups).tolist()])
