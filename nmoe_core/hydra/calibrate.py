"""Calibration: scores the val labels' documents with the deployed heads and fits thresholds there.

Writes `calibration_summary.json`: weights, `tau_probe`, `tau_drop`, `tau_keep`, and what they do on
val (shares, false drops, reliability, the keep-rate curve). Refuses too few documents, constant
scores, and heads trained on another backbone; costs one pass of the backbone over val.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from loader.format import read_json_object
from nmoe_core.atomic import output_lock, write_json
from nmoe_core.docid import DocumentReader
from nmoe_core.errors import CalibrationError
from nmoe_core.fingerprint import is_current, sha256_json
from nmoe_core.hydra.features import Backbone, buffers, one_thread, read_documents
from nmoe_core.hydra.head_files import Heads, load_heads
from nmoe_core.hydra.label_files import Labels, read_labels
from nmoe_core.hydra.metrics import spearman
from nmoe_core.hydra.scores import DECIMALS, UNIFORM_WEIGHTS, aggregate
from nmoe_core.hydra.scoring import score_documents
from nmoe_core.hydra.slices import data_digest
from nmoe_core.hydra.thresholds import (
    CALIBRATION_NAME,
    Thresholds,
    fit_thresholds,
    fit_weights,
    midpoint_above,
    top_share,
)

CALIBRATE_CODE = "calibrate/1"
MIN_DOCUMENTS = 20
NUM_BINS = 10


@dataclass(frozen=True, slots=True)
class CalibrationReport:
    """The committed summary as it was written; `is_current` when it was there already."""

    path: Path
    summary: dict[str, Any]
    is_current: bool


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
) -> CalibrationReport:
    """Fit weights and thresholds on the val labels.

    Args:
        labels_val: Merged labels of the val split; no head was fitted on them.
        heads_dir: Both head files.
        model: The backbone they were trained on.
        data_root: Directory that document ids are relative to.
        out_dir: Where `calibration_summary.json` goes.
        eos_token_id: Token that ends every document.
        max_ctx: Tokens of a document that heads see; the same as in training.
        max_batch: Documents that run together.
        target_keep: Share of documents to keep, in (0, 1).
        max_false_drop: Largest share, among dropped documents, of those in the oracle's own top
            `target_keep`; in [0, 1).

    Raises:
        CalibrationError: A target is out of range (E-CALIBRATION-TARGET), fewer than 20 labels
            (E-CALIBRATION-FEW), or scores without spread (E-CALIBRATION-CONSTANT).
        HeadError: As `load_heads`; or a state is not finite (E-HEAD-NONFINITE).
        LabelError: As `read_labels`.
    """
    _require_targets(target_keep, max_false_drop)
    labels = read_labels(labels_val)
    _require_enough(labels)
    heads = load_heads(heads_dir, model, max_ctx)
    settings = [max_ctx, target_keep, max_false_drop]
    fingerprints = {
        "code": CALIBRATE_CODE,
        "labels": labels.digest,
        "data": data_digest(data_root, sorted(set(labels.sources))),
        "backbone": model.digest,
        "probe": heads.probe_digest,
        "judge": heads.judge_digest,
        "settings": sha256_json(settings),
    }
    path = out_dir / CALIBRATION_NAME
    if is_current(path, fingerprints):
        return CalibrationReport(path, read_json_object(path), True)
    weights, weights_source = _weights(labels)
    with one_thread():
        probe, judge = _scores(model, heads, labels, data_root, eos_token_id, max_ctx, max_batch)
    summary = summarise(
        aggregate(probe, weights),
        aggregate(judge, weights),
        aggregate(labels.scores, weights),
        target_keep,
        max_false_drop,
    )
    facts = {
        "weights": weights,
        "weights_source": weights_source,
        **summary,
        "num_failed_labels": labels.num_failed,
        "max_ctx": max_ctx,
        "scorer_model": labels.scorer[0],
        "scorer_version": labels.scorer[1],
        "labels_digest": labels.digest,
        "heads_digest": heads.digest,
        "fingerprints": fingerprints,
    }
    with output_lock(out_dir):
        write_json(path, facts)
    return CalibrationReport(path, facts, False)


def summarise(
    probe: np.ndarray,
    judge: np.ndarray,
    oracle: np.ndarray,
    target_keep: float,
    max_false_drop: float,
) -> dict[str, Any]:
    """Fit thresholds on aggregated scores `[N]` and say what they do there.

    Raises:
        CalibrationError: Probe, judge or oracle scores are all alike (E-CALIBRATION-CONSTANT).
    """
    for name, scores in (("probe", probe), ("judge", judge), ("oracle", oracle)):
        if np.ptp(scores) < 10**-DECIMALS:
            raise CalibrationError(
                f"{name} scores are all alike, so no threshold parts them",
                found=f"{scores[0]} for {len(scores)} documents",
                do="train the heads longer, or check the oracle",
                code="E-CALIBRATION-CONSTANT",
            )
    oracle_keeps = top_share(oracle, target_keep)
    taus = fit_thresholds(probe, judge, oracle_keeps, target_keep, max_false_drop)
    return {
        "tau_drop": taus.tau_drop,
        "tau_keep": taus.tau_keep,
        "tau_probe": taus.tau_probe,
        "count": len(judge),
        "target_keep": target_keep,
        "max_false_drop": max_false_drop,
        **_outcome(probe, judge, oracle_keeps, taus),
        "spearman_probe": _rounded(spearman(probe, oracle)),
        "spearman_judge": _rounded(spearman(judge, oracle)),
        "reliability": reliability(judge, oracle, oracle_keeps),
        "keep_curve": keep_curve(judge),
    }


def _outcome(
    probe: np.ndarray, judge: np.ndarray, oracle_keeps: np.ndarray, taus: Thresholds
) -> dict[str, Any]:
    exits = probe < taus.tau_probe
    keeps = ~exits & (judge >= taus.tau_keep)
    drops = exits | (judge < taus.tau_drop)
    return {
        "achieved_keep": _rounded(keeps.mean()),
        "achieved_drop": _rounded(drops.mean()),
        "early_exit_rate": _rounded(exits.mean()),
        "false_drop_rate": _share(oracle_keeps, drops),
        "precision_keep": _share(oracle_keeps, keeps),
        "recall_keep": _share(keeps, oracle_keeps),
        "oracle_keep": _rounded(oracle_keeps.mean()),
    }


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
        for rows in np.array_split(order, NUM_BINS)
    ]


def keep_curve(judge: np.ndarray) -> list[list[float]]:
    """Points (share to keep, judge threshold that keeps it) at 1 % to 99 %."""
    descending = np.sort(judge)[::-1]
    counts = [max(1, round(percent * len(judge) / 100)) for percent in range(1, 100)]
    taus = [midpoint_above(descending, count) for count in counts]
    return [[percent / 100, tau] for percent, tau in zip(range(1, 100), taus)]


def _scores(
    model: Backbone,
    heads: Heads,
    labels: Labels,
    data_root: Path,
    eos_token_id: int,
    max_ctx: int,
    max_batch: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Stored scores `[N, 5]` of both heads for every labelled document, nothing left out."""
    reader = DocumentReader(data_root)
    probe, judge = [], []
    for names in buffers(labels.doc_ids, max_batch):
        documents = read_documents(reader, names, eos_token_id, max_ctx)
        scores = score_documents(model, heads.probe, heads.judge, documents, names, max_batch)
        probe.append(scores.probe)
        judge.append(scores.judge)
    return np.concatenate(probe), np.concatenate(judge)


