"""Calibration: thresholds on the deployed grader's scores of val documents (docs/calibration.md).

Val is halved by the hash of each document's content: thresholds are fitted on one half, and every
reported figure is measured on the other. The cost is one backbone pass over val. If predictions are
given or the student is the grader, no backbone pass is needed.
"""

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from loader.files.checksummed_json import sealed
from nmoe_core.base.atomic import clear_left, output_lock, write_json
from nmoe_core.base.errors import CalibrationError
from nmoe_core.base.fingerprint import Fingerprints, is_current, sha256_file, sha256_json
from nmoe_core.base.result import Result
from nmoe_core.config.tree import CALIBRATION_NAME, COST_NAME
from nmoe_core.labels.label_files import Labels, read_labels
from nmoe_core.labels.slices import data_digest
from nmoe_core.quality.calibration import CALIBRATE_CODE
from nmoe_core.quality.calibration.choice import Candidate, choose
from nmoe_core.quality.calibration.kept_scores import KEPT_NAME, keep_scores, recall_scores
from nmoe_core.quality.calibration.rows import (
    CalibrationRows,
    rows_from_predictions,
    rows_from_scorer,
)
from nmoe_core.quality.calibration.summary import operating_points, summarise
from nmoe_core.quality.calibration.summary_file import (
    CALIBRATION_FORMAT,
    COMPAT_RULE,
    read_calibration,
)
from nmoe_core.quality.calibration.targets import DELTA, Languages, Targets, require_languages
from nmoe_core.quality.families import FamilyNames, with_families
from nmoe_core.quality.heads.metrics import require_same_scorer
from nmoe_core.quality.heads.scores import Corpus, Scorer, one_thread

MIN_DOCUMENTS = 20
FACTS = (
    *("tau_drop", "tau_keep", "tau_probe", "tau_student", "weights_source"),
    *("target_keep", "target_unit", "achieved_keep", "achieved_keep_ci95", "achieved_band"),
    *("achieved_drop", "achieved_keep_tokens", "achieved_keep_tokens_ci95"),
    *("early_exit_rate", "count", "families_fit", "families_report"),
    *("target_by", "target_keep_of_all", "groups"),
    *("dropping", "untouched", "grader", "left_out", "false_drop_rate", "false_drop_rate_upper95"),
    *("num_dropped", "max_false_drop", "keep_by_source", "drops_by_labels", "triage"),
    "grader_choice",
)
"""The fields of the summary that are also facts of the result."""


def calibrate(
    labels_val: Path,
    graders: Sequence[tuple[Scorer, Corpus]],
    out_dir: Path,
    targets: Targets,
    labels_test: Path | None = None,
    languages: Languages | None = None,
) -> Result:
    """Fit weights and thresholds on a grader's own scores of the val labels' documents.

    `graders` pairs each grader with the documents, cut to the grader's length. If there are two
    graders, `choose` picks the better one. Writes `calibration_summary.json` to `out_dir`. Labels
    of the test split are only used for reported figures. Facts: the main figures, the
    `backbone_tokens` of this call, and the `cost` of each grader that this call ran (also written
    to `cost.json`). `languages` maps document ids to languages; it is needed if targets differ by
    language.

    Raises:
        CalibrationError: Fewer than 20 labels (E-CALIBRATION-FEW), all scores equal
            (E-CALIBRATION-CONSTANT), or `target_drop` breaks `max_false_drop`
            (E-CALIBRATION-BOUND).
        HeadError: States are not finite (E-HEAD-NONFINITE).
        LabelError: Most labels failed (E-LABEL-COVERAGE), or as `read_labels`.
    """
    labels = _val_labels(labels_val)
    root = graders[0][1].data_root
    test = read_labels(labels_test) if labels_test is not None else None
    if test is not None and not test.doc_ids:
        test = None
    if test is not None:
        require_same_scorer(test, labels.scorer)
    asked = [
        ({**corpus.fingerprints, **one.fingerprints}, corpus.max_ctx) for one, corpus in graders
    ]
    doc_ids = [*labels.doc_ids, *(() if test is None else test.doc_ids)]
    named = target_languages(targets, languages, doc_ids)
    fingerprints = calibration_fingerprints((labels, test), root, asked, targets, named)
    group = _grouping(targets, named)

    costs: list[dict[str, Any]] = []
    kept = out_dir / KEPT_NAME
    scored = scored_from(fingerprints, asked)

    def score() -> list[Candidate]:
        found = recall_scores(kept, scored)
        if found is None:
            with one_thread(scorer.kind for scorer, _ in graders):
                found = [_scored(*grader, labels, test, costs) for grader in graders]
            with output_lock(out_dir):
                keep_scores(kept, scored, found)
                # before the summary: once it exists, no document is scored again
                write_json(out_dir / COST_NAME, {"graders": costs})
        return [(group(val), None if rows is None else group(rows)) for val, rows in found]

    tokens_before = sum(scorer.tokens_processed for scorer, _ in graders)
    done = _fit(out_dir, labels, targets, fingerprints, score)
    tokens = sum(scorer.tokens_processed for scorer, _ in graders) - tokens_before
    done.facts["backbone_tokens"] = tokens
    if costs:
        done.facts["cost"] = costs
    return done


