"""The student: scikit-learn's ridge on features that are counted one by one, and what it learns."""

import itertools
from collections import Counter

import numpy as np
import pytest
from scipy.sparse import csr_array
from sklearn.linear_model import Ridge

from nmoe_core.heads import student as student_module
from nmoe_core.heads.student import NUM_COLUMNS, PENALTIES, Student, fit_student, ngrams
from nmoe_core.labels.agreement import spearman
from nmoe_core.labels.scores import aggregate

MASK = (1 << 64) - 1


def _column(value: int) -> int:
    z = (value + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return (z ^ (z >> 31)) >> 46


def _twin(documents: list[np.ndarray]) -> csr_array:
    """Features by plain Python."""
    matrix = np.zeros((len(documents), NUM_COLUMNS))
    for row, document in enumerate(documents):
        ids = document.tolist()
        values = ids + [(a + 1 << 32) | b for a, b in itertools.pairwise(ids)]
        for column, count in Counter(map(_column, values)).items():
            matrix[row, column] = count**0.5
        if ids:
            matrix[row] /= np.linalg.norm(matrix[row])
    return csr_array(matrix)


def _documents(num: int, seed: int = 0) -> tuple[list[np.ndarray], np.ndarray]:
    """Random documents, and grades that follow how many ids below 50 each has."""
    rng = np.random.default_rng(seed)
    shares = rng.random(num)
    lengths = rng.integers(20, 120, num)
    documents = [
        np.where(rng.random(n) < share, rng.integers(0, 50, n), rng.integers(50, 5000, n))
        for n, share in zip(lengths, shares)
    ]
    scores = np.clip(np.rint(4 * shares[:, None] + rng.normal(0, 0.3, (num, 5))), 0, 4)
    return [document.astype(np.uint32) for document in documents], scores


def test_features_are_roots_of_hashed_counts_of_one_norm():
    documents = [*_documents(12)[0], np.array([7], np.uint32), np.empty(0, np.uint32)]
    np.testing.assert_allclose(ngrams(documents).toarray(), _twin(documents).toarray(), atol=1e-12)


def test_weights_are_those_of_ridge_regression():
    documents, scores = _documents(80)
    student = fit_student(documents, scores)
    features = _twin(documents)
    expected = Ridge(alpha=student.penalty, solver="lsqr", tol=1e-12).fit(features, scores)
    fresh, _ = _documents(20, seed=1)
    predicted = expected.predict(_twin(fresh))
    np.testing.assert_allclose(student.predict(fresh), np.clip(predicted, 0, 4), atol=2e-6)


def test_the_penalty_is_that_of_the_least_error_of_documents_left_out_one_by_one():
    documents, scores = _documents(14, seed=3)
    features = ngrams(documents).toarray()
    features = features[:, features.any(axis=0)]

    def error(penalty: float) -> float:
        errors = []
        for i in range(len(documents)):
            rows = np.arange(len(documents)) != i
            model = Ridge(alpha=penalty).fit(features[rows], scores[rows])
            errors.append(np.square(model.predict(features[i : i + 1])[0] - scores[i]).mean())
        return float(np.mean(errors))

    assert fit_student(documents, scores).penalty == min(PENALTIES.tolist(), key=error)


def test_more_labels_than_one_decomposition_takes_are_all_fitted(monkeypatch):
    documents, scores = _documents(120)
    monkeypatch.setattr(student_module, "MAX_DUAL", 60)
    found = fit_student(documents, scores)
    twin = Ridge(alpha=found.penalty, solver="lsqr", tol=1e-12).fit(_twin(documents), scores)
    fresh, _ = _documents(20, seed=1)
    predicted = np.clip(twin.predict(_twin(fresh)), 0, 4)
    np.testing.assert_allclose(found.predict(fresh), predicted, atol=1e-4)
    assert np.abs(fit_student(documents[:60], scores[:60]).predict(fresh) - predicted).max() > 0.1


def test_it_ranks_documents_that_it_has_not_seen():
    student = fit_student(*_documents(400))
    documents, scores = _documents(200, seed=9)
    found = spearman(aggregate(student.predict(documents)), aggregate(scores))
    assert found is not None
    assert found > 0.9


@pytest.fixture(scope="module")
def student() -> Student:
    return fit_student(*_documents(60))


def test_scores_of_a_document_do_not_depend_on_the_batch_and_a_second_fit_is_equal(
    student: Student,
):
    documents, _ = _documents(40, seed=5)
    together = student.predict(documents)
    alone = np.concatenate([student.predict([document]) for document in documents])
    assert np.array_equal(together, alone)
    again = fit_student(*_documents(60))
    assert np.array_equal(again.weights, student.weights)
