"""Scores of documents of one latent quality, and calibrations of them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nmoe_core.quality.calibration.calibrate import calibrate_predictions
from nmoe_core.quality.calibration.summary_file import read_calibration
from nmoe_core.quality.calibration.targets import Targets
from nmoe_core.quality.calibration.thresholds import Thresholds, fit_thresholds, would_keep
from tests.core.small_gradings import write_labels


class Scored(NamedTuple):
    """Aggregated scores `[N]` of both heads and of the oracle, which gives multiples of 0.05, and
    of a student where one is asked before the probe."""

    probe: np.ndarray
    judge: np.ndarray
    oracle: np.ndarray
    student: np.ndarray | None = None


def scored(
    seed: int, count: int, noise: Sequence[float] = (0.7, 0.7), kind: str = "plain"
) -> Scored:
    """Probe, judge and, where a third is given, student see the quality with some noise, in
    deviations of it.

    `kind` is how the judge's scores are spread: `plain`, `skewed` or `tied`.
    """
    rng = np.random.default_rng(seed)
    quality = rng.normal(size=count)
    probe, judge = (quality + rng.normal(0, deviation, count) for deviation in noise[:2])
    if kind == "skewed":
        judge = 1 / (1 + np.exp(-judge)) ** 6
    elif kind == "tied":
        judge = np.clip(np.rint(2 * judge + 4), 0, 9) / 9
    else:
        judge = 0.5 + 0.1 * judge
    oracle = np.clip(np.rint(10 + 4 * (quality + rng.normal(0, 0.3, count))), 0, 20) / 20
    student = [0.5 + 0.1 * (quality + rng.normal(0, third, count)) for third in noise[2:]]
    given = 0.5 + 0.1 * probe, judge, oracle, *student
    return Scored(*(np.clip(x, 0, 1).round(6) for x in given))


def fit(scores: Scored, target_keep: float, max_false_drop: float) -> Thresholds:
    """Thresholds of these documents."""
    keeps = scores.oracle >= would_keep(scores.oracle, target_keep)
    targets = Targets(target_keep, max_false_drop)
    return fit_thresholds((scores.student, scores.probe, scores.judge), keeps, targets)


def write_val(directory: Path, scores: Scored) -> tuple[Path, Path]:
    """Labels and predictions of documents of these scores."""
    points = np.rint(scores.oracle * 20).astype(int)
    grades = np.stack([(points + i) // 5 for i in range(5)], axis=1)
    ids = [(f"d{i}", "web") for i in range(len(points))]
    rows = [
        {"doc_id": doc_id, "aggregated": a, "q_probe": p}
        for (doc_id, _), a, p in zip(ids, scores.judge.tolist(), scores.probe.tolist())
    ]
    directory.mkdir(parents=True, exist_ok=True)
    return write_labels(directory / "labels_val.jsonl", ids, grades), write_rows(
        directory / "predictions.jsonl", rows
    )


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def summary_of(paths: tuple[Path, Path], out: Path, **targets: Any) -> dict[str, Any]:
    """What calibration says of labels and predictions."""
    calibrate_predictions(*paths, out, Targets(**targets))
    return read_calibration(out / "calibration_summary.json")