def calibration_fingerprints(
    labels: tuple[Labels, Labels | None],
    data_root: Path,
    graders: Sequence[tuple[Fingerprints, int]],
    targets: Targets,
    languages: Mapping[str, str],
) -> Fingerprints:
    """Fingerprints of the thresholds that `calibrate` fits.

    Args:
        labels: Labels of val, and of test if given.
        data_root: Directory of their documents.
        graders: For each grader, its fingerprints and the number of tokens that it reads per
            document.
        targets: Targets of the thresholds.
        languages: Language per document id if targets are by language; else empty.
    """
    val, test = labels
    sources = sorted({*val.sources, *(test.sources if test is not None else ())})
    found = {
        "code": CALIBRATE_CODE,
        "labels": val.digest,
        "labels_test": test.digest if test is not None else "",
        "data": data_digest(data_root, sources),
    }
    for grader, _ in graders:
        found |= grader
    found["settings"] = sha256_json([*(size for _, size in graders), *targets.identity])
    return found | ({"languages": sha256_json(languages)} if languages else {})


def scored_from(
    fingerprints: Fingerprints, graders: Sequence[tuple[Fingerprints, int]]
) -> Fingerprints:
    """Fingerprints of the labelled documents' scores, which do not depend on the targets."""
    found = {k: v for k, v in fingerprints.items() if k not in ("code", "settings", "languages")}
    return found | {"sizes": json.dumps([size for _, size in graders])}


def refit(
    out_dir: Path,
    labels: Labels,
    targets: Targets,
    fingerprints: Fingerprints,
    graders: Sequence[tuple[Fingerprints, int]],
    languages: Mapping[str, str],
) -> dict[str, Any] | None:
    """Return the summary that `calibrate` would write for these targets, computed from cached
    scores. Returns None if scores are not cached. Writes no file. Raises as `calibrate`."""
    found = recall_scores(out_dir / KEPT_NAME, scored_from(fingerprints, graders))
    if found is None:
        return None
    group = _grouping(targets, languages)
    candidates = [(group(val), None if rows is None else group(rows)) for val, rows in found]
    return _sealed(_fitted(labels, targets, fingerprints, candidates))


def target_languages(
    targets: Targets, languages: Languages | None, doc_ids: Sequence[str]
) -> dict[str, str]:
    """The language of each document, by id; empty unless the targets are by language."""
    if targets.target_by != "language":
        return {}
    return dict(zip(doc_ids, require_languages(languages)(doc_ids)))


def _grouping(
    targets: Targets, languages: Mapping[str, str]
) -> Callable[[CalibrationRows], CalibrationRows]:
    """Return a function that sets the `groups` of rows if targets differ by group, and else returns
    the rows unchanged."""
    match targets.target_by:
        case "source":
            return lambda rows: replace(rows, groups=rows.sources)
        case "language":
            of = languages.__getitem__
            return lambda r: replace(r, groups=np.array([*map(of, r.doc_ids.tolist())], np.str_))
        case "all":
            return lambda rows: rows


def _scored(
    scorer: Scorer, corpus: Corpus, labels: Labels, test: Labels | None, costs: list[dict[str, Any]]
) -> Candidate:
    """Score the labelled documents with a grader. Appends to `costs` the cost per million documents
    on this machine without early exits. This cost is not in the summary, so that equal inputs give
    equal bytes."""
    started = time.perf_counter()
    of_test = None
    of_val = rows_from_scorer(scorer, corpus, with_families(labels, corpus.families))
    if test is not None:
        measured = with_families(test, corpus.families)
        of_test = rows_from_scorer(scorer, corpus, measured, of_val.keys.tolist())
    count = len(labels.doc_ids) + (0 if test is None else len(test.doc_ids))
    hours = (time.perf_counter() - started) / count * 1e6 / 3600
    costs.append({"grader": scorer.kind, "hours_per_million_documents": float(f"{hours:.3g}")})
    return of_val, of_test


def calibrate_predictions(
    labels_val: Path,
    predictions: Path,
    out_dir: Path,
    targets: Targets,
    families: FamilyNames | None = None,
) -> Result:
    """Calibrate as `calibrate` does, with scores from a file that grading wrote without early
    exits.

    Raises:
        CalibrationError: As `calibrate`, or the file does not hold predictions
            (E-CALIBRATION-PREDICTIONS).
        LabelError: As `calibrate`.
    """
    labels = _val_labels(labels_val)
    rows = rows_from_predictions(predictions, with_families(labels, families))
    fingerprints = {
        "code": CALIBRATE_CODE,
        "labels": labels.digest,
        "predictions": sha256_file(predictions),
        "settings": sha256_json(targets.identity),
        **({} if families is None else families.fingerprints),
    }
    rows = _grouping(targets, target_languages(targets, None, labels.doc_ids))(rows)
    return _fit(out_dir, labels, targets, fingerprints, lambda: [(rows, None)])


