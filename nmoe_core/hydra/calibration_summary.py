"""Fits weights and thresholds on one half of val and measures everything on the other.

Keep shares are unweighted shares of documents under grading with triage: one that leaves at the
probe is not kept. Documents of equal scores get equal decisions, so on tied scores the nearest
share that a threshold can give is fitted, and the interval says what it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from nmoe_core.errors import CalibrationError
from nmoe_core.hydra.calibration_rows import CalibrationRows
from nmoe_core.hydra.decide import DECISIONS
from nmoe_core.hydra.intervals import Z975, Interval, bootstrap, upper_bound, wilson
from nmoe_core.hydra.metrics import (
    agreement,
    auc,
    average_precision,
    baselines,
    calibration_error,
    isotonic,
    quadratic_kappa,
    regression_line,
    spearman,
    spearman_interval,
)
from nmoe_core.hydra.scores import DECIMALS, UNIFORM_WEIGHTS, aggregate
from nmoe_core.hydra.thresholds import (
    Thresholds,
    fit_thresholds,
    fit_weights,
    midpoint_above,
    would_keep,
)

NUM_BINS = 10


def summarise(
    fit: CalibrationRows,
    report: CalibrationRows,
    target_keep: float,
    max_false_drop: float,
    target_drop: float | None = None,
) -> dict[str, Any]:
    """Fit on one half of val, measure on the other.

    Args:
        fit: The rows thresholds and weights come from.
        report: The rows every metric comes from.
        target_keep: Share of documents to keep, in (0, 1).
        max_false_drop: Bound on the oracle's keeps among dropped documents.
        target_drop: Share to drop; as many as the bound allows when left out.

    Returns:
        Fields of `calibration_summary.json`.

    Raises:
        CalibrationError: Probe, judge or oracle scores of the fit half are all alike
            (E-CALIBRATION-CONSTANT).
    """
    weights, weights_source = _weights(fit)
    a, b = _Aggregates.of(fit, weights), _Aggregates.of(report, weights)
    for name, scores in (("probe", a.probe), ("judge", a.judge), ("oracle", a.oracle)):
        if scores is not None:
            _require_spread(name, scores)
    oracle_tau = would_keep(a.oracle, target_keep)
    taus = fit_thresholds(
        *(a.probe, a.judge, a.oracle >= oracle_tau, target_keep, max_false_drop, target_drop)
    )
    fit_keep = _decisions(a, taus) == 2
    decided, oracle_keeps = _decisions(b, taus), b.oracle >= oracle_tau
    return {
        "weights": weights,
        "weights_source": weights_source,
        "tau_drop": taus.tau_drop,
        "tau_keep": taus.tau_keep,
        "tau_probe": taus.tau_probe,
        "oracle_tau_keep": oracle_tau,
        "count": len(fit.keys) + len(report.keys),
        "count_fit": len(fit.keys),
        "count_report": len(report.keys),
        "target_keep": target_keep,
        "target_drop": target_drop,
        "max_false_drop": max_false_drop,
        "achieved_keep_fit": _rounded(fit_keep.mean()),
        **_shares(decided, fit_keep),
        **_errors(b, taus, decided, oracle_keeps),
        **_decision_agreement(b, decided, oracle_keeps, a.oracle, taus),
        **_reliability(a, b, a.oracle >= oracle_tau, oracle_keeps),
        "heads": _heads(fit, report, weights),
        "keep_curve": keep_curve(b.deployed(taus)),
    }


@dataclass(frozen=True, slots=True)
class _Aggregates:
    """Aggregated scores `[N]` in 0..1."""

    probe: np.ndarray | None
    judge: np.ndarray
    oracle: np.ndarray

    @classmethod
    def of(cls, rows: CalibrationRows, weights: Mapping[str, float]) -> _Aggregates:
        probe = None if rows.probe is None else aggregate(rows.probe, weights)
        return cls(probe, aggregate(rows.judge, weights), aggregate(rows.oracle, weights))

    def exits(self, taus: Thresholds) -> np.ndarray:
        """Which documents leave at the probe."""
        if self.probe is None:
            return np.zeros(len(self.judge), np.bool_)
        return self.probe < taus.tau_probe

    def deployed(self, taus: Thresholds) -> np.ndarray:
        """The judge's score, -1 for those that left before it."""
        return np.where(self.exits(taus), -1.0, self.judge)


