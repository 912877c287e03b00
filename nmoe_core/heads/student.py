"""A student that needs no backbone: ridge regression of the oracle's scores on hashed n-grams.

It is fitted beside every head, on the same documents and labels, and stands on the head's card: a
head that does not outrank it is not worth its backbone. Features are the 1- and 2-grams of token
ids, hashed by SplitMix64 into 2**18 columns, as roots of their counts with a norm of one. The
penalty is chosen by the closed form of leave-one-out errors. Costs an eigendecomposition: 4 s for
3,000 labels. Of more than `MAX_DUAL` labels, so many choose the penalty, and all are fitted by
conjugate gradients.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nmoe_core.labels.scores import stored

NUM_COLUMNS = 1 << 18
MAX_DUAL = 5000
PENALTIES = np.logspace(-3, 2, 16)


@dataclass(frozen=True, slots=True)
class Student:
    """Weights `[2**18, 5]` and bias `[5]`, float64."""

    weights: np.ndarray
    bias: np.ndarray
    penalty: float

    def predict(self, documents: Sequence[np.ndarray]) -> np.ndarray:
        """Scores of documents, each its token ids: float64 `[N, 5]`, as scores are stored. A
        document's scores do not depend on the others."""
        return stored(ngrams(documents) @ self.weights + self.bias)


def fit_student(documents: Sequence[np.ndarray], scores: np.ndarray) -> Student:
    """Fit on token ids of documents and the oracle's scores `[N, 5]`, of at least two documents."""
    features, targets = ngrams(documents), np.asarray(scores, np.float64)
    if len(targets) <= MAX_DUAL:
        return _fit_dual(features, targets)
    rows = np.linspace(0, len(targets) - 1, MAX_DUAL).astype(np.int64)
    penalty = _fit_dual(features[rows], targets[rows]).penalty
    from sklearn.linear_model import Ridge

    model = Ridge(alpha=penalty, solver="sparse_cg", tol=1e-8).fit(features, targets)
    return Student(np.ascontiguousarray(model.coef_.T), np.asarray(model.intercept_), penalty)


def _fit_dual(features: Any, targets: np.ndarray) -> Student:
    mean, num_rows = targets.mean(0), len(targets)
    centred = targets - mean
    kernel = (features @ features.T).toarray()
    row_means = kernel.mean(0)
    kernel += kernel.mean() - row_means - row_means[:, None]
    values, vectors = np.linalg.eigh(kernel)
    values = np.maximum(values, 0.0)
    projected, squared = vectors.T @ centred, vectors**2

    def left_out_error(penalty: float) -> float:
        """Mean squared error of each document, predicted from all others."""
        shrunk = values / (values + penalty)
        influence = squared @ shrunk + 1 / num_rows
        residuals = centred - vectors @ (shrunk[:, None] * projected)
        return float(np.square(residuals / (1 - influence)[:, None]).mean())

    penalty = float(min(PENALTIES, key=left_out_error))
    dual = vectors @ (projected / (values + penalty)[:, None])
    weights = features.T @ (dual - dual.mean(0))
    bias = mean - np.asarray(features.mean(0)).ravel() @ weights
    return Student(weights, bias, penalty)


def ngrams(documents: Sequence[np.ndarray]) -> Any:
    """Features of documents, a scipy CSR matrix float64 `[N, 2**18]`."""
    from scipy.sparse import csr_array

    lengths = np.fromiter(map(len, documents), np.int64, len(documents))
    tokens = np.concatenate([np.empty(0, np.uint64), *documents]).astype(np.uint64)
    rows = np.repeat(np.arange(len(documents)), lengths)
    is_pair = rows[1:] == rows[:-1]
    pairs = (tokens[:-1] + np.uint64(1) << np.uint64(32)) | tokens[1:]
    columns = _hashed(np.concatenate([tokens, pairs[is_pair]])) >> np.uint64(64 - 18)
    places = np.concatenate([rows, rows[1:][is_pair]]) * NUM_COLUMNS + columns.astype(np.int64)
    places, counts = np.unique(places, return_counts=True)
    rows, columns = places // NUM_COLUMNS, places % NUM_COLUMNS
    totals = np.bincount(rows, counts, len(documents))  # squared norms of the roots
    data = np.sqrt(counts / totals[rows])
    bounds = np.searchsorted(rows, np.arange(len(documents) + 1))
    places = (columns.astype(np.int32), bounds.astype(np.int32))  # for the solver
    return csr_array((data, *places), shape=(len(documents), NUM_COLUMNS))


def _hashed(values: np.ndarray) -> np.ndarray:
    """SplitMix64 (Steele, Lea and Flood 2014) of uint64."""
    z = values + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
