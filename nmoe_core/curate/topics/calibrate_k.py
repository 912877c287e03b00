"""How many clusters: silhouette and reachable diversity for each k, under two rules.

`within_5pct` is the published rule: the largest k whose silhouette is within 5 % of the peak.
`reachable` takes the largest k of which windows can hold 95 % (a small cluster cannot be in every
window) and whose silhouette is at least 70 % of the peak among k >= 10. The cosine distances of
one sample are computed once and shared: a k then costs its fit and one matrix product.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from nmoe_core.base.errors import CurationError
from nmoe_core.curate.diversity.measure import diversity_ceiling
from nmoe_core.curate.topics.model import fit_centroids, nearest_topics, sample_rows

CANDIDATES = (5, 10, 15, 20, 25, 30, 40, 50, 75, 100)
SAMPLE_ROWS = 10_000
MIN_REACHABLE = 0.95
MIN_SILHOUETTE_SHARE = 0.7
_PEAK_FROM_K = 10


@dataclass(frozen=True, slots=True)
class KResult:
    """One k: how well the clusters separate, their sizes, and what windows can hold of them."""

    k: int
    silhouette: float  # cosine, of the sample
    smallest: int
    median: float
    largest: int
    reachable: float  # ceiling of distinct clusters in a window of `seq_len` tokens, over k


@dataclass(frozen=True, slots=True)
class Calibration:
    """All candidates, and what each rule recommends (None where no k passes)."""

    results: tuple[KResult, ...]
    within_5pct: int
    reachable: int | None

    def to_json(self) -> dict[str, Any]:
        """Ready for `json.dump`."""
        return asdict(self)


def calibrate_k(rows: np.ndarray, doc_tokens: np.ndarray, seq_len: int, seed: int) -> Calibration:
    """Fit each k below the number of rows (float32 `[N, D]`, unit or zero) and measure it.

    Raises:
        CurationError: No candidate is below the number of rows with text (E-CURATION-TOPICS).
    """
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
        labels = nearest_topics(rows, fit_centroids(rows[with_text], k, seed)).astype(np.int64)
        sizes = np.bincount(labels, minlength=k)
        ceiling = diversity_ceiling(labels, doc_tokens, seq_len, "concat")
        spread = int(sizes.min()), float(np.median(sizes)), int(sizes.max())
        separation = silhouette(distances, labels[sample])
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


def cosine_distances(rows: np.ndarray) -> np.ndarray:
    """1 - cosine of unit rows: float32 `[S, S]`, zero on the diagonal."""
    distances = 1 - rows @ rows.T
    np.fill_diagonal(distances, 0)
    return np.maximum(distances, 0, out=distances)


def silhouette(distances: np.ndarray, labels: np.ndarray) -> float:
    """Mean silhouette (Rousseeuw 1987) of labelled points; 0 for points alone in their cluster.

    Args:
        distances: float32 `[S, S]`, symmetric.
        labels: int `[S]`; with fewer than two distinct labels the result is 0.
    """
    _, labels, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    if len(sizes) < 2:
        return 0.0
    members = np.zeros((len(labels), len(sizes)), np.float32)
    point = np.arange(len(labels))
    members[point, labels] = 1
    to_cluster = (distances @ members).astype(np.float64)
    own = to_cluster[point, labels] / np.maximum(sizes[labels] - 1, 1)
    to_cluster /= sizes
    to_cluster[point, labels] = np.inf
    nearest = to_cluster.min(axis=1)
    scores = (nearest - own) / np.maximum(np.maximum(own, nearest), 1e-300)
    return float(np.where(sizes[labels] > 1, scores, 0).mean())
