"""Points in the plane: UMAP where it is installed, else the two first principal components."""

from __future__ import annotations

import warnings
from typing import Literal

import numpy as np

from nmoe_core.curate.topics.clusters import fit_pca

Method = Literal["umap", "pca"]
_FIT_ROWS = 50_000
_UMAP_WIDTH = 50


def flat_projection(
    rows: np.ndarray, seed: int, method: Method | None = None
) -> tuple[np.ndarray, Method]:
    """Project rows to the plane.

    UMAP (McInnes et al. 2018; 15 neighbours, after PCA to 50) is fitted on at most 50,000 rows and
    takes minutes there; its other rows are placed by the fit.

    Args:
        rows: float32 `[N, D]`.
        seed: Of the fits.
        method: Default: `umap` if the library is there, else `pca`.

    Returns:
        float32 `[N, 2]` and the method.
    """
    method = method or ("umap" if _has_umap() else "pca")
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


def _has_umap() -> bool:
    from importlib.util import find_spec

    return find_spec("umap") is not None


def _umap(rows: np.ndarray, seed: int) -> np.ndarray:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one for every choice that a seed makes for it
        import umap  # pyright: ignore[reportMissingImports] (an extra)

        fit = umap.UMAP(
            n_components=2,
            n_neighbors=min(15, len(rows) - 1),
            min_dist=0.1,
            random_state=seed,
        )
        chosen = np.sort(np.random.RandomState(seed).permutation(len(rows))[:_FIT_ROWS])
        points = np.empty((len(rows), 2), np.float32)
        points[chosen] = fit.fit_transform(rows[chosen])
        rest = np.setdiff1d(np.arange(len(rows)), chosen)
        if len(rest):
            points[rest] = fit.transform(rows[rest])
    return points
