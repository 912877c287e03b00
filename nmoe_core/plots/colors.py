"""One colour for each cluster, the same in every picture: by rank of size, largest first."""

from __future__ import annotations

import numpy as np

_PALETTES = ("tab20", "tab20b", "tab20c")


def palette() -> np.ndarray:
    """RGBA in 0 to 1, float `[60, 4]`; ranks beyond it begin again."""
    import matplotlib

    maps = (matplotlib.colormaps[name] for name in _PALETTES)
    colors = np.concatenate([colors(range(colors.N)) for colors in maps])
    # Strong tones first: the palettes alternate strong and pale.
    return np.concatenate([colors[:20:2], colors[1:20:2], colors[20:]])


def ranks_by_size(labels: np.ndarray) -> np.ndarray:
    """Rank of each cluster id, 0 for the largest; ids without records come last: int64 `[K]`."""
    sizes = np.bincount(labels)
    rank = np.empty(len(sizes), np.int64)
    rank[np.argsort(-sizes, kind="stable")] = np.arange(len(sizes))
    return rank


def cluster_colors(labels: np.ndarray) -> np.ndarray:
    """RGBA of each cluster id: float `[K, 4]`."""
    colors = palette()
    return colors[ranks_by_size(labels) % len(colors)]