def _weights(labels: Labels) -> tuple[dict[str, float], str]:
    if labels.targets is None:
        return UNIFORM_WEIGHTS, "uniform: labels carry no independent target"
    return fit_weights(labels.scores, labels.targets), "least squares on the labels' target"


def _require_targets(target_keep: float, max_false_drop: float) -> None:
    if not (0 < target_keep < 1 and 0 <= max_false_drop < 1):
        raise CalibrationError(
            "a target is out of range",
            found=f"target_keep {target_keep}, max_false_drop {max_false_drop}",
            expected="target_keep in (0, 1), max_false_drop in [0, 1)",
            code="E-CALIBRATION-TARGET",
        )


def _require_enough(labels: Labels) -> None:
    if len(labels.doc_ids) < MIN_DOCUMENTS:
        raise CalibrationError(
            "too few val labels to fit thresholds",
            where=labels.path,
            found=len(labels.doc_ids),
            expected=f"at least {MIN_DOCUMENTS}",
            do="label more documents",
            code="E-CALIBRATION-FEW",
        )


def _share(of: np.ndarray, among: np.ndarray) -> float | None:
    return _rounded(of[among].mean()) if among.any() else None


def _rounded(value: float | np.floating[Any] | None) -> float | None:
    return None if value is None else round(float(value), DECIMALS)
