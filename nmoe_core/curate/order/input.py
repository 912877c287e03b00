"""What every order is given, checked: a topic and a length for each document."""

from __future__ import annotations

import numpy as np

from nmoe_core.base.errors import CurationError

_MAX_TOPICS = 2**20  # orders hold a few numbers for every topic up to the highest


def check_rows(doc_clusters: np.ndarray, doc_tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both as int64 `[N]`, copied only where they are of another type.

    Raises:
        CurationError: They are not two arrays of one length of counts (E-CURATION-ORDER).
    """
    clusters, tokens = np.asarray(doc_clusters), np.asarray(doc_tokens)
    if clusters.ndim != 1 or clusters.shape != tokens.shape:
        raise refusal("arrays differ", (clusters.shape, tokens.shape), "two of shape [N]")
    for what, values in (("topics", clusters), ("lengths", tokens)):
        if values.dtype.kind not in "iu" or (len(values) and values.min() < 0):
            raise refusal(f"{what} are not counts", values.dtype, "integers from 0")
    if len(clusters) and clusters.max() >= _MAX_TOPICS:
        raise refusal("topics are not numbered from 0", clusters.max(), f"below {_MAX_TOPICS:,}")
    return clusters.astype(np.int64, copy=False), tokens.astype(np.int64, copy=False)


def check_column(name: str, values: np.ndarray, num_documents: int) -> np.ndarray:
    """`values` as an array `[N]` of numbers that can be sorted.

    Raises:
        CurationError: It has another shape, or a value is NaN (E-CURATION-ORDER).
    """
    column = np.asarray(values)
    if column.shape != (num_documents,) or column.dtype.kind not in "iuf":
        expected = f"a number for each of {num_documents} documents"
        raise refusal(f"{name} is not a column", (column.dtype, column.shape), expected)
    if column.dtype.kind == "f" and np.isnan(column).any():
        raise refusal(f"{name} has no order", "NaN", "numbers")
    return column


def refusal(what: str, found: object, expected: str) -> CurationError:
    """An E-CURATION-ORDER error."""
    return CurationError(
        what, where="order", found=found, expected=expected, code="E-CURATION-ORDER"
    )