def calibrate_compat(labels_val: Path, out_dir: Path, target_keep: float = 0.5) -> Result:
    """Calibrate by the published rule, which uses only the labels; every number equals the result
    of the published code.

    Weights are fitted by least squares to the aggregate. The aggregate is the plain mean, so the
    weights are uniform. Thresholds are the (1 - t, t) quantiles of the labels for `target_keep` t.
    If t is below 0.5, `tau_drop` is above `tau_keep`, so grading refuses the file.

    Raises:
        CalibrationError: The target is out of range (E-CALIBRATION-TARGET), or there are no labels
            (E-CALIBRATION-FEW).
        LabelError: As `read_labels`.
    """
    Targets(target_keep)
    labels = read_labels(labels_val)
    _require_enough(len(labels.doc_ids), 1, labels.path)
    x = labels.scale.shares(labels.scores)
    y = x.mean(axis=1) if labels.targets is None else labels.targets
    raw = np.clip(np.linalg.lstsq(x, y, rcond=None)[0], 0, 1)
    weights = raw / raw.sum() if raw.sum() > 0 else np.full(len(raw), 1 / len(raw))
    low, high = np.quantile(x @ weights, [1 - target_keep, target_keep])
    facts = {
        "weights": dict(zip(labels.scale.names, weights.tolist())),
        **labels.scale.in_file(),
        "tau_drop": float(low),
        "tau_keep": float(high),
        "count": len(labels.doc_ids),
        "rule": COMPAT_RULE,
        "target_keep": target_keep,
        "labels_digest": labels.digest,
    }
    return _committed(out_dir, facts)


def _fit(
    out_dir: Path,
    labels: Labels,
    targets: Targets,
    fingerprints: Fingerprints,
    score: Callable[[], Sequence[Candidate]],
) -> Result:
    """Fit, measure and write, unless the file was made from the same inputs."""
    path = out_dir / CALIBRATION_NAME
    if is_current(path, fingerprints):
        # Reading an edited file raises CalibrationError; then the file is rebuilt.
        with contextlib.suppress(CalibrationError):
            known = read_calibration(path)
            clear_left(out_dir)
            return _result(path, known)
    return _committed(out_dir, _fitted(labels, targets, fingerprints, score()))


def _fitted(
    labels: Labels, targets: Targets, fingerprints: Fingerprints, candidates: Sequence[Candidate]
) -> dict[str, Any]:
    """Fit every candidate grader, choose the best and return the fields of its summary."""
    for rows, _ in candidates:
        _require_enough(len(rows.held_out()), MIN_DOCUMENTS, labels.path)
    graders, choice = choose(candidates)
    fit, report, test = graders[0]
    for half in (fit, report):
        _require_enough(len(half.held_out()), MIN_DOCUMENTS // 4, labels.path)
    if choice:
        # The same documents choose the grader and prove the bounds, so the allowed error is divided
        # by the number of graders (Bonferroni).
        targets = replace(targets, delta=DELTA / len(graders))
        shown = [
            choice["grader_choice"][n] for n in ("report", "test") if n in choice["grader_choice"]
        ]
        for one in graders:
            measured = [one.report, *([] if one.test is None else [one.test])]
            points = operating_points(one.fit, measured, targets)
            for split, point in zip(shown, points):
                split["graders"][one.fit.grader] |= point
    summary = summarise(fit, report, targets, test)
    stacked = {} if fit.probe_weight is None else {"probe_weight": fit.probe_weight}
    return {
        **summary,
        "num_failed_labels": labels.num_failed,
        "left_out": fit.left_out,
        "grader": fit.grader,
        **choice,
        "targets": dict(targets.settings),
        "scorer_model": labels.scorer.scorer_model,
        "scorer_version": labels.scorer.scorer_version,
        "labels_digest": labels.digest,
        "heads_digest": fit.heads_digest,
        # Add the student's digest only if its threshold drops documents, or its scores count.
        **({"student_digest": fit.student_digest} if summary.get("tau_student") or stacked else {}),
        **stacked,
        "fingerprints": fingerprints,
    }


def _sealed(facts: dict[str, Any]) -> dict[str, Any]:
    return sealed({"format": CALIBRATION_FORMAT, **facts})


def _committed(out_dir: Path, facts: dict[str, Any]) -> Result:
    path = out_dir / CALIBRATION_NAME
    summary = _sealed(facts)
    with output_lock(out_dir):
        write_json(path, summary)
        return _result(path, summary)


def _result(path: Path, summary: dict[str, Any]) -> Result:
    return Result(sha256_file(path), {key: summary[key] for key in FACTS if key in summary})


def _val_labels(path: Path) -> Labels:
    """Read the labels of val. Raises CalibrationError if there are too few labels, and LabelError
    if most labels failed."""
    labels = read_labels(path)
    labels.require_coverage()
    _require_enough(len(labels.doc_ids), MIN_DOCUMENTS, path)
    return labels


def _require_enough(count: int, least: int, where: Path) -> None:
    if count < least:
        raise CalibrationError(
            "too few val documents with labels and scores to fit thresholds",
            where=where,
            found=count,
            expected=f"at least {least}",
            do='label more documents, or set grader = "none" in [grading]',
            code="E-CALIBRATION-FEW",
        )
