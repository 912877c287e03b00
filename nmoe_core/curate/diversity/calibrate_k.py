"""Chooses the number of clusters k by two rules, from the silhouette and the reachable diversity.

`within_5pct` is the published rule: the largest k whose silhouette is within 5 % of the peak.
`reachable` takes the largest k for which two conditions hold: a window can hold 95 % of the
clusters on average, and the silhouette is at least 70 % of the peak among k >= 10. (A cluster with
fewer documents than windows cannot be in every window.) All k share the cosine distances of one
sample, so each k costs one fit and one pass over these distances.

k-means also cuts rows that form no groups, and a k with the highest silhouette always exists. So
the peak is compared with samples of one normal cloud with the mean and covariance of the rows (as
the gap statistic, Tibshirani et al. 2001).
"""

from dataclasses import dataclass

import numpy as np

from nmoe_core.base.errors import CurationError
from nmoe_core.curate.diversity.measure import diversity_ceiling
from nmoe_core.curate.topics.model import fit_centroids, nearest_topics, sample_rows

CANDIDATES = (5, 10, 15, 20, 25, 30, 40, 50, 75, 100)
SAMPLE_ROWS = 10_000
MIN_REACHABLE = 0.95
MIN_SILHOUETTE_SHARE = 0.7
GROUP_ROWS = 1000
NUM_CLOUDS = 5
MIN_OVER_CLOUDS = 1.25  # rows of one long or heavy-tailed cloud reach 1.2
_PEAK_FROM_K = 10
_STARTS = 3  # k-means starts per k: few, because the clusters are only measured


@dataclass(frozen=True, slots=True)
class KResult:
    """Results for one k: how well the clusters separate, their sizes, and how many a window can
    hold."""

    k: int
    silhouette: float  # by cosine distance, over the sample
    smallest: int
    median: float
    largest: int
    reachable: float  # most distinct clusters per window of `seq_len` tokens, divided by k


@dataclass(frozen=True, slots=True)
class Calibration:
    """Results for all candidates, and the k that each rule recommends (None if no k passes)."""

    results: tuple[KResult, ...]
    within_5pct: int
    reachable: int | None
    has_groups: bool
    """Whether the silhouette at its peak is `MIN_OVER_CLOUDS` times as high as in each of
    `NUM_CLOUDS` normal clouds; measured on `GROUP_ROWS` rows."""


def calibrate_k(rows: np.ndarray, doc_tokens: np.ndarray, seq_len: int, seed: int) -> Calibration:
    """Fit and measure each candidate k below the number of rows. `rows` are float32 `[N, D]`, each
    of norm 1 or 0. Raises CurationError if all candidates exceed the number of rows with text
    (E-CURATION-TOPICS)."""
    from sklearn.metrics.pairwise import cosine_distances

    with_text = np.flatnonzero(rows.any(axis=1))
    usable = [k for k in CANDIDATES if k < len(with_text)]
    if not usable:
        raise CurationError(
            "too few records with text to choose a number of clusters",
            found=len(with_text),
            expected=f"more than {CANDIDATES[0]}",
            code="E-CURATION-TOPICS",
        )
    sample = with_text[sample_rows(len(with_text), SAMPLE_ROWS, seed)]
    distances = cosine_distances(rows[sample])
    results = []
    for k in usable:
        centroids = fit_centroids(rows[with_text], k, seed, most_starts=_STARTS)
        labels = nearest_topics(rows, centroids).astype(np.int64)
        sizes = np.bincount(labels, minlength=k)
        ceiling = diversity_ceiling(labels, doc_tokens, seq_len, "concat")
        spread = int(sizes.min()), float(np.median(sizes)), int(sizes.max())
        separation = _silhouette(distances, labels[sample])
        results.append(KResult(k, separation, *spread, reachable=ceiling / k))
    peak = max(results, key=lambda result: result.silhouette).k
    has_groups = _has_groups(rows[with_text[sample_rows(len(with_text), GROUP_ROWS, seed)]], peak)
    rules = rule_within_5pct(results), rule_reachable(results)
    return Calibration(tuple(results), *rules, has_groups)


def _silhouette(distances: np.ndarray, labels: np.ndarray) -> float:
    """The mean silhouette, from distances `[N, N]`; 0 for one cluster."""
    from sklearn.metrics import silhouette_score

    if len(np.unique(labels)) < 2:
        return 0.0
    return float(silhouette_score(distances, labels, metric="precomputed"))


def _has_groups(rows: np.ndarray, k: int) -> bool:
    """Whether `k` clusters separate the rows, all of norm 1, better than rows of normal clouds."""
    from sklearn.metrics.pairwise import cosine_distances

    def separation(points: np.ndarray) -> float:
        labels = nearest_topics(points, fit_centroids(points, k, 0, most_starts=_STARTS))
        return _silhouette(cosine_distances(points), labels)

    rng = np.random.RandomState(0)  # its stream does not change between versions
    mean = rows.mean(axis=0)
    spread = (rows - mean) / np.sqrt(len(rows))
    most = 0.0
    for _ in range(NUM_CLOUDS):
        cloud = mean + rng.standard_normal((len(rows), len(rows))) @ spread
        cloud /= np.linalg.norm(cloud, axis=1, keepdims=True)
        most = max(most, separation(cloud.astype(np.float32)))
    return separation(rows) > MIN_OVER_CLOUDS * most


def rule_within_5pct(results: list[KResult]) -> int:
    """The largest k whose silhouette is at most 5 % below the peak."""
    peak = max(result.silhouette for result in results)
    return max(r.k for r in results if r.silhouette >= peak - 0.05 * abs(peak))


def rule_reachable(results: list[KResult]) -> int | None:
    """The largest k for which a window can hold 95 % of the clusters and the silhouette is at least
    70 % of the peak; None if no k passes."""
    tried = [r.silhouette for r in results if r.k >= _PEAK_FROM_K]
    peak = max(tried or [r.silhouette for r in results])
    least = peak - (1 - MIN_SILHOUETTE_SHARE) * abs(peak)
    passing = [r.k for r in results if r.reachable >= MIN_REACHABLE and r.silhouette >= least]
    return max(passing, default=None)
