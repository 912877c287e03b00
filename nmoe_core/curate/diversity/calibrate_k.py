"""Choose the number of clusters: silhouette and reachable diversity for each k, by two rules.

`within_5pct` is the published rule: the largest k whose silhouette is within 5 % of the peak.
`reachable` takes the largest k such that windows can hold 95 % of the clusters (a small cluster
cannot be in every window) and the silhouette is at least 70 % of the peak among k >= 10. The cosine
distances of one sample are computed once and shared: a k then costs its fit and one pass over them.
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
_STARTS = 3  # of each k-means: it is measured, not kept


@dataclass(frozen=True, slots=True)
class KResult:
    """One k: how well the clusters separate, their sizes, and how many a window can hold."""

    k: int
    silhouette: float  # cosine, of the sample
    smallest: int
    median: float
    largest: int
    reachable: float  # ceiling of distinct clusters in a window of `seq_len` tokens, over k


@dataclass(frozen=True, slots=True)
class Calibration:
    """All candidates, and the k that each rule recommends (None if no k passes)."""

    results: tuple[KResult, ...]
    within_5pct: int
    reachable: int | None


def calibrate_k(rows: np.ndarray, doc_tokens: np.ndarray, seq_len: int, seed: int) -> Calibration:
    """Fit each k below the number of rows (float32 `[N, D]`, unit or zero) and measure it. Raises
    CurationError: no candidate is below the number of rows with text (E-CURATION-TOPICS)."""
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
        if len(np.unique(found)) > 1:  # else no silhouette is defined
            separation = float(silhouette_score(distances, found, metric="precomputed"))
        results.append(KResult(k, separation, *spread, reachable=ceiling / k))
    return Calibration(tuple(results), rule_within_5pct(results), rule_reachable(results))


def rule_within_5pct(results: list[KResult]) -> int:
    """Largest k whose silhouette is at least the peak less 5 % of its size."""
    peak = max(result.silhouette for result in results)
    return max(r.k for r in results if r.silhouette >= peak - 0.05 * abs(peak))


def rule_reachable(results: list[KResult]) -> int | None:
    """Largest k that windows can hold nearly whole and that still separates the records."""
    tried = [r.silhouette for r in results if r.k >= _PEAK_FROM_K]
    peak = max(tried or [r.silhouette for r in results])
    least = peak - (1 - MIN_SILHOUETTE_SHARE) * abs(peak)
    passing = [r.k for r in results if r.reachable >= MIN_REACHABLE and r.silhouette >= least]
    return max(passing, default=None)
