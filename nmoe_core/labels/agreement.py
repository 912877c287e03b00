"""Measures how well predictions agree with the oracle, and how well the oracle agrees with itself,
with intervals.

Every head is compared with predictors that know only a document's source or only its length. If a
head does not agree better than these predictors, it has learned nothing from the text. AUC is
computed here because scikit-learn is many times slower, and Wilson's interval because scipy rejects
fractional counts.

The oracle's noise is measured on a sample that is labelled again: once with the rubric's dimensions
in reverse order (`Rubric.turned`), and once with sampled answers instead of the most likely
answers. The noise limits heads: the correlation of a perfect head with one labelling is about the
square root of the correlation between two labellings.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nmoe_core.base.atomic import replacing
from nmoe_core.config.tree import Tree
from nmoe_core.labels.label_files import SCORES_NAME, checked_digest, read_summary, write_summary
from nmoe_core.labels.oracle import Record, latest, one_scale, read_records
from nmoe_core.labels.ranks import (
    MIN_ITEMS,
    Interval,
    mean_ranks,
    spearman,
    spearman_interval,
    within_groups,
    within_interval,
)
from nmoe_core.labels.scores import QUALITY, Scale, rounded
from nmoe_core.labels.slices import NUM_LABEL_SHARDS

NOISE_NAMES = {"order": "relabelled", "sampling": "resampled"}
"""Directories of the sample's labels, by kind of noise."""
NUM_LENGTH_GROUPS = 10
Z95 = 1.959963984540054
Z975 = 2.241402727604947


def wilson(num_hits: float, num_trials: float, z: float = Z95) -> Interval:
    """Interval of the share of hits (Wilson 1927), `z` standard deviations to each side."""
    if num_trials == 0:
        return 0.0, 1.0
    share = num_hits / num_trials
    width = z**2 / num_trials
    centre = (share + width / 2) / (1 + width)
    spread = z * math.sqrt(share * (1 - share) / num_trials + width / num_trials / 4)
    half = spread / (1 + width)
    return max(0.0, centre - half), min(1.0, centre + half)


def exact_interval(num_hits: float, num_trials: int) -> Interval:
    """95 % interval of the share of hits (Clopper-Pearson); `num_hits` may be fractional."""
    low = 1 - upper_bound(num_trials - num_hits, num_trials, 0.025)
    return round(low, 6), round(upper_bound(num_hits, num_trials, 0.025), 6)


def upper_bound(num_errors: float, num_trials: int, delta: float = 0.05) -> float:
    """Largest error rate that gives at most `num_errors` errors with probability `delta`
    (Clopper-Pearson)."""
    from scipy.special import betaincinv

    if num_errors >= num_trials:
        return 1.0
    return float(betaincinv(num_errors + 1, num_trials - num_errors, 1 - delta))


def lower_bound(num_errors: int, num_trials: int) -> float:
    """Smallest error rate that gives at least `num_errors` errors with probability 5 %; 0 without
    trials."""
    return 1 - upper_bound(num_trials - num_errors, num_trials) if num_errors else 0.0


def chance_of_at_most(most: int, num_trials: int, rate: float) -> float:
    """Probability of at most `most` errors in `num_trials` trials with the error rate `rate`."""
    from scipy.special import bdtr

    return float(bdtr(most, num_trials, rate)) if most < num_trials else 1.0


def quadratic_kappa(predicted: np.ndarray, truth: np.ndarray, num_grades: int) -> float | None:
    """Cohen's kappa with quadratic weights, of grades 0..num_grades-1; None if all grades are
    equal."""
    from sklearn.metrics import cohen_kappa_score

    if np.ptp(np.concatenate([predicted, truth])) == 0:
        return None
    grades = range(num_grades)
    return float(cohen_kappa_score(predicted, truth, labels=grades, weights="quadratic"))


def auc(scores: np.ndarray, positive: np.ndarray) -> float | None:
    """Probability that a positive item scores above a negative item, with ties counted as half;
    None if all items are of one class."""
    num_positive = int(positive.sum())
    num_negative = int((~positive).sum())
    if num_positive == 0 or num_negative == 0:
        return None
    rank_sum = float(mean_ranks(scores)[positive].sum())
    return (rank_sum - num_positive * (num_positive - 1) / 2) / (num_positive * num_negative)


