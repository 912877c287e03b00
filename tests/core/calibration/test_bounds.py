"""Bounds that a user asks for hold on documents that were not there, or are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nmoe_core.base.errors import CalibrationError
from nmoe_core.calibration.calibrate import calibrate_predictions
from nmoe_core.cli import main
from nmoe_core.labels.scores import DIMENSIONS
from tests.core.quality import write_labels

SETTINGS = [
    # (documents in val, agreement of the probe, of the judge, target_keep, max_false_drop)
    (3000, 0.5, 0.3, 0.5, 0.1),
    (3000, 1.0, 0.6, 0.3, 0.2),
    (6000, 0.7, 0.5, 0.5, 0.05),
    (1500, 0.5, 0.5, 0.8, 0.3),
]


def population(seed: int, count: int, noises: tuple[float, float]) -> tuple[np.ndarray, ...]:
    """Probe, judge and oracle scores of documents of one latent quality."""
    rng = np.random.default_rng(seed)
    quality = rng.normal(size=count)
    probe, judge = (0.5 + 0.1 * (quality + rng.normal(0, n, count)) for n in noises)
    oracle = np.clip(np.rint(10 + 4 * (quality + rng.normal(0, 0.3, count))), 0, 20) / 20
    return np.clip(probe, 0, 1).round(6), np.clip(judge, 0, 1).round(6), oracle


def write_val(directory: Path, scores: tuple[np.ndarray, ...]) -> tuple[Path, Path]:
    """Labels and predictions of documents of these scores."""
    probe, judge, oracle = scores
    points = np.rint(oracle * 20).astype(int)
    grades = np.stack([(points + i) // 5 for i in range(5)], axis=1)
    ids = [(f"d{i}", "web") for i in range(len(judge))]
    rows = [
        {"doc_id": doc_id, "aggregated": a, "q_probe": p}
        for (doc_id, _), a, p in zip(ids, judge.tolist(), probe.tolist())
    ]
    directory.mkdir(parents=True, exist_ok=True)
    predictions = directory / "predictions.jsonl"
    predictions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return write_labels(directory / "labels_val.jsonl", ids, grades), predictions


def test_dropping_more_than_the_bound_allows_is_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    labels, predictions = write_val(tmp_path, population(0, 400, (2.0, 2.0)))
    call = ["hydra", "calibrate", "--labels", labels, "--predictions", predictions]
    call += ["--out", tmp_path / "out", "--target-drop", "0.2", "--max-false-drop", "0.15"]
    assert main([str(part) for part in call]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    for part in ("E-CALIBRATION-BOUND", "0.150", "target_drop 0.2", "200 labels", "95 %"):
        assert part in line
    assert not (tmp_path / "out" / "calibration_summary.json").exists()


def test_a_share_to_drop_that_the_labels_prove_safe_is_dropped(tmp_path: Path) -> None:
    labels, predictions = write_val(tmp_path, population(0, 2000, (0.3, 0.3)))
    summary = calibrate_predictions(
        labels, predictions, tmp_path / "out", target_drop=0.2, max_false_drop=0.15
    ).summary
    assert summary["achieved_drop"] == pytest.approx(0.2, abs=0.04)
    assert summary["certificate"]["false_drop_rate_upper95"] <= 0.15


def test_labels_that_prove_nothing_drop_nothing_and_say_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    labels, predictions = write_val(tmp_path, population(0, 60, (0.5, 0.5)))
    call = ["hydra", "calibrate", "--labels", labels, "--predictions", predictions]
    assert main([*map(str, call), "--out", str(tmp_path / "out"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)["calibration"]
    assert facts["tau_drop"] == facts["tau_probe"] == facts["achieved_drop"] == 0
    assert "nothing is dropped: 30 labels prove no threshold" in facts["dropping"]


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_bound_holds_on_fresh_documents_in_190_of_200_trials(
    setting: tuple[int, float, float, float, float],
) -> None:
    """200 calibrations a setting; what they say is compared with 50,000 fresh documents."""
    from nmoe_core.calibration.thresholds import Targets, fit_thresholds, would_keep

    count, probe_noise, judge_noise, target, most = setting
    noises = (probe_noise, judge_noise)
    fresh_probe, fresh_judge, fresh_oracle = population(10**6, 50_000, noises)
    broken = {"lost keeps": 0, "false exits": 0, "false drops": 0}
    exits_found = 0
    for trial in range(200):
        probe, judge, oracle = population(trial, count // 2, noises)
        keep_from = would_keep(oracle, target)
        taus = fit_thresholds(probe, judge, oracle >= keep_from, Targets(target, most))
        assert taus.tau_probe <= taus.tau_keep
        exits = fresh_probe < taus.tau_probe
        drops = exits | (fresh_judge < taus.tau_drop)
        exits_found += bool(exits.any())
        worth = fresh_oracle >= keep_from
        broken["lost keeps"] += (exits & (fresh_judge >= taus.tau_keep)).mean() > 0.01
        broken["false exits"] += worth[exits].sum() > most * exits.sum()
        broken["false drops"] += worth[drops].sum() > most * drops.sum()
    assert exits_found >= 100, "the setting lets documents leave at the probe"
    assert max(broken.values()) <= 10, broken


def test_a_calibration_of_an_older_version_that_breaks_its_bound_fails_the_check(
    tmp_path: Path,
) -> None:
    from types import SimpleNamespace

    from nmoe_core.config.tables import ChecksTable
    from nmoe_core.tasks.checks import LEVELS, check_calibration

    summary = {
        "tau_probe": 0.0,
        "tau_drop": 0.4,
        "tau_keep": 0.5,
        "count": 375,
        "count_report": 188,
        "weights": dict.fromkeys(DIMENSIONS, 0.2),
        "target_keep": 0.5,
        "achieved_keep": 0.5,
        "max_false_drop": 0.15,
        "achieved_drop": 33 / 188,
        "false_drop_rate": 13 / 33,
    }
    (tmp_path / "calibration_summary.json").write_text(json.dumps(summary))
    run: Any = SimpleNamespace(
        paths=SimpleNamespace(calibration=tmp_path), config=SimpleNamespace(checks=ChecksTable())
    )
    found = check_calibration(run)
    assert [name for name, verdict in found.items() if not verdict.passed] == ["false_drops"]
    assert LEVELS["false_drops"] == "block"
    del summary["max_false_drop"], summary["achieved_keep"]
    (tmp_path / "calibration_summary.json").write_text(json.dumps(summary))
    assert not check_calibration(run)["false_drops"].passed, "the published rule has no bound"


def test_copies_of_one_text_prove_no_more_than_the_text_itself(tmp_path: Path) -> None:
    from nmoe_core.calibration.thresholds import Targets, fit_thresholds

    judge = np.concatenate([np.linspace(0.1, 0.2, 10).repeat(30), np.linspace(0.3, 0.9, 200)])
    keeps = judge > 0.6
    is_first = np.zeros(len(judge), np.bool_)
    is_first[np.unique(judge, return_index=True)[1]] = True
    proved = fit_thresholds(None, judge, keeps, Targets(0.3, 0.02), is_first)
    copied = fit_thresholds(None, judge, keeps, Targets(0.3, 0.02))
    assert copied.tau_drop > 0
    assert proved.tau_drop == 0
    with pytest.raises(CalibrationError):
        fit_thresholds(None, judge, keeps, Targets(0.3, 0.02, 0.5), is_first)
