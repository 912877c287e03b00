"""Ridge regression whose penalty minimises the leave-one-out error.

The error has a closed form and needs one eigendecomposition of the kernel: 4 s for 3,000 rows. The
student and the probe use the same regression, on features of their own.
"""

from typing import NamedTuple

import numpy as np

MAX_DUAL = 5000  # rows of which a kernel is decomposed
PENALTIES = np.logspace(-3, 2, 16)


class Ridge(NamedTuple):
    """A fitted regression: the features' weights are `features.T @ dual`.

    Attributes:
        dual: float64 `[N, D]`, of columns that sum to zero.
        penalty: The chosen penalty.
        error: Mean squared error when each row is predicted from all other rows.
    """

    dual: np.ndarray
    penalty: float
    error: float


def fit_ridge(kernel: np.ndarray, targets: np.ndarray) -> Ridge:
    """Fit targets `[N, D]` on the inner products `[N, N]` of all rows' features."""
    num_rows = len(targets)
    centred = targets - targets.mean(0)
    row_means = kernel.mean(0)
    values, vectors = np.linalg.eigh(kernel + (kernel.mean() - row_means - row_means[:, None]))
    values = np.maximum(values, 0.0)
    projected = vectors.T @ centred
    squared = vectors**2

    def left_out_error(penalty: float) -> float:
        shrunk = values / (values + penalty)
        influence = squared @ shrunk + 1 / num_rows
        residuals = centred - vectors @ (shrunk[:, None] * projected)
        return float(np.square(residuals / (1 - influence)[:, None]).mean())

    errors = [left_out_error(penalty) for penalty in PENALTIES]
    best = int(np.argmin(errors))
    penalty = float(PENALTIES[best])
    dual = vectors @ (projected / (values + penalty)[:, None])
    return Ridge(dual - dual.mean(0), penalty, errors[best])


def spread_rows(num_rows: int, most: int) -> np.ndarray:
    """At most `most` rows, evenly spaced: int64, ascending."""
    return np.linspace(0, num_rows - 1, min(num_rows, most)).astype(np.int64)
