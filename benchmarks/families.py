"""Simulated documents of families, such as sites, which are alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.special import ndtr

Rng = np.random.Generator


class Alike:
    """A generator whose numbers are alike within families: their normal scores share `alike` of
    their variance. Each number has the same distribution as those of an `Rng`."""

    def __init__(self, rng: Rng, families: np.ndarray, alike: float) -> None:
        self._rng, self._families, self._alike = rng, families, alike

    def standard_normal(self, n: int) -> np.ndarray:
        shared = self._rng.standard_normal(self._families.max() + 1)[self._families]
        own = self._rng.standard_normal(n)
        return np.sqrt(self._alike) * shared + np.sqrt(1 - self._alike) * own

    def random(self, n: int) -> np.ndarray:
        return ndtr(self.standard_normal(n))

    def integers(self, low: int, high: int, n: int) -> np.ndarray:
        return low + np.floor(self.random(n) * (high - low)).astype(int)

    def choice(self, values: Any, n: int, p: Any = None) -> np.ndarray:
        values = np.arange(values) if isinstance(values, int) else np.asarray(values)
        shares = np.full(len(values), 1 / len(values)) if p is None else np.asarray(p)
        return values[np.searchsorted(np.cumsum(shares)[:-1], self.random(n), "right")]


def families_of(size: int) -> Callable[[Rng, int], np.ndarray]:
    """Families of `size` documents; or with 0, many small ones and a few large ones: the largest
    have a fifth and a tenth of 500 documents."""

    def draw(rng: Rng, n: int) -> np.ndarray:
        places = np.floor((n // 4 + 1) * rng.random(n) ** 3) if size == 0 else np.arange(n) // size
        return np.unique(places, return_inverse=True)[1]

    return draw
