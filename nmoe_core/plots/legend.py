"""How pictures show a cluster: one colour by rank of size, one name, the same in all of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Terms = Sequence[Sequence[str]]
_PALETTES = ("tab20", "tab20b", "tab20c")
_LAST_DRAWN = 0x052F  # Latin, Greek and Cyrillic: what the font of the pictures has


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


def largest_clusters(labels: np.ndarray, count: int) -> np.ndarray:
    """Ids of at most `count` clusters that have records, largest first."""
    present = np.count_nonzero(np.bincount(labels))
    return np.argsort(ranks_by_size(labels))[: min(count, present)]


def cluster_colors(labels: np.ndarray) -> np.ndarray:
    """RGBA of each cluster id: float `[K, 4]`."""
    colors = palette()
    return colors[ranks_by_size(labels) % len(colors)]


def cluster_name(cluster: int, terms: Terms, num_chars: int = 26) -> str:
    """`7 import, class`: the number and as many typical words as fit."""
    name = str(cluster)
    words = terms[cluster] if cluster < len(terms) else ()
    for word in words:
        if all(ord(letter) <= _LAST_DRAWN for letter in word):
            longer = f"{name}, {word}" if name != str(cluster) else f"{name}  {word}"
            if len(longer) > num_chars:
                break
            name = longer
    return name
