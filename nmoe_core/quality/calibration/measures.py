"""Measurements of fitted thresholds and of the heads.

Every function expects documents on which no head was trained, and only one document per content.
Each rate has a 95 % interval or upper bound.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np

from nmoe_core.base.intervals import (
    Interval,
    auc,
    auc_interval,
    exact_interval,
    spearman,
    spearman_interval,
    upper_bound,
)
from nmoe_core.base.intervals.design import Families, share_trials
from nmoe_core.labels.scores import Scale, rounded
from nmoe_core.quality.agreement import (
    agreement,
    average_precision,
    baselines,
    calibration_error,
    isotonic,
    quadratic_kappa,
    regression_line,
)
from nmoe_core.quality.calibration.rows import CalibrationRows
from nmoe_core.quality.calibration.thresholds import (
    Certificate,
    RowThresholds,
    Thresholds,
    midpoint_above,
)

NUM_BINS = 10
Taus = Thresholds | RowThresholds


class Aggregates(NamedTuple):
    """Aggregated scores `[N]` in 0..1, and the families of documents if there are any."""

    probe: np.ndarray | None
    judge: np.ndarray
    oracle: np.ndarray
    student: np.ndarray | None = None
    families: Families = None

    @classmethod
    def of(cls, rows: CalibrationRows, scale: Scale) -> Aggregates:
        """Aggregate the scores of rows with the weights of a scale."""
        early = (rows.probe, rows.student)
        probe, student = (None if s is None else scale.aggregate(s) for s in early)
        judge = scale.aggregate(rows.judge)
        oracle = scale.aggregate(rows.oracle)
        families = None if rows.families is None else rows.clusters
        return cls(probe, judge, oracle, student, families)

    def left_at(self, taus: Taus) -> dict[str, np.ndarray]:
        """For each early step, in order: the mask of the documents that this step or an earlier
        step dropped. Steps that do not run are omitted."""
        steps = ("student", self.student, taus.tau_student), ("probe", self.probe, taus.tau_probe)
        found = dict[str, np.ndarray]()
        has_left = np.zeros(len(self.judge), np.bool_)
        for name, scores, tau in steps:
            if scores is not None:
                found[name] = has_left = has_left | (scores < tau)
        return found

    def exits(self, taus: Taus) -> np.ndarray:
        """Mask of the documents that exit early, before the judge."""
        return [np.zeros(len(self.judge), np.bool_), *self.left_at(taus).values()][-1]

    def deployed(self, taus: Taus) -> np.ndarray:
        """The judge's score; -1 for documents that exited early."""
        return np.where(self.exits(taus), -1.0, self.judge)

    def decisions(self, taus: Taus) -> np.ndarray:
        """Indices into `DECISIONS`, int64 `[N]`: 0 drop, 1 band, 2 keep."""
        # If tau_keep is 0, every judged document is kept, but documents that exited early stay
        # dropped.
        decided = np.where(self.judge >= taus.tau_keep, 2, self.judge >= taus.tau_drop)
        return np.where(self.exits(taus), 0, decided)


def errors(scores: Aggregates, taus: Taus, oracle_keeps: np.ndarray) -> dict[str, Any]:
    """False drops with their upper bounds, and the precision and recall of keeping."""
    decided = scores.decisions(taus)
    exits = scores.exits(taus)
    keeps = decided == 2
    drops = decided == 0
    judge_keeps = scores.judge >= taus.tau_keep
    share = partial(_share, scores.families)
    return {
        "num_dropped": int(drops.sum()),
        "num_false_drops": int((drops & oracle_keeps).sum()),
        **share("false_drop_rate", oracle_keeps, drops, "upper95"),
        **share("probe_false_drop_rate", oracle_keeps, exits, "upper95"),
        **share("probe_judge_conflict_rate", judge_keeps, exits, "upper95"),
        **share("probe_lost_keep_rate", judge_keeps & exits, np.ones_like(exits), "upper95"),
        **share("precision_keep", oracle_keeps, keeps, "ci95"),
        **share("recall_keep", keeps, oracle_keeps, "ci95"),
        "oracle_keep": rounded(oracle_keeps.mean()),
    }


def _share(
    families: Families, name: str, of: np.ndarray, among: np.ndarray, bound: str
) -> dict[str, Any]:
    """A share of documents, and its 95 % interval (`ci95`) or upper bound (`upper95`)."""
    hits = int(of[among].sum())
    count = int(among.sum())
    if not count:
        return {name: None, f"{name}_{bound}": None}
    trials = (hits, count) if families is None else share_trials(of[among], families[among])
    interval = interval_of(exact_interval(*trials))
    found = interval if bound == "ci95" else rounded(upper_bound(*trials))
    return {name: rounded(hits / count), f"{name}_{bound}": found}


