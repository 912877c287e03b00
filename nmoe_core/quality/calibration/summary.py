"""Fits weights and thresholds on one half of val and measures all figures on the other.

Keep shares are shares of all documents, unweighted, if grading runs with early exits. They include
training documents and repeated texts, because the corpus contains such documents. Quality metrics
exclude them.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from nmoe_core.base.errors import CalibrationError
from nmoe_core.base.intervals import auc, exact_interval, upper_bound
from nmoe_core.base.intervals.design import Families
from nmoe_core.labels.scores import rounded
from nmoe_core.quality.calibration.drift import score_bins
from nmoe_core.quality.calibration.fit import Fitted, fit_on
from nmoe_core.quality.calibration.measures import (
    Aggregates,
    decision_agreement,
    errors,
    head_agreement,
    interval_of,
    keep_curve,
    score_reliability,
    triage,
)
from nmoe_core.quality.calibration.rows import CalibrationRows
from nmoe_core.quality.calibration.shares import (
    ALL,
    independent,
    keep_interval,
    keep_shares,
    token_share,
)
from nmoe_core.quality.calibration.targets import Targets
from nmoe_core.quality.calibration.thresholds import (
    DECISIONS,
    Certificate,
    RowThresholds,
    largest_certified,
)

MIN_TEST_DOCUMENTS = 3


def operating_points(
    fit: CalibrationRows, measured: Sequence[CalibrationRows], targets: Targets
) -> list[dict[str, Any]]:
    """For the rows of each grader in `measured`: how many documents the grader would keep and drop
    at its own thresholds, and how many of these decisions are wrong. `not_fitted` says why a grader
    has no thresholds."""
    try:
        fitted = fit_on(fit, targets)
    except CalibrationError as error:
        return [{"not_fitted": str(error)} for _ in measured]
    names = ("num_dropped", "false_drop_rate", "false_drop_rate_upper95")
    names += ("precision_keep", "precision_keep_ci95", "recall_keep", "recall_keep_ci95")
    found = []
    for rows in measured:
        shown = rows.held_out()
        scores = Aggregates.of(shown, fitted.scale)
        figures = errors(scores, fitted.taus(shown), fitted.oracle_keeps(shown))
        found.append({name: figures[name] for name in names})
    return found


def summarise(
    fit: CalibrationRows,
    report: CalibrationRows,
    targets: Targets,
    test: CalibrationRows | None = None,
) -> dict[str, Any]:
    """Fields of `calibration_summary.json`.

    Thresholds and weights are fitted on the half `fit` of val. All metrics are measured on the half
    `report`. `test` is only used for reported figures. Raises CalibrationError if all probe, judge
    or oracle scores of the fit half are equal (E-CALIBRATION-CONSTANT), or if `target_drop` breaks
    its bound (E-CALIBRATION-BOUND).
    """
    proof = fit.held_out()
    shown = report.held_out()
    fitted = fit_on(fit, targets)
    scale = fitted.scale
    oracle_tau, taus = fitted.point
    a = Aggregates.of(proof, scale)
    b = Aggregates.of(shown, scale)
    proof_keeps = fitted.oracle_keeps(proof)
    oracle_keeps = fitted.oracle_keeps(shown)
    of_proof = fitted.taus(proof)
    of_shown = fitted.taus(shown)
    return {
        "weights": dict(zip(scale.names, scale.weights)),
        **fit.scale.in_file(),
        "weights_source": fitted.weights_source,
        "tau_drop": taus.tau_drop,
        "tau_keep": taus.tau_keep,
        "tau_probe": taus.tau_probe,
        **({} if a.student is None else {"tau_student": taus.tau_student}),
        "oracle_tau_keep": oracle_tau,
        "count": len(proof) + len(shown),
        "count_fit": len(proof),
        "count_report": len(shown),
        **_families(proof, shown),
        "target_keep": targets.target_keep,
        **({"target_unit": "tokens"} if targets.target_unit == "tokens" else {}),
        "target_drop": targets.target_drop,
        "max_false_drop": targets.max_false_drop,
        **_certified(a, of_proof, proof_keeps, targets),
        "drops_by_labels": {}
        if fitted.groups
        else drops_by_labels(a.deployed(taus), proof_keeps, targets, taus.tau_keep, a.families),
        **_shares(fit, report, fitted),
        **_of_groups(fit, report, fitted, targets),
        **errors(b, of_shown, oracle_keeps),
        "triage": triage(
            (a, proof_keeps, of_proof), (b, oracle_keeps, of_shown), taus, targets.delta
        ),
        **decision_agreement(b, of_shown, oracle_keeps, a.oracle),
        **score_reliability(a, b, proof_keeps, oracle_keeps),
        "heads": head_agreement(proof, shown, scale),
        "keep_curve": keep_curve(b.deployed(of_shown)),
        "score_bins": _score_bins((fit, report), fitted),
        **_untouched(proof, test, fitted),
    }


def _families(*halves: CalibrationRows) -> dict[str, int]:
    """The numbers of families of the documents on which bounds are proved and figures measured."""
    drawn = zip(("families_fit", "families_report"), (one.families for one in halves))
    return {name: len(np.unique(one)) for name, one in drawn if one is not None}


def _certified(
    scores: Aggregates, taus: RowThresholds, oracle_keeps: np.ndarray, targets: Targets
) -> dict[str, Any]:
    """The bound on false drops that the fit half proves: as a sentence for readers, and as numbers
    for the blocking check."""
    is_dropped = scores.decisions(taus) == 0
    found = Certificate.of(is_dropped, oracle_keeps, targets.delta, scores.families)
    if found.num_below:
        said = (
            f"at most {targets.max_false_drop:.4f} of the distinct texts below the threshold, if "
        )
        said += "no grader was trained on them, are ones that the oracle keeps, with 95 % "
        said += f"confidence: {found.num_wrong} of {found.num_below} labels below"
        if scores.families is not None:
            said += f", of {len(np.unique(scores.families[is_dropped]))} families"
    else:
        said = f"nothing is dropped: {len(is_dropped)} labels prove no threshold to have at most "
        said += f"{targets.max_false_drop:.4f} false drops, so what is not kept is in the band"
    return {
        "dropping": said,
        "certificate": {
            "dropped": found.num_below,
            "false_drops": found.num_wrong,
            "false_drop_rate_upper95": rounded(found.upper95),
            **({} if scores.families is None else {"trials": rounded(found.num_trials)}),
            "delta": targets.delta,
        },
    }


def _shares(fit: CalibrationRows, report: CalibrationRows, fitted: Fitted) -> dict[str, Any]:
    """The share of each decision in the report half, with 95 % intervals for its share among new
    documents."""
    scores = Aggregates.of(report, fitted.scale)
    taus = fitted.taus(report)
    decided = scores.decisions(taus)
    fit_keep = Aggregates.of(fit, fitted.scale).decisions(fitted.taus(fit)) == 2
    drops = decided == 0
    wrong = drops & fitted.oracle_keeps(report)
    by_source: list[dict[str, Any]] = []
    for row in keep_shares(report, decided == 2, report.sources):
        source = row.pop("group")
        by_source.append({"source": source, **row, **_false_drops(report, drops, wrong, source)})
    found: dict[str, Any] = {
        "keep_by_source": by_source,
        "documents_fit": len(fit),
        "documents_report": len(report),
        "achieved_keep_fit": rounded(fit_keep.mean()),
    }
    for place, name in enumerate(DECISIONS):
        hits = decided == place
        interval = exact_interval(*independent(hits, *report.drawn))
        if name == "keep":
            clusters = np.concatenate([fit.clusters, report.clusters])
            interval = keep_interval(fit_keep, hits, clusters, report.drawn[1])
        found[f"achieved_{name}"] = rounded(hits.mean())
        found[f"achieved_{name}_ci95"] = interval_of(interval)
    if report.lengths.all():
        found |= token_share(report, decided == DECISIONS.index("keep"))
    return found | {"early_exit_rate": rounded(scores.exits(taus).mean())}


def _false_drops(
    rows: CalibrationRows, drops: np.ndarray, wrong: np.ndarray, source: str
) -> dict[str, Any]:
    """How many dropped documents of a source (or of `all`), with their copies, the oracle would
    keep, and the upper bound of their share, in which copies count together."""
    member = drops & ((rows.sources == source) | (source == ALL))
    bound = (
        upper_bound(*independent(wrong[member], *rows.take(member).drawn)) if member.any() else None
    )
    counts = {"dropped": int(member.sum()), "false_drops": int(wrong[member].sum())}
    return {**counts, "false_drop_rate_upper95": rounded(bound)}


def _of_groups(
    fit: CalibrationRows, report: CalibrationRows, fitted: Fitted, targets: Targets
) -> dict[str, Any]:
    """Thresholds and kept share of each group, and the share of all documents that are kept with
    these targets."""
    if fit.groups is None or report.groups is None:
        return {}
    keeps = Aggregates.of(report, fitted.scale).decisions(fitted.taus(report)) == 2
    of_all, *rows = keep_shares(report, keeps, report.groups)
    shown = {row["group"] for row in rows}
    # Grading reads the thresholds from this table, so groups without a document in the report half
    # are listed too.
    unseen = sorted({*fitted.groups} - shown)
    rows += [{"group": name, "documents": 0, "tokens": 0} for name in unseen]
    for row in rows:
        point = fitted.groups.get(row["group"], fitted.point)
        row |= {"has_own": row["group"] in fitted.groups, **asdict(point.taus)}
        row |= {"oracle_tau_keep": point.oracle_tau}
        row["target_keep"] = targets.target_of.get(row["group"], targets.target_keep)
    unit = "tokens" if targets.target_unit == "tokens" else "documents"
    asked = sum(row["target_keep"] * row[unit] for row in rows) / max(of_all[unit], 1)
    return {"target_by": targets.target_by, "groups": rows, "target_keep_of_all": rounded(asked)}


def drops_by_labels(
    scores: np.ndarray,
    oracle_keeps: np.ndarray,
    targets: Targets,
    tau_keep: float,
    families: Families = None,
) -> dict[str, Any]:
    """The cost of the bound on false drops: how many more documents could be dropped with more
    labels.

    `certain` is the largest share that could be dropped with at most `max_false_drop` false drops
    among these labels, without a margin for chance. `more` has pairs (number of labels, share that
    could be dropped with so many labels), for this number of labels and for 2 to 32 times as many.
    `scores` (deployed scores) and `oracle_keeps` (bool), `[N]` each, belong to the labels on which
    the bound is proved.
    """
    if targets.target_drop is not None:
        return {}
    order = np.argsort(scores, kind="stable")
    wrong = np.cumsum(oracle_keeps[order]) / np.arange(1, len(scores) + 1)
    is_safe = (wrong <= targets.max_false_drop) & (scores[order] < tau_keep)
    more = []
    for times in (1, 2, 4, 8, 16, 32):
        repeated = np.repeat(scores, times), np.repeat(oracle_keeps, times)
        drawn = None
        if families is not None:  # more labels are of more families
            places = np.unique(families, return_inverse=True)[1]
            drawn = np.repeat(places * times, times) + np.tile(np.arange(times), len(places))
        tau = largest_certified(*repeated, targets, tau_keep, None, drawn)
        more.append([times * len(scores), rounded((scores < tau).mean())])
    last = np.flatnonzero(is_safe)
    return {"certain": rounded((last[-1] + 1) / len(scores) if len(last) else 0.0), "more": more}


def _score_bins(halves: Sequence[CalibrationRows], fitted: Fitted) -> dict[str, Any]:
    """The reference with which a shard's scores are compared: the deployed scores of all val
    documents."""
    scores = [Aggregates.of(h, fitted.scale).deployed(fitted.taus(h)) for h in halves]
    sources = np.concatenate([half.sources for half in halves])
    return score_bins(sources, np.concatenate(scores))


def _untouched(
    fit: CalibrationRows, test: CalibrationRows | None, fitted: Fitted
) -> dict[str, Any]:
    """Figures of the test slice, if it has labels. The slice is used for no fit and no choice."""
    if test is None or test.is_held_out.sum() < MIN_TEST_DOCUMENTS:
        return {"untouched": "no figure: the test slice has no labels", "test": None}
    shown = test.held_out()
    scores = Aggregates.of(shown, fitted.scale)
    taus = fitted.taus(shown)
    oracle_keeps = fitted.oracle_keeps(shown)
    of_all = Aggregates.of(test, fitted.scale).decisions(fitted.taus(test))
    figures = {
        "count": len(shown),
        "documents": len(test),
        "left_out": test.left_out,
        **{f"achieved_{name}": rounded((of_all == i).mean()) for i, name in enumerate(DECISIONS)},
        **errors(scores, taus, oracle_keeps),
        "auc_keep": rounded(auc(scores.deployed(taus), oracle_keeps)),
        "heads": head_agreement(fit, shown, fitted.scale),
    }
    return {"untouched": f"{len(shown)} documents of the test slice", "test": figures}
