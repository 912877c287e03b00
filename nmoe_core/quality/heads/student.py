"""The student: a grader without a backbone. It is a ridge regression of the oracle's scores on
token n-grams.

The ridge penalty minimises the leave-one-out error (see `ridge`). If there are more than
`MAX_DUAL` labels, the penalty is chosen on a sample of `MAX_DUAL` labels, and the weights are
fitted on all labels by conjugate gradients. One core scores over 5 million tokens per second.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from nmoe_core.base.errors import HeadError
from nmoe_core.labels.scores import QUALITY, Scale
from nmoe_core.quality.heads.ngrams import TokenTable, ngrams, scalars, standardised
from nmoe_core.quality.ridge import MAX_DUAL, fit_ridge, spread_rows

BLOCK_TOKENS = 1 << 17
MAX_ENTRIES = 2**31 - 1  # the solver counts in 32 bits
_LEAST_DEVIATION = 1e-6  # avoids a division by zero if all documents have the same scalar


@dataclass(frozen=True, slots=True)
class Student:
    """Weights `[2**18 + 4, D]` of the features (float16 holds them exactly), bias `[D]`, and the
    training documents' mean and deviation `[4]` of the scalars. All are float64."""

    weights: np.ndarray
    bias: np.ndarray
    scalar_mean: np.ndarray
    scalar_deviation: np.ndarray
    penalty: float
    scale: Scale = QUALITY

    def predict(self, documents: Sequence[np.ndarray], table: TokenTable) -> np.ndarray:
        """Score documents, given as token ids: float64 `[N, D]`, clamped and rounded as grading
        stores scores.

        A document's scores do not depend on other documents. `table` belongs to the documents'
        tokenizer.
        """
        return np.concatenate([np.empty((0, len(self.bias))), *self._blocks(documents, table)])

    def _blocks(self, documents: Sequence[np.ndarray], table: TokenTable) -> Iterator[np.ndarray]:
        for block in _cut(documents):
            features = self.features(block, table)
            # scipy sums a row in the order of its columns, so the score of a document does not
            # depend on the other rows.
            yield self.scale.stored(features @ self.weights + self.bias)

    def features(self, documents: Sequence[np.ndarray], table: TokenTable) -> Any:
        """Features of documents, a scipy CSR matrix `[N, 2**18 + 4]`."""
        found = scalars(documents, table)
        found = standardised(found, self.scalar_mean, self.scalar_deviation)
        return _joined(ngrams(documents, table), found)


def fit_student(
    documents: Sequence[np.ndarray], scores: np.ndarray, table: TokenTable, scale: Scale = QUALITY
) -> Student:
    """Fit on the token ids of at least two documents and the oracle's scores `[N, D]`.

    Memory: about 1 GB, and 12 bytes for each distinct n-gram of a document, twice. Raises HeadError
    if the documents have more n-grams than the solver can count (E-HEAD-MANY).
    """
    from scipy.sparse import vstack
    from threadpoolctl import threadpool_limits

    found = np.concatenate([scalars(block, table) for block in _cut(documents)])
    targets = np.asarray(scores, np.float64)
    mean = found.mean(0)
    deviation = np.maximum(found.std(0), _LEAST_DEVIATION)
    blocks = []
    first = 0
    num_entries = 0
    for block in _cut(documents):
        values = standardised(found[first : first + len(block)], mean, deviation)
        blocks.append(_joined(ngrams(block, table), values))
        first += len(block)
        num_entries += blocks[-1].nnz
        _require_countable(num_entries, first, len(documents))
    features = vstack(blocks, format="csr")
    del blocks
    with threadpool_limits(1):  # one order of sums, so that equal inputs give equal bytes
        weights, bias, penalty = _fit(features, targets)
    weights = weights.astype(np.float16).astype(np.float64)
    return Student(weights, bias, mean, deviation, penalty, scale)


def _cut(documents: Sequence[np.ndarray]) -> Iterator[Sequence[np.ndarray]]:
    """The documents in blocks of about `BLOCK_TOKENS` tokens."""
    ends = np.cumsum([len(document) for document in documents])
    cuts = np.flatnonzero(np.diff(ends // BLOCK_TOKENS)) + 1
    for start, end in pairwise([0, *cuts.tolist(), len(documents)]):
        yield documents[start:end]


def _require_countable(num_entries: int, num_read: int, num_documents: int) -> None:
    if num_entries > MAX_ENTRIES:
        raise HeadError(
            "the labelled documents have more n-grams than the student's solver can count",
            where=f"{num_documents} documents of train",
            found=f"{num_entries} n-grams in the first {num_read}",
            expected=f"at most {MAX_ENTRIES}",
            do="lower [oracle] max_documents, or use the probe and the judge",
            code="E-HEAD-MANY",
        )


def _joined(counts: Any, found: np.ndarray) -> Any:
    from scipy.sparse import csr_array, hstack

    return hstack([counts, csr_array(found)], format="csr")


def _fit(features: Any, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    rows = spread_rows(len(targets), MAX_DUAL)
    sample = features[rows]
    found = fit_ridge((sample @ sample.T).toarray(), targets[rows])
    if len(rows) == len(targets):
        weights = features.T @ found.dual
        bias = targets.mean(0) - np.asarray(features.mean(0)).ravel() @ weights
        return weights, bias, found.penalty
    from sklearn.linear_model import Ridge

    model = Ridge(alpha=found.penalty, solver="sparse_cg", tol=1e-8, copy_X=False).fit(
        features, targets
    )
    return np.ascontiguousarray(model.coef_.T), np.asarray(model.intercept_), found.penalty