def _weights(rows: CalibrationRows) -> tuple[dict[str, float], str]:
    if rows.targets is None:
        return UNIFORM_WEIGHTS, "uniform: labels carry no independent target"
    return fit_weights(rows.oracle, rows.targets), "least squares on the labels' target"


def _require_spread(name: str, scores: np.ndarray) -> None:
    if np.ptp(scores) < 10**-DECIMALS:
        raise CalibrationError(
            f"{name} scores are all alike, so no threshold parts them",
            found=f"{scores[0]} for {len(scores)} documents",
            do="train the heads longer, or check the oracle",
            code="E-CALIBRATION-CONSTANT",
        )


def _decisions(scores: _Aggregates, taus: Thresholds) -> np.ndarray:
    """Places in `DECISIONS`: 0 drop, 1 band, 2 keep: int64 `[N]`."""
    deployed = scores.deployed(taus)
    # A threshold of 0 keeps every document that is judged; one that left is dropped always.
    stays = deployed >= 0
    is_keep = stays & (deployed >= taus.tau_keep)
    is_drop = ~stays | (deployed < taus.tau_drop)
    return np.where(is_keep, 2, np.where(is_drop, 0, 1))


def _shares(decided: np.ndarray, fit_keep: np.ndarray) -> dict[str, Any]:
    """Shares of the report half by decision, with 95 % intervals of what a new document gets."""
    found: dict[str, Any] = {}
    for place, name in enumerate(DECISIONS):
        hits = decided == place
        interval = wilson(int(hits.sum()), len(hits))
        if name == "keep":
            interval = keep_interval(fit_keep, hits)
        found[f"achieved_{name}"] = _rounded(hits.mean())
        found[f"achieved_{name}_ci95"] = _interval(interval)
    return found


def keep_interval(fit_keep: np.ndarray, report_keep: np.ndarray) -> Interval:
    """95 % interval of the share of new documents that the fitted thresholds keep.

    Both halves tell of it: the report half by counting, and the fit half because a threshold at an
    order statistic keeps a share of known law, Beta(k, n - k + 1), whatever the scores' own law is.
    The interval is of both counts together, at 97.5 %: it is to hold the share of new documents and
    the report half's own at once, and each may fail half the time (Bonferroni).
    """
    num_hits = int(fit_keep.sum()) + int(report_keep.sum())
    return wilson(num_hits, len(fit_keep) + len(report_keep), Z975)


def _errors(
    scores: _Aggregates, taus: Thresholds, decided: np.ndarray, oracle_keeps: np.ndarray
) -> dict[str, Any]:
    """False drops with their upper bounds, and how much of what is wanted is kept."""
    exits, keeps, drops = scores.exits(taus), decided == 2, decided == 0
    judge_keeps = scores.judge >= taus.tau_keep
    return {
        "early_exit_rate": _rounded(exits.mean()),
        **_rate("false_drop_rate", oracle_keeps, drops),
        **_rate("probe_false_drop_rate", oracle_keeps, exits),
        **_rate("probe_judge_conflict_rate", judge_keeps, exits),
        "precision_keep": _share(oracle_keeps, keeps),
        "precision_keep_ci95": _share_interval(oracle_keeps, keeps),
        "recall_keep": _share(keeps, oracle_keeps),
        "recall_keep_ci95": _share_interval(keeps, oracle_keeps),
        "oracle_keep": _rounded(oracle_keeps.mean()),
    }


def _rate(name: str, errors: np.ndarray, among: np.ndarray) -> dict[str, Any]:
    """The rate, and the bound that it stays under with a confidence of 95 %."""
    bound = upper_bound(int(errors[among].sum()), int(among.sum())) if among.any() else None
    return {name: _share(errors, among), f"{name}_upper95": _rounded(bound)}


