"""Measures whether two embeddings of the same records find the same structure.

Both are clustered with the same k and seed. Adjusted Rand index and normalised mutual information
compare the two clusterings. Linear CKA (Kornblith et al. 2019) and the overlap of nearest
neighbours compare the embeddings directly, even if their widths differ. The cost is two k-means
fits and one matrix product of samples.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from nmoe_core.base.errors import CurationError
from nmoe_core.curate.arrays import map_npy
from nmoe_core.curate.topics.clusters import fit_pca, project
from nmoe_core.curate.topics.model import fit_centroids, nearest_topics

Verdict = Literal["redundant", "moderate", "different"]
SAMPLE_ROWS = 5_000
NEIGHBOURS = 10


@dataclass(frozen=True, slots=True)
class Comparison:
    """Agreement of two embeddings of the same records.

    `cka` and `neighbour_overlap` are measured on a sample. For unrelated spaces, the overlap is
    about `NEIGHBOURS` / (size of the sample).
    """

    num_records: int  # records with a usable row in both embeddings
    num_clusters: int
    ari: float
    nmi: float
    cka: float
    neighbour_overlap: float
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class ComparedSpaces:
    """The comparison, the projected unit rows of both embeddings, and the cluster of each record in
    the first embedding: `[N, ...]` each."""

    comparison: Comparison
    shallow: np.ndarray
    deep: np.ndarray
    shallow_labels: np.ndarray


def compare_embeddings(
    shallow: np.ndarray,
    deep: np.ndarray,
    num_clusters: int,
    seed: int,
    *,
    pca_shallow: int = 0,
    pca_deep: int = 0,
) -> ComparedSpaces:
    """Compare two embeddings, float `[N, W1]` and `[N, W2]`; a record whose row is zero or NaN in
    either embedding is ignored. Raises CurationError if the numbers of rows differ
    (E-CURATION-EMBEDDING), or if there are fewer usable rows than clusters (E-CURATION-TOPICS)."""
    from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score

    if shallow.ndim != 2 or deep.ndim != 2 or len(shallow) != len(deep):
        raise CurationError(
            "the embeddings belong to different records",
            found=f"shapes {shallow.shape} and {deep.shape}",
            expected="two arrays with the same number of rows",
            code="E-CURATION-EMBEDDING",
        )
    usable = np.ones(len(shallow), bool)
    for rows in (shallow, deep):
        usable &= np.isfinite(rows).all(axis=1) & rows.any(axis=1)
    if usable.sum() <= num_clusters:
        raise CurationError(
            "fewer embedded records than clusters",
            found=int(usable.sum()),
            expected=f"more than {num_clusters}",
            code="E-CURATION-TOPICS",
        )
    first, labels = _clustered(shallow[usable], num_clusters, seed, pca_shallow)
    second, deep_labels = _clustered(deep[usable], num_clusters, seed, pca_deep)
    ari = float(adjusted_rand_score(labels, deep_labels))
    chosen = np.random.RandomState(seed).permutation(len(first))[:SAMPLE_ROWS]
    comparison = Comparison(
        num_records=len(first),
        num_clusters=num_clusters,
        ari=ari,
        nmi=float(normalized_mutual_info_score(labels, deep_labels)),
        cka=linear_cka(first[chosen], second[chosen]),
        neighbour_overlap=neighbour_overlap(first[chosen], second[chosen]),
        verdict=verdict(ari),
    )
    return ComparedSpaces(comparison, first, second, labels)


def open_array(path: Path, kinds: str, *shape: int | None) -> np.ndarray:
    """Memory-map a `.npy` file. `kinds` are the accepted NumPy dtype kinds, such as `f`; None in
    `shape` matches any length. Raises CurationError if the dtype or shape differs
    (E-CURATION-EMBEDDING)."""
    try:
        array = map_npy(path)
        found = f"{array.dtype} {array.shape}"
    except (ValueError, FileNotFoundError) as error:
        array = np.empty(())
        found = str(error)
    fits = [wanted in (None, size) for wanted, size in zip(shape, array.shape)]
    if array.dtype.kind not in kinds or array.ndim != len(shape) or not all(fits):
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        raise CurationError(
            "array cannot be used",
            where=path,
            found=found,
            expected=f"a .npy file of {'floats' if kinds == 'f' else 'integers'} [{sizes}]",
            do="pass files of the same run, or embed this input again with `nmoe curate embed`",
            code="E-CURATION-EMBEDDING",
        )
    return array


def verdict(ari: float) -> Verdict:
    """Name the agreement by the published bands of the adjusted Rand index."""
    return "redundant" if ari > 0.7 else "moderate" if ari >= 0.3 else "different"


def linear_cka(first: np.ndarray, second: np.ndarray) -> float:
    """Linear centred kernel alignment, 0 to 1; it is 1 if the spaces differ only by rotation and
    scale."""
    x = first.astype(np.float64) - first.mean(axis=0, dtype=np.float64)
    y = second.astype(np.float64) - second.mean(axis=0, dtype=np.float64)
    scale = np.linalg.norm(x.T @ x) * np.linalg.norm(y.T @ y)
    return float(np.linalg.norm(x.T @ y) ** 2 / scale) if scale else 0.0


def neighbour_overlap(first: np.ndarray, second: np.ndarray) -> float:
    """Mean share of each row's `NEIGHBOURS` nearest neighbours that are the same in both spaces."""
    count = min(NEIGHBOURS, len(first) - 1)
    if count < 1:
        return 1.0
    ours = _neighbours(first, count)
    theirs = _neighbours(second, count)
    shared = [len(np.intersect1d(a, b, assume_unique=True)) for a, b in zip(ours, theirs)]
    return float(np.mean(shared) / count)


def _neighbours(rows: np.ndarray, count: int) -> np.ndarray:
    cosines = rows @ rows.T
    np.fill_diagonal(cosines, -np.inf)
    return np.argpartition(-cosines, count - 1, axis=1)[:, :count]


def _clustered(
    rows: np.ndarray, num_clusters: int, seed: int, pca: int
) -> tuple[np.ndarray, np.ndarray]:
    unit = project(rows, *fit_pca(rows, 0, seed)[:2])
    rows = project(unit, *fit_pca(unit, pca, seed)[:2])
    return rows, nearest_topics(rows, fit_centroids(rows, num_clusters, seed))