def triage(
    fit: tuple[Aggregates, np.ndarray, RowThresholds],
    report: tuple[Aggregates, np.ndarray, RowThresholds],
    taus: Thresholds,
    delta: float,
) -> list[dict[str, Any]]:
    """The steps of grading in their order, with the evidence for each step's threshold.

    `fit` and `report` each hold scores, the mask of documents that the oracle would keep, and the
    documents' thresholds. `taus` are the thresholds of documents outside all groups; the rows show
    only these thresholds. Each row has a `step`, its threshold `tau`, and `leave`, the share of all
    documents that this step drops. Three more figures of a row count the documents that this step
    and earlier steps drop: `certified_upper95`, the bound on false drops that the fit half proves;
    `false_drop_rate` on the report half, with its bound; and `lost_keep_rate`, the share of all
    documents that these steps drop although the judge would keep them.
    """
    found = []
    before = 0.0
    _, fit_keeps, _ = fit
    scores, oracle_keeps, own = report
    left, shown = ({**s.left_at(t), "judge": s.decisions(t) == 0} for s, _, t in (fit, report))
    judge_keeps = scores.judge >= own.tau_keep
    share = partial(_share, scores.families)
    for step, drops in shown.items():
        proof = Certificate.of(left[step], fit_keeps, delta, fit[0].families)
        found.append(
            {
                "step": step,
                "tau": taus.tau_drop if step == "judge" else getattr(taus, f"tau_{step}"),
                "leave": rounded(drops.mean() - before),
                "labels_below": proof.num_below,
                "certified_upper95": rounded(proof.upper95),
                **share("false_drop_rate", oracle_keeps, drops, "upper95"),
                **share("lost_keep_rate", judge_keeps & drops, np.ones_like(drops), "upper95"),
            }
        )
        before = drops.mean()
    return found


def decision_agreement(
    scores: Aggregates, taus: Taus, oracle_keeps: np.ndarray, fit_oracle: np.ndarray
) -> dict[str, Any]:
    """Compare the decisions with the decisions by the oracle's scores, with oracle thresholds that
    give the same shares."""
    decided = scores.decisions(taus)
    deployed = scores.deployed(taus)
    drop_below = float(np.quantile(fit_oracle, (decided == 0).mean(), method="higher"))
    by_oracle = np.where(oracle_keeps, 2, np.where(scores.oracle < drop_below, 0, 1))
    matrix = np.zeros((3, 3), int)
    np.add.at(matrix, (by_oracle, decided), 1)
    return {
        "auc_keep": rounded(auc(deployed, oracle_keeps)),
        "auc_keep_ci95": auc_interval(deployed, oracle_keeps, scores.families),
        "average_precision_keep": rounded(average_precision(deployed, oracle_keeps)),
        "decisions_oracle_by_grading": matrix.tolist(),
        "decision_kappa": rounded(quadratic_kappa(by_oracle, decided, 3)),
    }


def score_reliability(
    fit: Aggregates, report: Aggregates, fit_keeps: np.ndarray, oracle_keeps: np.ndarray
) -> dict[str, Any]:
    """Reliability of the judge's score: compared with the oracle's score, and as a probability of
    keep."""
    points, chances = isotonic(fit.judge, fit_keeps.astype(float))
    chance = np.interp(report.judge, points, chances)
    # Bins of few documents differ from their probabilities, even if these are right.
    rng = np.random.default_rng(0)
    drawn = (rng.random(len(chance)) < chance for _ in range(100))
    by_chance = [calibration_error(chance, outcomes.astype(float)) for outcomes in drawn]
    line = regression_line(report.judge, report.oracle)
    order = np.argsort(report.judge, kind="stable")
    return {
        "ece_keep": rounded(calibration_error(chance, oracle_keeps.astype(float))),
        "ece_keep_if_calibrated": rounded(np.mean(by_chance)),
        "reliability_line": line and [rounded(value) for value in line],
        # Ten bins of equal count, by the judge's score.
        "reliability": [
            {
                "count": len(rows),
                "judge_mean": rounded(report.judge[rows].mean()),
                "oracle_mean": rounded(report.oracle[rows].mean()),
                "oracle_keep_rate": rounded(oracle_keeps[rows].mean()),
            }
            for rows in np.array_split(order, min(NUM_BINS, len(order)))
        ],
    }


def head_agreement(fit: CalibrationRows, report: CalibrationRows, scale: Scale) -> dict[str, Any]:
    """Agreement of each head with the oracle, and of the heads with each other, on the rows
    `report`."""
    sources = report.sources.tolist()
    given = report.oracle, sources, scale, report.families
    found: dict[str, Any] = {"judge": agreement(report.judge, *given)}
    if report.probe is not None:
        found["probe"] = agreement(report.probe, *given)
        a = scale.aggregate(report.probe)
        b = scale.aggregate(report.judge)
        found["probe_with_judge"] = {
            "spearman": rounded(spearman(a, b)),
            "spearman_ci95": spearman_interval(a, b, report.families),
        }
    found["baselines"] = baselines(
        (fit.oracle, fit.sources.tolist(), fit.lengths),
        (report.oracle, sources, report.lengths),
        scale,
    )
    return found


def keep_curve(scores: np.ndarray) -> list[list[float]]:
    """Points (share to keep, threshold that keeps it) at 1 % to 99 %."""
    descending = np.sort(scores)[::-1]
    counts = ((percent, max(1, round(percent * len(scores) / 100))) for percent in range(1, 100))
    return [[percent / 100, midpoint_above(descending, count)] for percent, count in counts]


def interval_of(value: Interval) -> list[float | None]:
    return [rounded(bound) for bound in value]