def _decision_agreement(
    scores: _Aggregates,
    decided: np.ndarray,
    oracle_keeps: np.ndarray,
    fit_oracle: np.ndarray,
    taus: Thresholds,
) -> dict[str, Any]:
    """Decisions against those that the oracle's own scores give at the same shares."""
    drop_below = float(np.quantile(fit_oracle, (decided == 0).mean(), method="higher"))
    by_oracle = np.where(oracle_keeps, 2, np.where(scores.oracle < drop_below, 0, 1))
    matrix = np.zeros((3, 3), int)
    np.add.at(matrix, (by_oracle, decided), 1)
    deployed = scores.deployed(taus)
    return {
        "auc_keep": _rounded(auc(deployed, oracle_keeps)),
        "auc_keep_ci95": bootstrap(lambda i: auc(deployed[i], oracle_keeps[i]), len(decided)),
        "average_precision_keep": _rounded(average_precision(deployed, oracle_keeps)),
        "decisions_oracle_by_grading": matrix.tolist(),
        "decision_kappa": _rounded(quadratic_kappa(by_oracle, decided, 3)),
    }


def _reliability(
    fit: _Aggregates, report: _Aggregates, fit_keeps: np.ndarray, oracle_keeps: np.ndarray
) -> dict[str, Any]:
    """How far the judge's score may be read as the oracle's, and as a chance to be kept."""
    points, chances = isotonic(fit.judge, fit_keeps.astype(float))
    chance = np.interp(report.judge, points, chances)
    line = regression_line(report.judge, report.oracle)
    return {
        "ece_keep": _rounded(calibration_error(chance, oracle_keeps.astype(float))),
        "reliability_line": line and [_rounded(value) for value in line],
        "reliability": reliability(report.judge, report.oracle, oracle_keeps),
    }


def _heads(
    fit: CalibrationRows, report: CalibrationRows, weights: Mapping[str, float]
) -> dict[str, Any]:
    """Agreement of each head with the oracle on the report half, and of heads with each other."""
    sources = report.sources
    found: dict[str, Any] = {"judge": agreement(report.judge, report.oracle, sources, weights)}
    if report.probe is not None:
        found["probe"] = agreement(report.probe, report.oracle, sources, weights)
        a, b = aggregate(report.probe, weights), aggregate(report.judge, weights)
        found["probe_with_judge"] = {
            "spearman": _rounded(spearman(a, b)),
            "spearman_ci95": spearman_interval(a, b),
        }
    found["baselines"] = baselines(
        (fit.oracle, fit.sources, fit.lengths),
        (report.oracle, report.sources, report.lengths),
        weights,
    )
    return found


def reliability(
    judge: np.ndarray, oracle: np.ndarray, oracle_keeps: np.ndarray
) -> list[dict[str, Any]]:
    """Ten bins of equal count by judge score: their count, means, and the oracle's keep rate."""
    order = np.argsort(judge, kind="stable")
    return [
        {
            "count": len(rows),
            "judge_mean": _rounded(judge[rows].mean()),
            "oracle_mean": _rounded(oracle[rows].mean()),
            "oracle_keep_rate": _rounded(oracle_keeps[rows].mean()),
        }
        for rows in np.array_split(order, min(NUM_BINS, len(order)))
    ]


def keep_curve(scores: np.ndarray) -> list[list[float]]:
    """Points (share to keep, threshold that keeps it) at 1 % to 99 %."""
    descending = np.sort(scores)[::-1]
    counts = [max(1, round(percent * len(scores) / 100)) for percent in range(1, 100)]
    taus = [midpoint_above(descending, count) for count in counts]
    return [[percent / 100, tau] for percent, tau in zip(range(1, 100), taus)]


def _share(of: np.ndarray, among: np.ndarray) -> float | None:
    return _rounded(of[among].mean()) if among.any() else None


def _share_interval(of: np.ndarray, among: np.ndarray) -> list[float | None] | None:
    return _interval(wilson(int(of[among].sum()), int(among.sum()))) if among.any() else None


def _interval(value: Interval) -> list[float | None]:
    return [_rounded(bound) for bound in value]


def _rounded(value: float | np.floating[Any] | None) -> float | None:
    return None if value is None else round(float(value), DECIMALS)
