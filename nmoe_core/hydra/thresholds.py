"""Thresholds from the heads' own scores, and the aggregation weights.

Thresholds are fitted on the scores that the deployed path gives, never on the oracle's: a head's
scores shrink towards their mean, so a cut through the oracle's would keep another share than asked
for (docs/calibration.md). Each lies midway between two scores seen, so the last digits of a score
do not move a document across it.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np

from nmoe_core.hydra.intervals import chance_of_at_most
from nmoe_core.hydra.scores import DECIMALS, DIMENSIONS, MAX_GRADE

DELTA = 0.05
STARTS = (1.0, 1.6, 2.6, 5.0)
# Largest share of all documents that the early exit may take from what the judge keeps.
MAX_LOST_KEEP = 0.01


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Scores in 0..1 that part documents; `tau_drop <= tau_keep`.

    A document leaves at the probe when its probe score is below `tau_probe`; of the others, it is
    kept from `tau_keep` on and dropped below `tau_drop`, both on the judge's score.
    """

    tau_probe: float
    tau_drop: float
    tau_keep: float


def fit_thresholds(
    probe: np.ndarray | None,
    judge: np.ndarray,
    oracle_keeps: np.ndarray,
    target_keep: float,
    max_false_drop: float,
    target_drop: float | None = None,
) -> Thresholds:
    """Fit the three thresholds on documents that both heads scored.

    Args:
        probe: Aggregated probe scores `[N]`; without them nothing leaves early.
        judge: Aggregated judge scores `[N]`.
        oracle_keeps: Whether the oracle would keep the document: bool `[N]`.
        target_keep: Share of documents that grading keeps, early exits counted as not kept.
        max_false_drop: Bound on the share of documents the oracle would keep among those that
            leave at the probe, and among all that are dropped.
        target_drop: Share of documents to drop, early exits included; without it as many are
            dropped as `max_false_drop` allows.
    """
    num_keep = max(1, round(target_keep * len(judge)))
    tau_probe = 0.0
    if probe is not None:
        ceiling = _probe_ceiling(probe, judge, num_keep, target_drop)
        tau_probe = largest_certified(probe, oracle_keeps, max_false_drop, ceiling)
    # A document that left has no judge score; it ranks below all that stay.
    deployed = judge if probe is None else np.where(probe < tau_probe, -1.0, judge)
    descending = np.sort(deployed)[::-1]
    tau_keep = midpoint_above(descending, num_keep)
    if target_drop is None:
        tau_drop = largest_certified(deployed, oracle_keeps, max_false_drop, tau_keep)
    else:
        num_stay = len(judge) - round(target_drop * len(judge))
        tau_drop = min(midpoint_above(descending, num_stay), tau_keep)
    return Thresholds(tau_probe, tau_drop, tau_keep)


def _probe_ceiling(
    probe: np.ndarray, judge: np.ndarray, num_keep: int, target_drop: float | None
) -> float:
    """What the judge would keep hardly leaves at the probe, nor more than is to be dropped."""
    tau_keep = midpoint_above(np.sort(judge)[::-1], num_keep)
    judge_keeps = np.sort(probe[judge >= tau_keep])
    num_lost = int(MAX_LOST_KEEP * len(judge))
    ceiling = float(judge_keeps[num_lost]) if num_lost < len(judge_keeps) else 1.0
    if target_drop is None:
        return ceiling
    return min(ceiling, float(np.sort(probe)[min(int(target_drop * len(probe)), len(probe) - 1)]))


def midpoint_above(descending: np.ndarray, num_above: int) -> float:
    """A threshold that `num_above` of the scores reach: midway to the next lower score.

    It is 0.0 when all reach it. Scores tied at the cut all reach it or, where that is nearer to
    `num_above`, none does.
    """
    if num_above >= len(descending):
        return 0.0
    cut = descending[num_above - 1]
    first = int(np.searchsorted(-descending, -cut, side="left"))
    last = int(np.searchsorted(-descending, -cut, side="right"))
    nearest = first if first > 0 and num_above - first < last - num_above else last
    if nearest >= len(descending):
        return 0.0
    return _between(float(descending[nearest]), float(descending[nearest - 1]))


