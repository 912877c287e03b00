"""The design effect of families: documents of one site or one package are alike, so intervals of
figures over them are wider than the same intervals of independent documents."""

import math
from typing import NamedTuple

import numpy as np

MIN_ITEMS = 10
# Rare documents are missed by small samples, so more are counted than there are.
NUM_MISSED = 4
NUM_UNKNOWN = 2  # a design effect counts as its maximum in so many documents
Families = np.ndarray | None
"""The family of each document, `[N]`; None if documents are independent."""


class Design(NamedTuple):
    """What families change in intervals: the variance of the figure as a multiple of the variance
    of independent documents (the design effect), and the effective number of families."""

    effect: float
    num_families: float
    is_independent: bool = False

    @property
    def degrees(self) -> float:
        """Degrees of freedom of the figure's variance."""
        return self.num_families - 1

    @classmethod
    def of(cls, influence: np.ndarray, families: Families) -> "Design | None":
        """The design of a figure by the influence of each document on it, `[N]`; None of fewer than
        `MIN_ITEMS` families.

        The variance is the one of the jackknife that leaves out families. If few documents have
        influence, it is little known, so the effect is taken as close to its maximum, which it has
        if all documents of a family are equal.
        """
        num = len(influence)
        if families is None:
            return cls(1.0, num, True) if num >= MIN_ITEMS else None
        count = effective_count(families)
        if count < MIN_ITEMS:
            return None
        places = np.unique(families, return_inverse=True)[1]
        sizes = np.bincount(places)
        sums = np.bincount(places, influence) / (1 - sizes / num)
        total = float((influence**2).sum())
        if total == 0:
            return cls(num / count, count)
        effect = float((sums**2).sum()) * (1 - 1 / len(sizes)) * (1 - 1 / num) / total
        known = total**2 / float((influence**4).sum())
        effect = (known * effect + NUM_UNKNOWN * num / count) / (known + NUM_UNKNOWN)
        return cls(max(effect, 1.0), count)

    def trials(self, num_trials: float) -> float:
        """The number of independent trials that give an exact interval of the same width as this
        number of trials in families (Korn and Graubard 1998)."""
        if self.is_independent:
            return num_trials
        wider = t_half_width(1.0, self.degrees) / t_half_width(1.0, math.inf)
        return num_trials / self.effect / wider**2


def effective_count(families: np.ndarray) -> float:
    """The number of families of equal size that give a mean the same variance, if documents of a
    family are equal (Kish 1965)."""
    sizes = np.unique(families, return_counts=True)[1].astype(float)
    return float(sizes.sum() ** 2 / (sizes**2).sum())


def share_trials(hits: np.ndarray, families: np.ndarray) -> tuple[float, float]:
    """The numbers of hits and of independent trials of a share of documents in families, `[N]`
    each; of fewer than `MIN_ITEMS` families, as if documents of a family were equal."""
    share = float(hits.mean())
    design = Design.of(hits - share, families)
    count = effective_count(families) if design is None else design.trials(len(hits))
    return share * count, count


def t_half_width(error: float, degrees: float) -> float:
    """Half the width of a 95 % interval with this standard error, by Student's t."""
    from scipy.special import stdtrit

    return float(stdtrit(max(degrees, 1.0), 0.975)) * error
