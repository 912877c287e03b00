"""The choice between graders: `[grading] grader = "auto"` (docs/calibration.md).

For each grader, the rank correlation of its aggregate with the oracle's is computed on the half of
val on which thresholds are fitted. The grader whose correlation has the highest lower confidence
bound is chosen; in a tie, the student. If student and probe scored the same documents, their mean
is a third grader. All graders are measured on the other half and on the test slice. All comparisons
use the same documents, on which no grader was trained.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import Any, NamedTuple

import numpy as np

from nmoe_core.base.intervals import gain_interval, spearman, spearman_interval
from nmoe_core.base.settings import GRADER_NAMES
from nmoe_core.labels.scores import rounded
from nmoe_core.quality.calibration.rows import CalibrationRows
from nmoe_core.quality.heads.head_files import stacked_digest
from nmoe_core.quality.heads.metrics import in_families
from nmoe_core.quality.heads.scores import stacked

# A grader's rows of val, and of test if test has labels.
Candidate = tuple[CalibrationRows, CalibrationRows | None]
# A fitted weight ranks no better, and each further weight that is tried would weaken all bounds.
PROBE_WEIGHT = 0.5


class Scored(NamedTuple):
    """A grader's scores of the labelled documents: the half of val to fit on, the half to report
    on, and the test slice if it has labels."""

    fit: CalibrationRows
    report: CalibrationRows
    test: CalibrationRows | None


def choose(candidates: Sequence[Candidate]) -> tuple[list[Scored], dict[str, Any]]:
    """Order the graders, best first. Also return the facts of the choice, empty for a single
    grader."""
    if len(candidates) == 1:
        val, test = candidates[0]
        return [Scored(*val.halves(), test)], {}
    found = _halved(candidates)
    found += _stacked(found)
    bounds = {rows.grader: _lower_bound(rows) for rows in _fresh([one.fit for one in found])}
    found.sort(key=lambda one: (bounds[one.fit.grader], one.fit.grader == "student"), reverse=True)
    facts: dict[str, Any] = {"lower_bounds_fit": bounds}
    report = _compared(_fresh([one.report for one in found]))
    tests = [one.test for one in found if one.test is not None]
    if len(tests) == len(found):
        facts["test"] = _compared(_fresh(tests))
    return found, {"grader_choice": {"sentence": _sentence(report), "report": report, **facts}}


def _halved(candidates: Sequence[Candidate]) -> list[Scored]:
    """Halve the documents that all graders scored, in the same way for each grader."""
    vals = _shared([val for val, _ in candidates])
    tests = [test for _, test in candidates if test is not None]
    tests = _shared(tests) if len(tests) == len(vals) else [None] * len(vals)
    # More documents are equal for a grader that reads fewer tokens. Split by the keys of this
    # grader, so that documents that are equal for any grader are in the same half.
    keys = min((val.clusters for val in vals), key=lambda keys: len(np.unique(keys)))
    return [Scored(*val.halves(keys), test) for val, test in zip(vals, tests)]


def _stacked(found: Sequence[Scored]) -> list[Scored]:
    """Student and probe together, if both scored the same documents."""
    for fit, report, test in found:
        if fit.probe is not None and fit.student is not None:
            return [Scored(_mixed(fit), _mixed(report), None if test is None else _mixed(test))]
    return []


def _mixed(rows: CalibrationRows) -> CalibrationRows:
    assert rows.student is not None
    assert rows.probe is not None
    return replace(
        rows,
        judge=stacked(rows.student, rows.probe, PROBE_WEIGHT, rows.scale),
        probe=None,
        grader="stacked",
        heads_digest=stacked_digest(rows.heads_digest, rows.student_digest, PROBE_WEIGHT),
        probe_weight=PROBE_WEIGHT,
    )


def _shared(rows: Sequence[CalibrationRows]) -> list[CalibrationRows]:
    doc_ids = reduce(np.intersect1d, (one.doc_ids for one in rows))
    return [one.take(np.isin(one.doc_ids, doc_ids)) for one in rows]


def _fresh(rows: Sequence[CalibrationRows]) -> list[CalibrationRows]:
    """Select the documents that no grader was trained on."""
    is_fresh = np.logical_and.reduce([one.is_held_out for one in rows])
    return [one.take(is_fresh) for one in rows]


def _lower_bound(rows: CalibrationRows) -> float:
    judge = rows.scale.aggregate(rows.judge)
    interval = spearman_interval(judge, rows.scale.aggregate(rows.oracle), rows.families)
    return -1.0 if interval is None else interval[0]


def _compared(graders: Sequence[CalibrationRows]) -> dict[str, Any]:
    """Rank correlation of each grader with the oracle, the difference between the chosen grader,
    which is the first, and the next, and the difference between judge and probe."""
    oracle = graders[0].scale.aggregate(graders[0].oracle)
    scores = {rows.grader: rows.scale.aggregate(rows.judge) for rows in graders}
    families = graders[0].families
    figures = {
        name: {
            "spearman": rounded(spearman(given, oracle)),
            "spearman_ci95": spearman_interval(given, oracle, families),
        }
        for name, given in scores.items()
    }
    chosen, other = [*scores][:2]
    ours = figures[chosen]["spearman"]
    theirs = figures[other]["spearman"]
    return {
        "documents": len(oracle),
        **({} if families is None else {"families": len(np.unique(families))}),
        "graders": figures,
        "chosen": chosen,
        "other": other,
        "difference": None if ours is None or theirs is None else rounded(ours - theirs),
        "difference_ci95": gain_interval(scores[chosen], scores[other], oracle, families),
        **_judge_over_probe(graders, oracle),
    }


def _judge_over_probe(graders: Sequence[CalibrationRows], oracle: np.ndarray) -> dict[str, Any]:
    """How much better the judge ranks than the probe."""
    for rows in graders:
        if rows.probe is not None:
            judge, probe = map(rows.scale.aggregate, (rows.judge, rows.probe))
            own = spearman(judge, oracle)
            other = spearman(probe, oracle)
            gain = None if own is None or other is None else rounded(own - other)
            found = {"judge_over_probe": gain}
            return found | {
                "judge_over_probe_ci95": gain_interval(judge, probe, oracle, rows.families)
            }
    return {}


def _sentence(report: dict[str, Any]) -> str:
    """The chosen grader, its difference from the next on documents that the choice did not use, and
    whether the judge is better than the probe."""
    chosen = report["chosen"]
    graders = report["graders"].items()
    shown = ", ".join(f"{GRADER_NAMES[name]} {_shown(figures)}" for name, figures in graders)
    said = GRADER_NAMES[chosen].capitalize()
    said += " grades" if chosen == "student" else " grade"
    found = f"{said}. Spearman with the oracle on {report['documents']} documents"
    found += f"{in_families(report)} that the choice did not see: {shown}; "
    if report["difference"] is None or report["difference_ci95"] is None:
        return found + "no difference can be given."
    low, high = report["difference_ci95"]
    than = f" from {GRADER_NAMES[report['other']]}" if len(graders) > 2 else ""
    found += f"difference{than} {report['difference']:+.3f} ({low:+.3f} to {high:+.3f})"
    verdict = "" if low > 0 else ", which may be chance" if high >= 0 else ", so not the better one"
    return f"{found}{verdict}.{_of_judge(report)}"


def _of_judge(report: dict[str, Any]) -> str:
    """Whether the judge ranks better than the probe; empty if this is not known."""
    if report.get("judge_over_probe_ci95") is None:
        return ""
    low, high = report["judge_over_probe_ci95"]
    verdict = "better than" if low > 0 else "no better than" if high >= 0 else "worse than"
    shown = f"{report['judge_over_probe']:+.3f} ({low:+.3f} to {high:+.3f})"
    return f" The judge alone ranks {verdict} the probe: {shown}."


def _shown(figures: dict[str, Any]) -> str:
    if figures["spearman"] is None or figures["spearman_ci95"] is None:
        return "undefined"
    low, high = figures["spearman_ci95"]
    return f"{figures['spearman']:.3f} ({low:.3f} to {high:.3f})"