def largest_certified(
    scores: np.ndarray, oracle_keeps: np.ndarray, max_false_drop: float, ceiling: float
) -> float:
    """The largest threshold up to `ceiling` below which few documents are worth keeping.

    With a confidence of 95 %, at most `max_false_drop` of the documents below it are ones that the
    oracle keeps. Thresholds are tested in ascending order, a hundredth of the documents apart, from
    four starts, each at a quarter of the error; a start's first failure ends it. That is
    fixed-sequence testing, so no correction for the number of thresholds is due (Angelopoulos et
    al. 2021, Learn then Test). The first start has just enough documents to pass without an error.
    0.0, which drops nothing, when no threshold passes.
    """
    if max_false_drop <= 0:
        return 0.0
    ranked, num_scores = np.sort(scores), len(scores)
    false_drops = np.cumsum(oracle_keeps[np.argsort(scores, kind="stable")])
    delta, best = DELTA / len(STARTS), 0.0
    fewest = math.log(delta) / math.log1p(-max_false_drop)
    for start in STARTS:
        for place in range(math.ceil(start * fewest), num_scores, max(1, num_scores // 100)):
            count = int(np.searchsorted(ranked, ranked[place], side="left"))
            if count == 0:
                continue
            tau = _between(float(ranked[count - 1]), float(ranked[count]))
            chance = chance_of_at_most(int(false_drops[count - 1]), count, max_false_drop)
            if tau > ceiling or chance > delta:
                break
            best = max(best, tau)
    return best


def _between(low: float, high: float) -> float:
    """Midway between two scores, above `low` and at most `high`, with the decimals of scores."""
    middle = round((max(0.0, low) + high) / 2, DECIMALS)
    return middle if low < middle <= high else high


def would_keep(oracle: np.ndarray, target_keep: float) -> float:
    """The oracle's own threshold: its (1 - target_keep) quantile, a value that it gave."""
    return float(np.quantile(oracle, 1 - target_keep, method="higher"))


def fit_weights(scores: np.ndarray, targets: np.ndarray) -> dict[str, float]:
    """Weights, none negative, that sum to 1 and best explain `targets` by least squares.

    Exact: a solution is the plain one on the dimensions it does not set to zero, and there are only
    31 sets of those. Only a target independent of the scores says anything: against their own mean
    the answer is uniform by construction.

    Args:
        scores: The oracle's grades `[N, 5]`.
        targets: Independent quality in 0..1: `[N]`.
    """
    x, y = scores.astype(np.float64) / MAX_GRADE, targets
    best, best_error = np.full(len(DIMENSIONS), 1 / len(DIMENSIONS)), math.inf
    for size in range(1, len(DIMENSIONS) + 1):
        for chosen in itertools.combinations(range(len(DIMENSIONS)), size):
            weights = _weights_on(x, y, list(chosen))
            error = float(((x @ weights - y) ** 2).sum())
            if weights.min() >= 0 and error < best_error - 1e-12:
                best, best_error = weights, error
    return {name: round(float(w), DECIMALS) for name, w in zip(DIMENSIONS, best)}


def _weights_on(x: np.ndarray, y: np.ndarray, chosen: list[int]) -> np.ndarray:
    """Least squares with sum 1 on some columns: the last one stands for the rest of the sum."""
    weights = np.zeros(x.shape[1])
    last = x[:, chosen[-1]]
    free = np.linalg.lstsq(x[:, chosen[:-1]] - last[:, None], y - last, rcond=None)[0]
    weights[chosen[:-1]] = free
    weights[chosen[-1]] = 1 - free.sum()
    return weights