def auc_interval(scores: np.ndarray, positive: np.ndarray) -> Interval | None:
    """95 % interval of `auc`: Wilson's interval with the number of trials that gives the variance
    of Hanley and McNeil (1982), so its width is not zero at an AUC of 1. None if there are fewer
    than `MIN_ITEMS` items, or if all items are of one class."""
    area = auc(scores, positive)
    if area is None or len(positive) < MIN_ITEMS:
        return None
    m = int(positive.sum())
    n = int((~positive).sum())
    # Either class may have the wider spread of scores, so take the larger of both variances.
    first = (1 - area) / (2 - area)
    second = area / (1 + area)
    more = max(first, second)
    fewer = min(first, second)
    num_trials = m * n / (1 + (max(m, n) - 1) * more + (min(m, n) - 1) * fewer)
    low, high = wilson(area * num_trials, num_trials)
    return round(low, 6), round(high, 6)


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
    predicted: np.ndarray, oracle: np.ndarray, sources: Sequence[str], scale: Scale = QUALITY
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
        "mae": {name: rounded(np.abs(e).mean()) for name, e, _, _ in columns},
        "r2": {name: rounded(_explained(x, y)) for name, _, x, y in columns},
        "qwk": kappas,
        "dimensions": {name: _correlations(x, y, sources) for name, _, x, y in columns},
        **_correlations(a, b, sources),
        "mae_aggregate": rounded(np.abs(a - b).mean()),
        "r2_aggregate": rounded(_explained(a, b)),
        "per_source": per_source,
    }


def _explained(predicted: np.ndarray, truth: np.ndarray) -> float | None:
    """R2: the share of the truth's variance that the prediction explains; None if the truth is
    constant."""
    spread = float(truth.var())
    return 1 - float(((predicted - truth) ** 2).mean()) / spread if spread > 0 else None


def _correlations(a: np.ndarray, b: np.ndarray, sources: Sequence[str]) -> dict[str, Any]:
    """`spearman` and `spearman_within_source`, each with a 95 % bootstrap interval."""
    return {
        "spearman": rounded(spearman(a, b)),
        "spearman_ci95": spearman_interval(a, b),
        "spearman_within_source": rounded(within_groups(a, b, sources)),
        "spearman_within_source_ci95": within_interval(a, b, sources),
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


def merge_noise(tree: Tree, split: str) -> dict[str, Any] | None:
    """Write `merged/noise_{split}.json`, from the samples of all shards; returns None if no
    document was labelled twice.

    `kinds` has each kind of noise that was measured: `reliability` is the Spearman correlation of
    the two aggregates, `ceiling` its square root; both are None if undefined. The top level repeats
    the fields of the kind with the lowest reliability. Raises as `checked_digest`.
    """
    path = tree.merged_labels(split).with_name(f"noise_{split}.json")
    kinds = {kind: _noise(tree, split, name) for kind, name in NOISE_NAMES.items()}
    found = {kind: noise for kind, noise in kinds.items() if noise is not None}
    if not found:
        path.unlink(missing_ok=True)
        return None
    lowest = min(
        found.values(), key=lambda one: math.inf if one["ceiling"] is None else one["ceiling"]
    )
    noise = lowest | {"kinds": found}
    with replacing(path):
        write_summary(path, noise)
    return noise


def _noise(tree: Tree, split: str, name: str) -> dict[str, Any] | None:
    """The noise between the labels of a split and the sample's labels in the directories called
    `name`."""
    pairs: list[tuple[Record, Record]] = []
    for shard in (tree.label_shard(split, i) for i in range(NUM_LABEL_SHARDS)):
        files = [shard / SCORES_NAME, shard / name / SCORES_NAME]
        if files[1].is_file():
            for path in files:
                checked_digest(path)
            first, second = (latest(read_records(path)) for path in files)
            pairs += [(first[i], one) for i, one in second.items() if _is_of(one, first.get(i))]
    if not pairs:
        return None
    parsed = [(a, b) for a, b in pairs if a["ok"] and b["ok"]]
    first, second = (np.array([pair[i]["aggregated"] for pair in parsed]) for i in (0, 1))
    reliability = spearman(first, second)
    interval = spearman_interval(first, second)
    names = one_scale((record for pair in parsed for record in pair), tree.labels / split).names
    grades = {d: [a["scores"][d] == b["scores"][d] for a, b in parsed] for d in names}
    return {
        "asked": len(pairs),
        "count": len(parsed),
        "reliability": reliability,
        "reliability_ci95": interval and list(interval),
        "ceiling": None if reliability is None else math.sqrt(max(0.0, reliability)),
        "mae": float(np.abs(first - second).mean()) if parsed else None,
        "same_grade": {d: sum(same) / len(same) if same else None for d, same in grades.items()},
    }


def _is_of(again: Record, first: Record | None) -> bool:
    """Whether a second label has the same text and scale as the first. They can differ, because an
    old sample is not replaced if no new sample is requested, or if labelling ended before the
    sample."""
    if first is None or first.get("text_sha256") != again.get("text_sha256"):
        return False
    return not (first["ok"] and again["ok"]) or first.get("scale") == again.get("scale")


def read_noise(path: Path) -> dict[str, Any] | None:
    """The file that `merge_noise` wrote; None if no document was labelled twice."""
    return read_summary(path) if path.is_file() else None
