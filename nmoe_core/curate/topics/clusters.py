"""Clusters of embedded records. They are fitted once, frozen, numbered by version, and monitored
for drift.

New records are assigned to the frozen centroids, so the labels of old records do not change when
records are appended. Each use measures drift: the total variation distance between the cluster
shares now and at the fit, and the growth of the mean distance to the nearest centroid. If the drift
is above a limit, the clusters are fitted again with the next version number. The projection (PCA)
is frozen with the clusters. A cluster is named by its most typical words in a bounded sample of
records.
"""

import math
import re
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np

from nmoe_core.base.errors import CurationError
from nmoe_core.curate.topics.model import (
    MAX_TOPICS,
    fit_centroids,
    load_tensors,
    nearest_topics,
    sample_rows,
    save_tensors,
)

Method = Literal["umap", "pca"]
CLUSTERS_FORMAT = "clusters/1"
MAX_SHARE_DRIFT = 0.1
MAX_DISTANCE_GROWTH = 1.1
_PCA_ROWS = 50_000
_UMAP_ROWS = 50_000
_UMAP_WIDTH = 50
_BLOCK_ROWS = 65_536
MAX_NAMED = 20_000  # most records whose words are counted
_MAX_CHARS = 20_000
_MAX_SHARE = 0.2
_NUM_TERMS = 4
_WORD = re.compile(r"[^\W\d_]{3,24}")


@dataclass(frozen=True, slots=True)
class Drift:
    """Total variation distance of the cluster shares, 0 to 1, and the mean squared distance to the
    nearest centroid now, divided by the same mean at the fit."""

    share_tv: float
    distance_ratio: float

    @property
    def is_large(self) -> bool:
        """Whether the clusters should be fitted again."""
        return self.share_tv > MAX_SHARE_DRIFT or self.distance_ratio > MAX_DISTANCE_GROWTH


@dataclass(frozen=True, slots=True)
class Clusters:
    """Frozen clusters."""

    centroids: np.ndarray  # the mean of each cluster: float32 [K, D]
    mean: np.ndarray  # subtracted before `axes`: float32 [W]; empty without PCA
    axes: np.ndarray  # principal components: float32 [D, W]; empty without PCA
    header: dict[str, Any]  # settings, version, and measurements at the fit

    def project(self, embeddings: np.ndarray) -> np.ndarray:
        """Project rows into the space of the centroids: float32 `[N, D]` of length 1; zero rows
        stay zero."""
        return project(embeddings, self.mean, self.axes)

    def assign(self, rows: np.ndarray) -> tuple[np.ndarray, float]:
        """Cluster of each projected row, uint16 `[N]`, and the mean squared distance to its
        centroid."""
        labels = np.empty(len(rows), np.uint16)
        total = 0.0
        for start in range(0, len(rows), _BLOCK_ROWS):
            block = rows[start : start + _BLOCK_ROWS]
            found = nearest_topics(block, self.centroids)
            labels[start : start + len(block)] = found
            total += float(np.square(block - self.centroids[found]).sum(dtype=np.float64))
        return labels, total / max(len(rows), 1)

    def drift(self, labels: np.ndarray, distance: float) -> Drift:
        """Drift of these records, with their cluster labels, from the records at the fit."""
        then = np.asarray(self.header["shares"])
        now = np.bincount(labels, minlength=len(then)) / max(len(labels), 1)
        return Drift(
            share_tv=float(np.abs(now - then).sum() / 2),
            distance_ratio=distance / max(self.header["mean_distance"], 1e-12),
        )


def fit_clusters(
    embeddings: np.ndarray,
    num_clusters: int,
    seed: int,
    *,
    pca_components: int = 0,
    settings: dict[str, Any] | None = None,
    version: int = 1,
) -> Clusters:
    """Fit projection and centroids on all non-zero rows.

    Args:
        embeddings: float32 `[N, W]`, rows of length 1 or 0.
        num_clusters: K, at least 2 and at most the number of non-zero rows.
        seed: Seed of the fit.
        pca_components: Dimensions after PCA, limited to min(N - 1, W); 0 for no PCA.
        settings, version: Recorded in the header.

    Raises:
        CurationError: Too few rows for the clusters (E-CURATION-TOPICS).
    """
    with_text = np.flatnonzero(embeddings.any(axis=1))
    if not 2 <= num_clusters <= min(len(with_text), MAX_TOPICS):
        raise CurationError(
            "fewer records with text than clusters, or fewer than two clusters",
            found=f"{num_clusters} clusters, {len(with_text)} records with text",
            expected=f"2 to {min(len(with_text), MAX_TOPICS)} clusters",
            do="set --n-clusters",
            code="E-CURATION-TOPICS",
        )
    mean, axes, explained = fit_pca(embeddings[with_text], pca_components, seed)
    rows = project(embeddings, mean, axes)
    centroids = fit_centroids(rows[with_text], num_clusters, seed)
    header = {
        "format": CLUSTERS_FORMAT,
        "settings": settings or {},
        "version": version,
        "explained_variance": explained,
        "num_rows": len(embeddings),
    }
    clusters = Clusters(centroids, mean, axes, header)
    labels, distance = clusters.assign(rows)
    shares = np.bincount(labels, minlength=num_clusters) / len(labels)
    header.update(shares=shares.tolist(), mean_distance=distance)
    return clusters


