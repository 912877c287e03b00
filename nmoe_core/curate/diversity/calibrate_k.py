"""Chooses the number of clusters k by two rules, from the silhouette and the reachable diversity.

`within_5pct` is the published rule: the largest k whose silhouette is within 5 % of the peak.
`reachable` takes the largest k for which two conditions hold: a window can hold 95 % of the
clusters on average, and the silhouette is at least 70 % of the peak among k >= 10. (A cluster with
fewer documents than windows cannot be in every window.) All k share the cosine distances of one
sample, so each k costs one fit and one pass over these distances.
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


def calibrate_k(rows: np.ndarray, doc_tokens: np.ndarray, seq_len: int, seed: int) -> Calibration:
    """Fit and measure each candidate k below the number of rows. `rows` are float32 `[N, D]`, each
    of norm 1 or 0. Raises CurationError if all candidates exceed the number of rows with text
    (E-CURATION-TOPICS)."""
    from sklearn.metrics import silhouette_score
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
        found = labels[sample]
        separation = 0.0
        if len(np.unique(found)) > 1:  # the silhouette needs at least two clusters
            separation = float(silhouette_score(distances, found, metric="precomputed"))
        results.append(KResult(k, separation, *spread, reachable=ceiling / k))
    return Calibration(tuple(results), rule_within_5pct(results), rule_reachable(results))


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
