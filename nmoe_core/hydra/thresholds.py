"""Thresholds from the heads' own scores, the aggregation weights, and the file that holds both.

Thresholds are fitted on the scores that the deployed path gives, never on the oracle's: a head's
scores shrink towards their mean, so a cut through the oracle's would keep another share than asked
for (docs/calibration.md). Each lies midway between two scores seen, so the last digits of a score
do not move a document across it.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from loader.format import read_json_object
from nmoe_core.errors import CalibrationError
from nmoe_core.fingerprint import sha256_file
from nmoe_core.hydra.scores import DECIMALS, DIMENSIONS, MAX_GRADE, aggregate

CALIBRATION_NAME = "calibration_summary.json"
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
    probe: np.ndarray,
    judge: np.ndarray,
    oracle_keeps: np.ndarray,
    target_keep: float,
    max_false_drop: float,
) -> Thresholds:
    """Fit the three thresholds on documents that both heads scored.

    Args:
        probe: Aggregated probe scores `[N]`.
        judge: Aggregated judge scores `[N]`.
        oracle_keeps: Whether the oracle would keep the document: bool `[N]`.
        target_keep: Share of documents to keep, in (0, 1).
        max_false_drop: Largest share of documents the oracle would keep among those dropped: of
            those that leave at the probe, and of all that are dropped.
    """
    num_keep = max(1, round(target_keep * len(judge)))
    tau_keep = midpoint_above(np.sort(judge)[::-1], num_keep)
    # What the judge would keep may hardly leave at the probe: the share kept is then the target
    # with and without the early exit.
    judge_keeps = np.sort(probe[judge >= tau_keep])
    num_lost = int(MAX_LOST_KEEP * len(judge))
    ceiling = float(judge_keeps[num_lost]) if num_lost < len(judge_keeps) else 1.0
    tau_probe = largest_safe(probe, oracle_keeps, max_false_drop, ceiling)
    # A document that left has no judge score; it ranks below all that stay.
    deployed = np.where(probe < tau_probe, -1.0, judge)
    tau_drop = largest_safe(deployed, oracle_keeps, max_false_drop, tau_keep)
    return Thresholds(tau_probe, tau_drop, tau_keep)


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


def largest_safe(
    scores: np.ndarray, oracle_keeps: np.ndarray, max_false_drop: float, ceiling: float
) -> float:
    """The largest threshold up to `ceiling` below which few documents are worth keeping.

    Below it, at most `max_false_drop` of the documents are ones the oracle keeps; 0.0, which drops
    nothing, when no threshold between two scores is safe.
    """
    order = np.argsort(scores, kind="stable")
    ranked = scores[order]
    false_drops = np.cumsum(oracle_keeps[order])
    num_below = np.arange(1, len(ranked))
    is_gap = ranked[1:] > ranked[:-1]
    is_safe = false_drops[:-1] <= max_false_drop * num_below
    for i in np.flatnonzero(is_gap & is_safe)[::-1]:
        tau = _between(float(ranked[i]), float(ranked[i + 1]))
        if tau <= ceiling:
            return tau
    return 0.0


def _between(low: float, high: float) -> float:
    """Midway between two scores, above `low` and at most `high`, with the decimals of scores."""
    middle = round((max(0.0, low) + high) / 2, DECIMALS)
    return middle if low < middle <= high else high


def top_share(values: np.ndarray, share: float) -> np.ndarray:
    """Which items are in the top `share`: bool `[N]`; values tied at the cut are all on one side.

    That side is the one that brings the share nearer: oracle aggregates have 21 levels only.
    """
    num_top = max(1, round(share * len(values)))
    return values >= midpoint_above(np.sort(values)[::-1], num_top)


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


@dataclass(frozen=True, slots=True)
class Calibration:
    """A committed calibration: weights and thresholds, and the heads they were fitted for."""

    path: Path
    digest: str
    weights: dict[str, float]
    thresholds: Thresholds
    heads_digest: str

    def aggregate(self, scores: np.ndarray) -> np.ndarray:
        """Weighted aggregate, in 0..1, of scores `[..., 5]`."""
        return aggregate(scores, self.weights)

    def leaves_at_probe(self, probe_scores: np.ndarray) -> np.ndarray:
        """Which documents leave after the probe: bool `[B]` from its scores `[B, 5]`."""
        return self.aggregate(probe_scores) < self.thresholds.tau_probe

    def require_heads(self, heads_digest: str) -> None:
        """Refuse heads that this calibration was not fitted for.

        Raises:
            CalibrationError: The digests differ (E-CALIBRATION-HEADS).
        """
        if heads_digest != self.heads_digest:
            raise CalibrationError(
                "calibration was fitted for other heads",
                where=self.path,
                found=f"heads {heads_digest}",
                expected=self.heads_digest,
                do="run nmoe hydra calibrate with these heads",
                code="E-CALIBRATION-HEADS",
            )


def load_calibration(calibration_dir: Path) -> Calibration:
    """Read `calibration_summary.json`.

    Raises:
        CalibrationError: Missing (E-CALIBRATION-MISSING), or without finite thresholds in order
            and weights of the five dimensions (E-CALIBRATION-FORMAT).
    """
    path = calibration_dir / CALIBRATION_NAME
    if not path.is_file():
        raise CalibrationError(
            "calibration is missing",
            where=path,
            do="run nmoe hydra calibrate",
            code="E-CALIBRATION-MISSING",
        )
    value = read_json_object(path)
    taus = [value.get(key) for key in ("tau_probe", "tau_drop", "tau_keep")]
    numbers = [float(tau) for tau in taus if isinstance(tau, int | float)]
    if len(numbers) != len(taus) or numbers[1] > numbers[2]:
        raise _bad_calibration(path, f"tau_probe, tau_drop, tau_keep = {taus}")
    weights = value.get("weights")
    if not isinstance(weights, dict) or not _are_weights(weights):
        raise _bad_calibration(path, f"weights = {weights}"[:160])
    return Calibration(
        path=path,
        digest=sha256_file(path),
        weights={name: float(weights[name]) for name in DIMENSIONS},
        thresholds=Thresholds(*numbers),
        heads_digest=str(value.get("heads_digest", "")),
    )


def _are_weights(value: dict[str, Any]) -> bool:
    weights = [w for w in value.values() if isinstance(w, int | float) and w >= 0]
    return set(value) == set(DIMENSIONS) and len(weights) == len(value) and sum(weights) > 0


def _bad_calibration(path: Path, found: str) -> CalibrationError:
    return CalibrationError(
        "not a calibration",
        where=path,
        found=found,
        expected="three thresholds with tau_drop <= tau_keep, and five weights",
        do="run nmoe hydra calibrate",
        code="E-CALIBRATION-FORMAT",
    )
