"""Calibration: thresholds on the deployed heads' scores of val documents.

Val is halved by the hash of each document's content: thresholds come from one half, every reported
figure from the other. Writes `calibration_summary.json`. Refuses too few documents, labels that
mostly failed, constant scores, and heads trained on another backbone; costs one pass of the
backbone over val, or none when predictions are given (docs/calibration.md).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from nmoe_core.base.atomic import output_lock
from nmoe_core.base.errors import CalibrationError
from nmoe_core.base.fingerprint import Fingerprints, is_current, sha256_file, sha256_json
from nmoe_core.base.result import Result
from nmoe_core.calibration import CALIBRATE_CODE
from nmoe_core.calibration.files import COMPAT_RULE, read_calibration, write_calibration
from nmoe_core.calibration.rows import (
    CalibrationRows,
    require_enough,
    rows_from_heads,
    rows_from_predictions,
)
from nmoe_core.calibration.summary import summarise
from nmoe_core.calibration.thresholds import Targets
from nmoe_core.config.tree import CALIBRATION_NAME
from nmoe_core.heads.features import Corpus, one_thread
from nmoe_core.heads.metrics import require_same_scorer
from nmoe_core.heads.scoring import HeadScorer
from nmoe_core.labels.files import Labels, read_labels
from nmoe_core.labels.scores import DIMENSIONS, MAX_GRADE
from nmoe_core.labels.slices import data_digest

MIN_DOCUMENTS = 20
MIN_PARSE_RATE = 0.5
FACTS = (
    *("tau_drop", "tau_keep", "tau_probe", "weights_source", "target_keep", "achieved_keep"),
    *("achieved_keep_ci95", "achieved_band", "achieved_drop", "early_exit_rate", "count"),
    *("dropping", "untouched"),
)
"""The fields of the summary that are facts of a result."""
# Rows of val, and of test where it is labelled.
Rows = tuple[CalibrationRows, CalibrationRows | None]


def calibrate(
    labels_val: Path,
    scorer: HeadScorer,
    corpus: Corpus,
    out_dir: Path,
    targets: Targets,
    labels_test: Path | None = None,
) -> Result:
    """Fit weights and thresholds on the heads' own scores of the val labels' documents.

    Args:
        labels_val: Merged labels of the val split; no head was fitted on them.
        scorer: The backbone and its heads.
        corpus: The labelled documents.
        out_dir: Where `calibration_summary.json` goes; `read_calibration` reads it.
        targets: What the thresholds are to achieve.
        labels_test: Merged labels of the test split, only reported on.

    Returns:
        The digest of the summary, its main figures and the `backbone_tokens` of this call.

    Raises:
        CalibrationError: A target is out of range (E-CALIBRATION-TARGET), fewer than 20 labels
            (E-CALIBRATION-FEW), most labels failed (E-CALIBRATION-COVERAGE), scores without
            spread (E-CALIBRATION-CONSTANT), or `target_drop` breaks `max_false_drop`
            (E-CALIBRATION-BOUND).
        HeadError: States are not finite (E-HEAD-NONFINITE).
        LabelError: As `read_labels`.
    """
    labels, heads, model = _checked_labels(labels_val, targets), scorer.heads, scorer.model
    test = _test_labels(labels_test, labels)
    sources = sorted({*labels.sources, *(test.sources if test is not None else ())})
    fingerprints = {
        "code": CALIBRATE_CODE,
        "labels": labels.digest,
        "labels_test": test.digest if test is not None else "",
        "data": data_digest(corpus.data_root, sources),
        "backbone": model.digest,
        "probe": heads.probe_digest,
        "judge": heads.judge_digest,
        "settings": sha256_json([corpus.max_ctx, *targets.as_list()]),
    }

    def rows() -> Rows:
        with one_thread():
            of_val = rows_from_heads(scorer, corpus, labels)
            if test is None:
                return of_val, None
            return of_val, rows_from_heads(scorer, corpus, test, of_val.keys)

    tokens_before = model.tokens_processed
    fit = _Fit(labels, targets, fingerprints, {"max_ctx": corpus.max_ctx})
    done = fit.commit(out_dir, rows)
    done.facts["backbone_tokens"] = model.tokens_processed - tokens_before
    return done


def calibrate_predictions(
    labels_val: Path, predictions: Path, out_dir: Path, targets: Targets
) -> Result:
    """As `calibrate`, on a file of the heads' scores as grading without early exits writes it.

    Raises:
        CalibrationError: As `calibrate`, or the file holds no predictions
            (E-CALIBRATION-PREDICTIONS).
        LabelError: As `read_labels`.
    """
    labels = _checked_labels(labels_val, targets)
    rows = rows_from_predictions(predictions, labels)
    fingerprints = {
        "code": CALIBRATE_CODE,
        "labels": labels.digest,
        "predictions": sha256_file(predictions),
        "settings": sha256_json(targets.as_list()),
    }
    return _Fit(labels, targets, fingerprints).commit(out_dir, lambda: (rows, None))


def calibrate_compat(labels_val: Path, out_dir: Path, target_keep: float = 0.5) -> Result:
    """The published rule, number for number, from labels alone.

    Weights are least squares on the aggregate, which labels define as the plain mean, so they come
    out uniform; thresholds are the (1 - t, t) quantiles of the labels, which for t below one half
    cross: grading refuses such a pair.

    Raises:
        CalibrationError: The target is out of range (E-CALIBRATION-TARGET), or no label
            (E-CALIBRATION-FEW).
        LabelError: As `read_labels`.
    """
    Targets(target_keep).check()
    labels = read_labels(labels_val)
    require_enough(labels.doc_ids, 1, labels.path)
    x = labels.scores.astype(np.float64) / MAX_GRADE
    y = x.mean(axis=1) if labels.targets is None else labels.targets
    raw = np.clip(np.linalg.lstsq(x, y, rcond=None)[0], 0, 1)
    weights = raw / raw.sum() if raw.sum() > 0 else np.full(len(DIMENSIONS), 1 / len(DIMENSIONS))
    low, high = np.quantile(x @ weights, [1 - target_keep, target_keep])
    facts = {
        "weights": dict(zip(DIMENSIONS, weights.tolist())),
        "tau_drop": float(low),
        "tau_keep": float(high),
        "count": len(labels.doc_ids),
        "rule": COMPAT_RULE,
        "target_keep": target_keep,
        "labels_digest": labels.digest,
    }
    path = out_dir / CALIBRATION_NAME
    with output_lock(out_dir):
        return _result(path, write_calibration(path, facts))


@dataclass(frozen=True, slots=True)
class _Fit:
    """Labels, targets and fingerprints of one calibration, and facts that its summary names."""

    labels: Labels
    targets: Targets
    fingerprints: Fingerprints
    more: dict[str, Any] = field(default_factory=dict)

    def commit(self, out_dir: Path, rows_of: Callable[[], Rows]) -> Result:
        """Fit, measure and write, unless the file was made from the same inputs."""
        path, labels = out_dir / CALIBRATION_NAME, self.labels
        if is_current(path, self.fingerprints):
            # One that was edited since is no calibration: it is made again.
            with contextlib.suppress(CalibrationError):
                return _result(path, read_calibration(path))
        rows, test = rows_of()
        require_enough(rows.held_out().keys, MIN_DOCUMENTS, labels.path)
        fit, report = rows.halves()
        for half in (fit, report):
            require_enough(half.held_out().keys, MIN_DOCUMENTS // 4, labels.path)
        facts = {
            **summarise(fit, report, self.targets, test),
            "num_failed_labels": labels.num_failed,
            "left_out": rows.left_out,
            **self.more,
            "scorer_model": labels.scorer[0],
            "scorer_version": labels.scorer[1],
            "labels_digest": labels.digest,
            "heads_digest": rows.heads_digest,
            "fingerprints": self.fingerprints,
        }
        with output_lock(out_dir):
            return _result(path, write_calibration(path, facts))


def _result(path: Path, summary: dict[str, Any]) -> Result:
    return Result(sha256_file(path), {key: summary[key] for key in FACTS if key in summary})


def _test_labels(path: Path | None, val: Labels) -> Labels | None:
    """Labels of the test split; None where there are none."""
    test = read_labels(path) if path is not None else None
    if test is None or not test.doc_ids:
        return None
    require_same_scorer(test, val.scorer)
    return test


def _checked_labels(labels_val: Path, targets: Targets) -> Labels:
    targets.check()
    labels = read_labels(labels_val)
    total = len(labels.doc_ids) + labels.num_failed + labels.num_salvaged
    if total and len(labels.doc_ids) < MIN_PARSE_RATE * total:
        raise CalibrationError(
            "most val labels failed, so the others may not represent the documents",
            where=labels.path,
            found=f"{len(labels.doc_ids)} of {total} parsed",
            expected=f"at least {MIN_PARSE_RATE:.0%}",
            do="check the oracle, and label again",
            code="E-CALIBRATION-COVERAGE",
        )
    require_enough(labels.doc_ids, MIN_DOCUMENTS, labels.path)
    return labels