def fit_pca(
    rows: np.ndarray, num_components: int, seed: int
) -> tuple[np.ndarray, np.ndarray, float | None]:
    """Mean, axes `[D, W]`, and the share of the variance that the axes explain; empty arrays for 0
    components."""
    if not num_components:
        return np.empty(0, np.float32), np.empty((0, 0), np.float32), None
    from sklearn.decomposition import PCA
    from threadpoolctl import threadpool_limits

    sample = np.asarray(rows[sample_rows(len(rows), _PCA_ROWS, seed)])
    with threadpool_limits(limits=1):
        pca = PCA(min(num_components, len(sample) - 1, rows.shape[1]), random_state=seed)
        pca.fit(sample)
    explained = float(pca.explained_variance_ratio_.sum())
    # Row-major: the file format writes the bytes in memory order.
    axes = np.ascontiguousarray(pca.components_, np.float32)
    return pca.mean_.astype(np.float32), axes, explained


def project(embeddings: np.ndarray, mean: np.ndarray, axes: np.ndarray) -> np.ndarray:
    """Scale rows to length 1, after PCA if `axes` is not empty: float32; zero rows stay zero."""
    rows = np.empty((len(embeddings), len(axes) or embeddings.shape[1]), np.float32)
    for start in range(0, len(embeddings), _BLOCK_ROWS):
        block = np.asarray(embeddings[start : start + _BLOCK_ROWS], np.float32)
        has_text = block.any(axis=1)
        wide = ((block - mean) @ axes.T if len(axes) else block).astype(np.float64)
        norms = np.sqrt(np.sum(np.square(wide), axis=1))
        scale = np.where(has_text & (norms > 0), 1 / np.where(norms > 0, norms, 1), 0)
        rows[start : start + len(block)] = wide * scale[:, None]
    return rows


def flat_projection(
    rows: np.ndarray, seed: int, method: Method | None = None
) -> tuple[np.ndarray, Method]:
    """Project rows to the plane.

    UMAP (McInnes et al. 2018; 15 neighbours, after PCA to 50) is fitted on at most 50,000 rows,
    which takes minutes. Further rows are projected with this fit.

    Returns:
        float32 `[N, 2]` and the method; by default `umap` if the library is installed, else `pca`.
    """
    method = method or ("umap" if find_spec("umap") else "pca")
    width = min(2 if method == "pca" else _UMAP_WIDTH, rows.shape[1], len(rows) - 1)
    if width < 1:
        return np.zeros((len(rows), 2), np.float32), "pca"
    mean, axes, _ = fit_pca(rows, width, seed)
    flat = (rows - mean) @ axes.T
    if method == "umap" and len(rows) > 3:
        flat = _umap(flat, seed)
    points = np.zeros((len(rows), 2), np.float32)
    points[:, : min(2, flat.shape[1])] = flat[:, :2]
    return points, method


def _umap(rows: np.ndarray, seed: int) -> np.ndarray:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # umap warns about every setting that a seed overrides
        import umap  # pyright: ignore[reportMissingImports] (an extra)

        fit = umap.UMAP(
            n_components=2, n_neighbors=min(15, len(rows) - 1), min_dist=0.1, random_state=seed
        )
        chosen = sample_rows(len(rows), _UMAP_ROWS, seed)
        points = np.empty((len(rows), 2), np.float32)
        points[chosen] = fit.fit_transform(rows[chosen])
        rest = np.setdiff1d(np.arange(len(rows)), chosen)
        if len(rest):
            points[rest] = fit.transform(rows[rest])
    return points


def save_clusters(path: Path, clusters: Clusters) -> None:
    """Write clusters; equal clusters give equal bytes."""
    tensors = {"centroids": clusters.centroids, "mean": clusters.mean, "axes": clusters.axes}
    save_tensors(path, tensors, clusters.header)


def load_clusters(path: Path) -> Clusters:
    """Read clusters. Raises CurationError if the file is missing or has another format
    (E-CURATION-MODEL)."""
    do = "delete the file; the next run fits the clusters again"
    tensors, header = load_tensors(path, CLUSTERS_FORMAT, ("centroids", "mean", "axes"), do)
    return Clusters(**tensors, header=header)


def sample_records(num_records: int) -> np.ndarray:
    """At most `MAX_NAMED` record numbers, evenly spaced, ascending."""
    return np.unique(np.linspace(0, num_records - 1, min(num_records, MAX_NAMED)).astype(int))


def typical_terms(texts: Iterable[str], labels: np.ndarray, num_clusters: int) -> list[list[str]]:
    """The most typical words of each cluster, best first; fewer if a cluster has few words.

    A word's score is p log(p / q), its term of the Kullback-Leibler divergence: p is the share of
    the cluster's records that contain the word, and q the share of all records that contain it.
    Words in more than a fifth of the records are excluded. Only the beginning of each text is read.
    """
    counts: list[Counter[str]] = [Counter() for _ in range(num_clusters)]
    for text, label in zip(texts, labels.tolist()):
        counts[label].update(set(_WORD.findall(text[:_MAX_CHARS].lower())))
    everywhere: Counter[str] = Counter()
    for words in counts:
        everywhere.update(words)
    sizes = np.bincount(labels, minlength=num_clusters).tolist()
    return [_best(words, size, everywhere, len(labels)) for words, size in zip(counts, sizes)]


def _best(words: Counter[str], size: int, everywhere: Counter[str], num_records: int) -> list[str]:
    scores = {}
    for word, count in words.items():
        if everywhere[word] <= max(_MAX_SHARE * num_records, size):
            share = count / size
            scores[word] = share * math.log(share * num_records / everywhere[word])
    ranked = sorted(scores, key=lambda word: (-scores[word], word))
    chosen: list[str] = []
    for word in ranked[: 10 * _NUM_TERMS]:
        # Skip a word that has the first five letters of a chosen word: "returns" adds nothing to
        # "return".
        if not any(word[:5] == other[:5] for other in chosen):
            chosen.append(word)
    return chosen[:_NUM_TERMS]
