"""Drift: the difference between a shard's scores and the scores of val documents of the same
source.

Thresholds are valid only for documents that resemble the documents on which they were fitted. The
two sets of scores are compared in ten bins, which hold equal numbers of val documents. PSI is the
population stability index; KS is the largest difference between the cumulative shares at the bins'
edges. For two samples of
n and m documents from one population, PSI is distributed as (1 / n + 1 / m) times chi-square with
(bins - 1) degrees of freedom. Its mean is subtracted, and PSI up to the 99.9 % quantile counts as
chance, so a shard without drift warns in 0.1 % of cases. If scores are normal and shift by d
standard deviations, PSI is about d squared.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

NUM_BINS = 10
MIN_DOCUMENTS = 50  # val documents that a source needs before its shards are compared


class ScoreDrift(NamedTuple):
    """`psi`, minus the PSI to expect by chance; 0 if chance explains it. `ks` in 0..1."""

    psi: float
    ks: float


def score_bins(sources: np.ndarray, scores: np.ndarray) -> dict[str, dict[str, list[Any]]]:
    """The reference scores of each source with enough documents: `edges` between bins, `counts` per
    bin.

    `sources` are strings `[N]`, `scores` float `[N]`, -1 for early exits.
    """
    found = {}
    for source in np.unique(sources).tolist():
        own = scores[sources == source]
        if len(own) >= MIN_DOCUMENTS:
            # `unique` merges bins with equal edges, so that equal scores are in the same bin.
            edges = np.unique(np.quantile(own, np.arange(1, NUM_BINS) / NUM_BINS, method="higher"))
            found[source] = {"edges": edges.tolist(), "counts": _counts(own, edges).tolist()}
    return found


def score_drift(reference: Mapping[str, list[Any]], scores: np.ndarray) -> ScoreDrift:
    """Drift of at least one score, `[N]`, from the reference of the source."""
    before = np.asarray(reference["counts"], float)
    now = _counts(scores, np.asarray(reference["edges"], float)).astype(float)
    # Add half a document to each bin, so that the logarithm is finite.
    p, q = ((counts + 0.5) / (counts + 0.5).sum() for counts in (before, now))
    degrees = len(before) - 1
    one = 1 / before.sum() + 1 / now.sum()
    psi = float(((q - p) * np.log(q / p)).sum())
    psi = psi - degrees * one if psi > _quantile(degrees) * one else 0.0
    ks = np.abs(np.cumsum(before / before.sum()) - np.cumsum(now / now.sum())).max()
    return ScoreDrift(psi, float(ks))


def _quantile(degrees: int) -> float:
    """The 99.9 % quantile of chi-square; 0 for a single bin."""
    from scipy.special import chdtri

    return float(chdtri(degrees, 0.001)) if degrees else 0.0


def _counts(scores: np.ndarray, edges: np.ndarray) -> np.ndarray:
    return np.bincount(np.searchsorted(edges, scores, side="right"), minlength=len(edges) + 1)
