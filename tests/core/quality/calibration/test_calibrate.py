"""The summary: what it says is true of new documents, and what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nmoe_core.labels.scores import QUALITY
from nmoe_core.quality.calibration.calibrate import calibrate_compat, calibrate_predictions
from nmoe_core.quality.calibration.measures import Aggregates
from nmoe_core.quality.calibration.shares import keep_interval
from nmoe_core.quality.calibration.summary_file import load_calibration, read_calibration
from nmoe_core.quality.calibration.targets import Targets
from nmoe_core.quality.heads.models import Probe
from nmoe_core.quality.heads.shapes import ProbeArch
from tests.core.quality.calibration.scored import fit, scored, summary_of, write_rows, write_val
from tests.core.small_gradings import Grading, write_head, write_labels
from tests.project import read_rows
from tests.refusals import refused


def test_calibration_writes_what_users_know_and_does_no_work_twice(own: Grading) -> None:
    path = own.calibration / "calibration_summary.json"
    summary = read_calibration(path)
    assert set(summary["weights"].values()) == {0.2}
    assert summary["weights_source"].startswith("uniform")
    assert summary["tau_drop"] <= summary["tau_keep"]
    assert summary["count"] == len(own.rows) == summary["count_fit"] + summary["count_report"]
    assert abs(summary["achieved_keep_fit"] - 0.4) <= 0.01
    low, high = summary["achieved_keep_ci95"]
    assert low < summary["achieved_keep"] < high
    assert summary["scorer_model"] == "fake"
    assert len(summary["keep_curve"]) == 99
    shares = [summary[f"achieved_{name}"] for name in ("drop", "band", "keep")]
    assert sum(shares) == pytest.approx(1, abs=3e-6)
    assert {"judge", "probe", "baselines", "probe_with_judge"} == set(summary["heads"])
    before = path.stat().st_mtime_ns
    tokens = own.model.tokens_processed
    left = path.with_name(f"{path.name}.tmp.4194305")  # by a killed run over other labels
    left.touch()
    assert own.calibrate() == summary
    assert (path.stat().st_mtime_ns, own.model.tokens_processed) == (before, tokens)
    assert not left.exists()


def test_predictions_as_grading_writes_them_calibrate_as_the_heads_do(
    own: Grading, tmp_path: Path
) -> None:
    heads = own.scorer().heads
    rows = own.rows_of(own.rows, batch_size=32, early_exit=False)
    paths = own.labels, write_rows(tmp_path / "predictions.jsonl", rows)
    settings = {"target_keep": 0.4, "max_false_drop": 0.36}
    found = summary_of(paths, tmp_path / "out", **settings)
    assert abs(found["achieved_keep_fit"] - 0.4) <= 0.01
    assert found["heads_digest"] == ""
    none = ("label_failed", "label_salvaged", "without_prediction", "not_finite")
    assert found["left_out"] == {**dict.fromkeys(none, 0), "trained_on": None}
    made_from = {"fingerprints": {"probe": heads.probe_digest, "judge": "other"}}
    (tmp_path / "summary.json").write_text(json.dumps(made_from))
    named = summary_of(paths, tmp_path / "named", **settings)
    assert named["heads_digest"] not in ("", heads.digest)
    with refused("E-CALIBRATION-HEADS"):
        load_calibration(tmp_path / "named").require_heads(heads.digest)
    unnamed = load_calibration(tmp_path / "out")
    with refused("E-CALIBRATION-HEADS", "does not name the heads for which it was fitted"):
        unnamed.require_heads(heads.digest)
    unnamed.require_heads(heads.digest, allow_foreign=True)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"early_exit": True, "scores": None, "aggregated": 0.1}, "the probe dropped"),
        ({"scores": None}, "neither scores nor aggregated"),
        ({"aggregated": 1.2}, "aggregated 1.2"),
        ({"scores": dict.fromkeys(QUALITY.names, 4.5)}, "4.5"),
        ({"scores": {"density": 1}}, "density"),
        ({"aggregated": float("nan")}, "nan"),
        ({"aggregated": 0.5}, "some rows have probe scores"),
        ({"doc_id": 3}, "line 4: "),
        ({"doc_id": "d1", "aggregated": 0.5}, "document d1 occurs twice"),
    ],
)
def test_a_row_that_is_no_prediction_is_refused(tmp_path: Path, row: Any, why: str) -> None:
    labels, path = write_val(tmp_path, scored(0, 40))
    rows = read_rows(path)
    rows[3] = {"doc_id": rows[3]["doc_id"]} | row
    write_rows(path, rows)
    with refused("E-CALIBRATION-PREDICTIONS", why):
        calibrate_predictions(labels, path, tmp_path / "out", Targets())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("count", [40, 2000])
@pytest.mark.parametrize("kind", ["skewed", "tied", "plain"])
def test_the_share_kept_of_new_documents_is_in_the_interval_in_93_of_100_trials(
    kind: str, count: int
) -> None:
    """200 trials, each against 20,000 documents that were not there when it was fitted."""
    fresh, keys = Aggregates(*scored(10**6, 20_000, kind=kind)), np.arange(count)
    hits = targets_hit = 0
    for trial in range(200):
        scores = scored(trial, count, kind=kind)
        target = (0.1, 0.3, 0.5, 0.8)[trial % 4]
        halves = slice(0, count // 2), slice(count // 2, count)
        a, b = (type(scores)(*(x[half] for x in scores[:3])) for half in halves)
        taus = fit(a, target, 0.02)
        assert 0 <= taus.tau_drop <= taus.tau_keep <= 1
        kept = (Aggregates(*half).decisions(taus) == 2 for half in (a, b))
        low, high = keep_interval(*kept, keys)
        assert count < 2000 or (high - low) / 2 <= 0.03
        hits += low <= (fresh.decisions(taus) == 2).mean() <= high
        targets_hit += low <= target <= high
    assert hits >= 186
    assert kind == "tied" or targets_hit >= 186, "a tie can only be kept whole"


def test_figures_of_the_thresholds_hold_on_new_documents(tmp_path: Path) -> None:
    noise = 0.5, 0.5
    summary = summary_of(write_val(tmp_path, scored(3, 4000, noise)), tmp_path, max_false_drop=0.05)
    assert 0 < summary["tau_probe"] < summary["tau_keep"], "the probe lets documents leave"
    assert 0 < summary["tau_drop"] < summary["tau_keep"], "a band lies between"
    assert min(summary[f"achieved_{d}"] for d in ("drop", "band", "keep")) > 0.02
    assert summary["probe_false_drop_rate"] <= 0.05
    probe, judge, oracle = scored(10**6, 20_000, noise)[:3]
    exits = probe < summary["tau_probe"]
    kept = ~exits & (judge >= summary["tau_keep"])
    worth = oracle >= summary["oracle_tau_keep"]
    assert worth[exits].mean() <= 0.05
    assert worth[exits | (judge < summary["tau_drop"])].mean() <= 0.05
    low, high = summary["precision_keep_ci95"]
    assert low <= worth[kept].mean() <= high
    low, high = summary["achieved_keep_ci95"]
    assert low <= kept.mean() <= high
    assert low <= summary["target_keep"] <= high
    assert summary["ece_keep"] < 0.06
    assert summary["decision_kappa"] > 0.2
    assert summary["heads"]["judge"]["spearman_ci95"][0] > 0.5


def test_the_halves_do_not_depend_on_the_order_of_the_labels(tmp_path: Path) -> None:
    paths = write_val(tmp_path, scored(5, 300))
    first = summary_of(paths, tmp_path / "a")
    for path in paths:
        path.write_text("".join(reversed(path.read_text().splitlines(keepends=True))))
    again = summary_of(paths, tmp_path / "b")
    same = {"tau_probe", "tau_drop", "tau_keep", "achieved_keep", "count_fit"}
    assert {key: first[key] for key in same} == {key: again[key] for key in same}


def test_an_independent_target_in_the_labels_sets_the_weights(own: Grading) -> None:
    rng = np.random.default_rng(1)
    grades = rng.integers(0, 5, (len(own.rows), 5))
    targets = (grades / 4 @ np.array([0.6, 0.4, 0, 0, 0])).tolist()
    own.labels = write_labels(own.labels, own.rows, grades, target=targets)
    summary = own.calibrate()
    assert list(summary["weights"].values()) == pytest.approx([0.6, 0.4, 0, 0, 0], abs=1e-6)
    assert "target" in summary["weights_source"]


def test_too_few_documents_constant_scores_failed_labels_and_odd_targets_are_refused(
    own: Grading,
) -> None:
    path = own.calibration / "calibration_summary.json"
    payload = path.read_bytes()

    def is_refused(code: str, **targets: Any) -> None:
        with refused(code):
            own.calibrate(**targets)
        assert path.read_bytes() == payload

    odd = ({"target_keep": 0.0}, {"target_keep": 1.0}, {"max_false_drop": 1.0})
    for targets in (*odd, {"target_keep": 0.5, "target_drop": 0.6}):
        is_refused("E-CALIBRATION-TARGET", **targets)
    labels, count = own.labels, len(own.rows)
    grades = np.random.default_rng(0).integers(0, 5, (count, 5))
    own.labels = write_labels(own.base / "few.jsonl", own.rows[:19], grades)
    is_refused("E-CALIBRATION-FEW")
    for parsed in ([i % 3 == 0 for i in range(count)], [False] * count):
        own.labels = write_labels(own.base / "bad.jsonl", own.rows, grades, ok=parsed)
        is_refused("E-LABEL-COVERAGE")
    own.labels = labels
    dead = Probe(ProbeArch(32))
    torch.nn.init.zeros_(dead.proj.weight)
    write_head(own.heads, dead, own.model)
    is_refused("E-CALIBRATION-CONSTANT")


def test_the_published_rule_is_reproduced_number_for_number(tmp_path: Path) -> None:
    grades = np.random.default_rng(0).integers(0, 5, (500, 5))
    rows = [(f"d{i}", "web") for i in range(500)]
    labels = write_labels(tmp_path / "labels_val.jsonl", rows, grades)
    aggregated = grades.mean(axis=1) / 4
    for target in (0.5, 0.7):
        calibrate_compat(labels, tmp_path, target)
        summary = read_calibration(tmp_path / "calibration_summary.json")
        assert list(summary["weights"].values()) == pytest.approx([0.2] * 5)
        assert summary["tau_drop"] == pytest.approx(np.quantile(aggregated, 1 - target))
        assert summary["tau_keep"] == pytest.approx(np.quantile(aggregated, target))
        assert summary["count"] == 500
        loaded = load_calibration(tmp_path)
        assert loaded.thresholds.tau_probe == loaded.thresholds.tau_drop
        loaded.require_heads("any, as the rule does not know the heads", allow_foreign=True)
    assert calibrate_compat(labels, tmp_path, 0.3).facts["tau_drop"] > 0.5
    # Targets that no score explains: least squares gives no weight, so all are equal.
    write_labels(labels, rows, grades, target=[0.0] * 500)
    facts = calibrate_compat(labels, tmp_path, 0.7).facts
    assert facts["tau_drop"] == pytest.approx(np.quantile(aggregated, 0.3))
    calibrate_compat(labels, tmp_path, 0.3)
    with refused("E-CALIBRATION-FORMAT"):
        load_calibration(tmp_path)
