"""The mixtures that small decoders are trained on: points of the simplex around the plan's shares.

The first two are the plan's own shares and equal shares. The others are drawn from Dirichlet
distributions whose mean lies between the two and whose spread differs, as in RegMix (arXiv
2407.01492), and each is the one of its candidates that is farthest from all earlier mixtures. A
mixture depends on its number only, so a second command with more runs keeps the first ones.
"""

from __future__ import annotations

import numpy as np

_CANDIDATES = 64
_EQUAL_PART = 0.25  # of the mean of the draws: a source with a tiny share must be tried too
_SPREAD = (0.5, 8.0)  # Dirichlet parameters per source: from near single sources to near the mean


def draw_mixtures(plan: np.ndarray, most: np.ndarray, count: int, seed: int) -> np.ndarray:
    """`count` mixtures: float64 `[count, sources]`, each row with the sum 1.

    Args:
        plan: Shares of the plan: float64 `[sources]`.
        most: Largest share of each source that its text allows: float64 `[sources]`, with a sum of
            at least 1.
        count: Number of mixtures, at least 2.
        seed: Seed of the draws.
    """
    num_sources = len(plan)
    equal = np.full(num_sources, 1 / num_sources)
    found = [within(plan, most), within(equal, most)]
    center = (1 - _EQUAL_PART) * plan + _EQUAL_PART * equal
    while len(found) < count:
        rng = np.random.default_rng([seed, len(found)])
        low, high = np.log(_SPREAD).tolist()
        spread = np.exp(rng.uniform(low, high, _CANDIDATES)) * num_sources
        candidates = np.stack([within(rng.dirichlet(center * one), most) for one in spread])
        found.append(candidates[_nearest(candidates, np.stack(found)).argmax()])
    return np.stack(found[:count])


def within(shares: np.ndarray, most: np.ndarray) -> np.ndarray:
    """Shares of which none is above `most`: what is cut goes to the other sources in proportion."""
    shares = shares / shares.sum()
    is_full = np.zeros(len(shares), np.bool_)
    while (over := (shares > most + 1e-12) & ~is_full).any():
        is_full |= over
        rest = np.where(is_full, 0.0, np.maximum(shares, 1e-12))
        shares = np.where(is_full, most, rest / rest.sum() * (1 - most[is_full].sum()))
    return shares


def _nearest(candidates: np.ndarray, among: np.ndarray) -> np.ndarray:
    """Hellinger distance of each candidate to the nearest mixture: float64 `[candidates]`."""
    roots = np.sqrt(candidates)[:, None] - np.sqrt(among)[None]
    return np.sqrt((roots**2).sum(2)).min(1)
