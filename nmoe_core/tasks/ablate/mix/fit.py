"""Predicts losses from shares: ridge regressions, of which cross-validation chooses one.

The families, from simple to rich: a constant (the mixture has no effect that these runs show), the
shares, the logarithms of the shares (each further token of a source helps less), and both with the
products of pairs of shares (sources help or replace each other). All predict the logarithm of each
target's loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from nmoe_core.tasks.ablate.mix.mixtures import within

FLOOR = 0.01  # added to shares before the logarithm, which has no value at 0
STEP = 0.1  # by which a share grows where effects are told
_PENALTIES = np.logspace(-4, 3, 15)
_FOLDS = 10
_DRAWS = 200
_CANDIDATES = 4000
_BEST = 40  # candidates whose mean is the proposal


def _constant(shares: np.ndarray) -> np.ndarray:
    return np.zeros((len(shares), 1))


def _logarithms(shares: np.ndarray) -> np.ndarray:
    return np.log(shares + FLOOR)


def _interactions(shares: np.ndarray) -> np.ndarray:
    first, second = np.triu_indices(shares.shape[1], 1)
    return np.hstack([shares, _logarithms(shares), shares[:, first] * shares[:, second]])


FAMILIES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "constant": _constant,
    "shares": lambda shares: shares,
    "logarithms": _logarithms,
    "interactions": _interactions,
}


@dataclass(frozen=True, slots=True)
class Proposal:
    """Proposed shares, with the ends of 95 % intervals: float64 `[sources]` each."""

    shares: np.ndarray
    low: np.ndarray
    high: np.ndarray


class Fit:
    """The losses of runs as a function of their shares.

    Args:
        shares: float64 `[runs, sources]`; rows have the sum 1.
        losses: float64 `[runs, targets]`, above 0.
        weights: Weight of each target in the objective: float64 `[targets]`, with the sum 1.
        seed: Seed of folds and draws.

    Attributes:
        family: The name of the chosen family: that with the lowest error. Interactions are chosen
            only if few runs could not have made them better by chance: the fewer runs they have per
            feature, the wider are the intervals of their effects.
        errors: Mean squared error of each family on runs that were left out, as a share of the
            error of the mean of the other runs; `constant` has 1.
    """

    def __init__(
        self, shares: np.ndarray, losses: np.ndarray, weights: np.ndarray, seed: int
    ) -> None:
        self.shares = shares
        self.weights = weights
        self.seed = seed
        self._logs = np.log(losses)
        left_out = {name: self._left_out(name) for name in FAMILIES}
        scale = (left_out["constant"] ** 2).mean(0)
        scale[scale == 0] = 1.0
        squares = {name: (found**2 / scale) @ weights for name, found in left_out.items()}
        self.errors = {name: float(found.mean()) for name, found in squares.items()}
        self.family = _chosen(squares)
        self._residuals = left_out[self.family]
        self._features = FAMILIES[self.family]
        self._predict = _ridge(self._features(shares), self._logs)

    @property
    def has_effect(self) -> bool:
        """Whether the mixture predicts losses better than a constant does."""
        return self.family != "constant"

    def objective(self, shares: np.ndarray) -> np.ndarray:
        """Mean logarithm of the losses, weighted over targets: float64 `[mixtures]`."""
        return self._predict(self._features(shares)) @ self.weights

    @cached_property
    def _draws(self) -> list[Callable[[np.ndarray], np.ndarray]]:
        """Predictors fitted to losses that other chances could have given: the predicted losses
        plus residuals of left-out runs, drawn with replacement."""
        rng = np.random.default_rng([self.seed, 1])
        features = self._features(self.shares)
        center = self._predict(features)
        found = []
        for _ in range(_DRAWS):
            chosen = rng.integers(len(self.shares), size=len(self.shares))
            found.append(_ridge(features, center + self._residuals[chosen]))
        return found

    def propose(self, most: np.ndarray) -> Proposal:
        """The shares with the lowest objective among mixtures like the tried ones: the mean of the
        best one per cent of 4,000. `most`: see `draw_mixtures`; no share leaves the range that the
        runs tried. The interval of a share holds 95 % of the proposals that other chances would
        have given."""
        low = self.shares.min(0)
        high = np.minimum(self.shares.max(0), most)
        rng = np.random.default_rng([self.seed, 2])
        pairs = rng.integers(len(self.shares), size=(_CANDIDATES, 3))
        parts = rng.dirichlet(np.ones(3), _CANDIDATES)
        mixed = np.einsum("cp,cps->cs", parts, self.shares[pairs])
        spread = np.exp(rng.normal(0, 0.3, mixed.shape))
        candidates = np.stack([within(one, most) for one in np.clip(mixed * spread, low, high)])
        features = self._features(candidates)

        def best(predict: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
            order = np.argsort(predict(features) @ self.weights, kind="stable")
            return candidates[order[:_BEST]].mean(0)

        others = np.stack([best(predict) for predict in self._draws])
        ends = np.quantile(others, [0.025, 0.975], axis=0)
        return Proposal(best(self._predict), *ends)

    def effects(self, around: np.ndarray) -> np.ndarray:
        """The relative change of each target's loss if a source's share grows by ten points, taken
        from the others in proportion: float64 `[sources, targets, 3]`, the estimate and the ends of
        an interval that holds for all sources of a target together with 95 %. around: the mixture
        that is changed: float64 `[sources]`."""
        growth = np.minimum(STEP / np.maximum(1 - around, STEP), 1.0)
        moved = around + growth[:, None] * (np.eye(len(around)) - around)
        here = self._features(around[None])
        there = self._features(moved)

        def change(predict: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
            return predict(there) - predict(here)

        estimate = change(self._predict)
        error = np.std([change(predict) for predict in self._draws], axis=0, ddof=1)
        half = _t_of_all(len(self.shares), len(around)) * error
        return np.expm1(np.stack([estimate, estimate - half, estimate + half], axis=2))

    def differences(self, shares: np.ndarray, others: np.ndarray) -> np.ndarray:
        """The objective of one mixture minus that of another, with an estimate from each draw in
        place of the chances of these runs: float64 `[draws + 1]`, the estimate first."""
        both = self._features(np.stack([shares, others]))
        values = [predict(both) @ self.weights for predict in (self._predict, *self._draws)]
        return np.array([one - other for one, other in values])

    def _left_out(self, name: str) -> np.ndarray:
        """The residuals of runs that the regression did not see: float64 `[runs, targets]`."""
        from sklearn.model_selection import KFold

        features = FAMILIES[name](self.shares)
        count = len(features)
        found = np.empty_like(self._logs)
        folds = KFold(min(count, _FOLDS), shuffle=True, random_state=self.seed)
        for kept, out in folds.split(features):
            predict = _ridge(features[kept], self._logs[kept])
            found[out] = self._logs[out] - predict(features[out])
        return found


def _chosen(squares: Mapping[str, np.ndarray]) -> str:
    """The family with the lowest mean of the squared errors `[runs]`; interactions, which have the
    most features, only if they are better than all others by more than one standard error."""
    ranked = sorted(squares, key=lambda name: squares[name].mean())
    best, second = ranked[:2]
    if best != "interactions" or second == "constant":
        return best
    gain = squares[second] - squares[best]
    return best if gain.mean() > gain.std(ddof=1) / len(gain) ** 0.5 else second


def _ridge(features: np.ndarray, logs: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """A ridge regression of standardised features; each target has its own penalty, by leaving out
    one run at a time."""
    from sklearn.linear_model import RidgeCV

    center = features.mean(0)
    scale = features.std(0)
    scale[scale == 0] = 1.0
    model = RidgeCV(_PENALTIES, alpha_per_target=True)
    model.fit((features - center) / scale, logs)
    return lambda other: model.predict((other - center) / scale).reshape(len(other), -1)


def _t_of_all(num_runs: int, num_sources: int) -> float:
    """Student's t of 95 % intervals that hold for all sources together."""
    from scipy.special import stdtrit

    degrees = max(1, num_runs - num_sources)
    return float(stdtrit(degrees, 1 - 0.025 / num_sources))
