"""The choice between graders: `[grading] grader = "auto"` (docs/calibration.md).

For each grader, the rank correlation of its aggregate with the oracle's is computed on the half of
val on which thresholds are fitted. The grader whose correlation has the higher lower confidence
bound is chosen; in a tie, the student. Both graders are measured on the other half and on the test
slice. All comparisons use the same documents, on which neither grader was trained.
"""

from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple

import numpy as np

from nmoe_core.base.intervals import gain_interval, spearman, spearman_interval
from nmoe_core.labels.scores import rounded
from nmoe_core.quality.calibration.rows import CalibrationRows

# A grader's rows of val, and of test if test has labels.
Candidate = tuple[CalibrationRows, CalibrationRows | None]
_NAMES = {"hydra": "probe and judge", "student": "the student"}


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
    bounds = {rows.grader: _lower_bound(rows) for rows in _fresh([one.fit for one in found])}
    found.sort(key=lambda one: (bounds[one.fit.grader], one.fit.grader == "student"), reverse=True)
    chosen = found[0].fit.grader
    facts = {"lower_bounds_fit": bounds}
    report = _compared(_fresh([one.report for one in found]), chosen)
    tests = [one.test for one in found if one.test is not None]
    if len(tests) == len(found):
        facts["test"] = _compared(_fresh(tests), chosen)
    return found, {"grader_choice": {"sentence": _sentence(report), "report": report, **facts}}


def _halved(candidates: Sequence[Candidate]) -> list[Scored]:
    """Halve the documents that all graders scored, in the same way for each grader."""
    vals = _shared([val for val, _ in candidates])
    tests = [test for _, test in candidates if test is not None]
    tests = _shared(tests) if len(tests) == len(vals) else [None] * len(vals)
    # More documents are equal for a grader that reads fewer tokens. Split by the keys of this
    # grader, so that documents that are equal for any grader are in the same half.
    keys = min((val.keys for val in vals), key=lambda keys: len(np.unique(keys)))
    return [Scored(*val.halves(keys), test) for val, test in zip(vals, tests)]


def _shared(rows: Sequence[CalibrationRows]) -> list[CalibrationRows]:
    doc_ids = reduce(np.intersect1d, (one.doc_ids for one in rows))
    return [one.take(np.isin(one.doc_ids, doc_ids)) for one in rows]


def _fresh(rows: Sequence[CalibrationRows]) -> list[CalibrationRows]:
    """Select the documents that no grader was trained on."""
    is_fresh = np.logical_and.reduce([one.is_held_out for one in rows])
    return [one.take(is_fresh) for one in rows]


def _lower_bound(rows: CalibrationRows) -> float:
    interval = spearman_interval(*map(rows.scale.aggregate, (rows.judge, rows.oracle)))
    return -1.0 if interval is None else interval[0]


def _compared(graders: Sequence[CalibrationRows], chosen: str) -> dict[str, Any]:
    """Rank correlation of each grader with the oracle, and the difference between the chosen grader
    and the other one."""
    oracle = graders[0].scale.aggregate(graders[0].oracle)
    scores = {rows.grader: rows.scale.aggregate(rows.judge) for rows in graders}
    figures = {
        name: {
            "spearman": rounded(spearman(given, oracle)),
            "spearman_ci95": spearman_interval(given, oracle),
        }
        for name, given in scores.items()
    }
    (other,) = scores.keys() - {chosen}
    ours = figures[chosen]["spearman"]
    theirs = figures[other]["spearman"]
    return {
        "documents": len(oracle),
        "graders": figures,
        "chosen": chosen,
        "other": other,
        "difference": None if ours is None or theirs is None else rounded(ours - theirs),
        "difference_ci95": gain_interval(scores[chosen], scores[other], oracle),
    }


def _sentence(report: dict[str, Any]) -> str:
    """One sentence: the chosen grader, and its difference from the other grader on documents that
    the choice did not use."""
    chosen = report["chosen"]
    other = report["other"]
    said = {"hydra": "Probe and judge grade", "student": "The student grades"}
    shown = ", ".join(
        f"{_NAMES[name]} {_shown(report['graders'][name])}" for name in (chosen, other)
    )
    found = f"{said[chosen]}. Spearman with the oracle on {report['documents']} documents that the "
    found += f"choice did not see: {shown}; "
    if report["difference"] is None or report["difference_ci95"] is None:
        return found + "no difference can be given."
    low, high = report["difference_ci95"]
    found += f"difference {report['difference']:+.3f} ({low:+.3f} to {high:+.3f})"
    verdict = "" if low > 0 else ", which may be chance" if high >= 0 else ", so not the better one"
    return f"{found}{verdict}."


def _shown(figures: dict[str, Any]) -> str:
    if figures["spearman"] is None or figures["spearman_ci95"] is None:
        return "undefined"
    low, high = figures["spearman_ci95"]
    return f"{figures['spearman']:.3f} ({low:.3f} to {high:.3f})"
