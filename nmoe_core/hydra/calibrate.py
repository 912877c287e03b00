"""Calibration: thresholds on the deployed heads' scores of val documents.

Val is halved by the hash of each document's content: thresholds come from one half, every reported
figure from the other. Writes `calibration_summary.json`. Refuses too few documents, labels that
mostly failed, constant scores, and heads trained on another backbone; costs one pass of the
backbone over val, or none when predictions are given (docs/calibration.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from loader.format import read_json_object
from nmoe_core.atomic import output_lock, write_json
from nmoe_core.errors import CalibrationError
from nmoe_core.fingerprint import Fingerprints, is_current, sha256_file, sha256_json
from nmoe_core.hydra.calibration_file import CALIBRATION_NAME
from nmoe_core.hydra.calibration_rows import (
    CalibrationRows,
    require_enough,
    rows_from_heads,
    rows_from_predictions,
)
from nmoe_core.hydra.calibration_summary import summarise
from nmoe_core.hydra.codes import CALIBRATE_CODE
from nmoe_core.hydra.features import Backbone, one_thread
from nmoe_core.hydra.head_files import load_heads
from nmoe_core.hydra.label_files import Labels, read_labels
from nmoe_core.hydra.scores import DIMENSIONS, MAX_GRADE
from nmoe_core.hydra.slices import data_digest

MIN_DOCUMENTS = 20
MIN_PARSE_RATE = 0.5


@dataclass(frozen=True, slots=True)
class CalibrationReport:
    """The committed summary as it was written; `is_current` when it was there already."""

    path: Path
    summary: dict[str, Any]
    is_current: bool


@dataclass(frozen=True, slots=True)
class Targets:
    """What thresholds are to achieve.

    Attributes:
        target_keep: Share of documents to keep, in (0, 1).
        max_false_drop: Bound on the share, among dropped documents, of those in the oracle's own
            top `target_keep`; in [0, 1).
        target_drop: Share of documents to drop, in [0, 1 - target_keep]; None drops as many as
            `max_false_drop` allows.
    """

    target_keep: float = 0.5
    max_false_drop: float = 0.02
    target_drop: float | None = None

    def check(self) -> None:
        """Refuse targets out of range.

        Raises:
            CalibrationError: E-CALIBRATION-TARGET.
        """
        drop = self.target_drop
        is_possible = drop is None or 0 <= drop <= 1 - self.target_keep + 1e-9
        if not (0 < self.target_keep < 1 and 0 <= self.max_false_drop < 1 and is_possible):
            raise CalibrationError(
                "a target is out of range",
                found=f"target_keep {self.target_keep}, max_false_drop {self.max_false_drop}, "
                f"target_drop {drop}",
                expected="target_keep in (0, 1), max_false_drop in [0, 1), "
                "target_drop in [0, 1 - target_keep]",
                code="E-CALIBRATION-TARGET",
            )

    def as_list(self) -> list[float | None]:
        """The three values, for fingerprints."""
        return [self.target_keep, self.max_false_drop, self.target_drop]


def calibrate(
    labels_val: Path,
    heads_dir: Path,
    model: Backbone,
    data_root: Path,
    out_dir: Path,
    *,
    eos_token_id: int,
    max_ctx: int,
    max_batch: int = 32,
    target_keep: float = 0.5,
    max_false_drop: float = 0.02,
    target_drop: float | None = None,
) -> CalibrationReport:
    """Fit weights and thresholds on the heads' own scores of the val labels' documents.

    Args:
        labels_val: Merged labels of the val split; no head was fitted on them.
        heads_dir: Both head files.
        model: The backbone they were trained on.
        data_root: Directory that document ids are relative to.
        out_dir: Where `calibration_summary.json` goes.
        eos_token_id: Token that ends every document.
        max_ctx: Tokens of a document that heads see; the same as in training.
        max_batch: Documents that run together.
        target_keep: As in `Targets`, with the two that follow.

    Raises:
        CalibrationError: A target is out of range (E-CALIBRATION-TARGET), fewer than 20 labels
            (E-CALIBRATION-FEW), most labels failed (E-CALIBRATION-COVERAGE), or scores without
            spread (E-CALIBRATION-CONSTANT).
        HeadError: As `load_heads`; or states are not finite (E-HEAD-NONFINITE).
        LabelError: As `read_labels`.
    """
    targets = Targets(target_keep, max_false_drop, target_drop)
    labels = _checked_labels(labels_val, targets)
    heads = load_heads(heads_dir, model, max_ctx)
    fingerprints = {
        "code": CALIBRATE_CODE,
        "labels": labels.digest,
        "data": data_digest(data_root, sorted(set(labels.sources))),
        "backbone": model.digest,
        "probe": heads.probe_digest,
        "judge": heads.judge_digest,
        "settings": sha256_json([max_ctx, *targets.as_list()]),
    }

    def rows() -> CalibrationRows:
        with one_thread():
            return rows_from_heads(model, heads, labels, data_root, eos_token_id, max_batch)

    return _commit(out_dir, labels, targets, rows, fingerprints, {"max_ctx": max_ctx})


def calibrate_predictions(
    labels_val: Path,
    predictions: Path,
    out_dir: Path,
    *,
    target_keep: float = 0.5,
    max_false_drop: float = 0.02,
    target_drop: float | None = None,
) -> CalibrationReport:
    """As `calibrate`, on a file of the heads' scores as grading without early exits writes it.

    Raises:
        CalibrationError: As `calibrate`, or the file does not hold what is needed
            (E-CALIBRATION-PREDICTIONS).
        LabelError: As `read_labels`.
    """
    targets = Targets(target_keep, max_false_drop, target_drop)
    labels = _checked_labels(labels_val, targets)
    rows = rows_from_predictions(predictions, labels)
    fingerprints = {
        "code": CALIBRATE_CODE,
        "labels": labels.digest,
        "predictions": sha256_file(predictions),
        "settings": sha256_json(targets.as_list()),
    }
    return _commit(out_dir, labels, targets, lambda: rows, fingerprints, {})


def calibrate_compat(
    labels_val: Path, out_dir: Path, target_keep: float = 0.5
) -> CalibrationReport:
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
        "rule": "compat: quantiles (1 - target_keep, target_keep) of the labels",
        "target_keep": target_keep,
        "labels_digest": labels.digest,
    }
    path = out_dir / CALIBRATION_NAME
    with output_lock(out_dir):
        write_json(path, facts)
    return CalibrationReport(path, facts, False)


def _commit(
    out_dir: Path,
    labels: Labels,
    targets: Targets,
    rows_of: Callable[[], CalibrationRows],
    fingerprints: Fingerprints,
    more: dict[str, Any],
) -> CalibrationReport:
    """Fit, measure and write, unless the file was made from the same inputs."""
    path = out_dir / CALIBRATION_NAME
    if is_current(path, fingerprints):
        return CalibrationReport(path, read_json_object(path), True)
    rows = rows_of()
    require_enough(rows.keys, MIN_DOCUMENTS, labels.path)
    fit, report = rows.halves()
    for half in (fit, report):
        require_enough(half.keys, MIN_DOCUMENTS // 4, labels.path)
    summary = summarise(
        fit, report, targets.target_keep, targets.max_false_drop, targets.target_drop
    )
    facts = {
        **summary,
        "num_failed_labels": labels.num_failed,
        "left_out": rows.left_out,
        **more,
        "scorer_model": labels.scorer[0],
        "scorer_version": labels.scorer[1],
        "labels_digest": labels.digest,
        "heads_digest": rows.heads_digest,
        "fingerprints": fingerprints,
    }
    with output_lock(out_dir):
        write_json(path, facts)
    return CalibrationReport(path, facts, False)


def _checked_labels(labels_val: Path, targets: Targets) -> Labels:
    targets.check()
    labels = read_labels(labels_val)
    total = len(labels.doc_ids) + labels.num_failed
    if total and len(labels.doc_ids) < MIN_PARSE_RATE * total:
        raise CalibrationError(
            "most val labels failed, so those that did not say nothing of the rest",
            where=labels.path,
            found=f"{len(labels.doc_ids)} of {total} parsed",
            expected=f"at least {MIN_PARSE_RATE:.0%}",
            do="check the oracle, and label again",
            code="E-CALIBRATION-COVERAGE",
        )
    require_enough(labels.doc_ids, MIN_DOCUMENTS, labels.path)
    return labels
