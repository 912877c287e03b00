from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nmoe_core.base.errors import CalibrationError
from nmoe_core.calibration.calibrate import calibrate_compat, calibrate_predictions
from nmoe_core.calibration.files import load_calibration
from nmoe_core.grading.grade import Grader
from nmoe_core.heads.files import save_head
from nmoe_core.heads.models import Judge, JudgeArch, Probe, ProbeArch
from nmoe_core.labels.scores import DIMENSIONS
from tests.core.quality import EOS, MAX_CTX, rows_of, write_labels


def summary_of(own: Any) -> dict[str, Any]:
    return json.loads((own.calibration / "calibration_summary.json").read_text())


def test_calibration_writes_what_users_know_and_does_no_work_twice(own: Any) -> None:
    path = own.calibration / "calibration_summary.json"
    summary = summary_of(own)
    assert set(summary["weights"].values()) == {0.2}
    assert summary["weights_source"].startswith("uniform")
    assert summary["tau_drop"] <= summary["tau_keep"]
    assert summary["count"] == len(own.rows)
    assert summary["count"] == summary["count_fit"] + summary["count_report"]
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
    assert own.calibrate().is_current
    assert (path.stat().st_mtime_ns, own.model.tokens_processed) == (before, tokens)


def test_thresholds_are_those_of_the_deployed_path(own: Any) -> None:
    """Grading the calibration's own documents gives the shares that its two halves say."""
    grader = Grader.load(own.model, own.heads, own.calibration, MAX_CTX, 16)
    rows = rows_of(grader, own.data, own.rows)
    summary = summary_of(own)
    num_kept = sum(row["decision"] == "keep" for row in rows)
    of_halves = (
        summary["achieved_keep_fit"] * summary["count_fit"],
        summary["achieved_keep"] * summary["count_report"],
    )
    assert num_kept == pytest.approx(sum(of_halves), abs=1e-3)


def test_predictions_as_grading_writes_them_calibrate_as_the_heads_do(
    own: Any, tmp_path: Path
) -> None:
    grader = Grader.load(own.model, own.heads, own.calibration, MAX_CTX, 32, False)
    path = tmp_path / "predictions.jsonl"
    rows = rows_of(grader, own.data, own.rows)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"target_keep": 0.4, "max_false_drop": 0.36}
    found = calibrate_predictions(own.labels, path, tmp_path / "out", **settings).summary
    assert abs(found["achieved_keep_fit"] - 0.4) <= 0.01
    assert found["heads_digest"] == ""
    assert found["left_out"] == {
        "label_failed": 0,
        "label_salvaged": 0,
        "without_prediction": 0,
        "not_finite": 0,
        "trained_on": None,
    }
    (tmp_path / "summary.json").write_text(
        json.dumps({"fingerprints": {"probe": grader.heads.probe_digest, "judge": "other"}})
    )
    named = calibrate_predictions(own.labels, path, tmp_path / "named", **settings).summary
    assert named["heads_digest"] not in ("", grader.heads.digest)
    with pytest.raises(CalibrationError) as refused:
        load_calibration(tmp_path / "named").require_heads(grader.heads.digest)
    assert refused.value.code == "E-CALIBRATION-HEADS"
    unnamed = load_calibration(tmp_path / "out")
    with pytest.raises(CalibrationError, match="not made from the scores of these heads"):
        unnamed.require_heads(grader.heads.digest)
    unnamed.require_heads(grader.heads.digest, compat=True)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"early_exit": True, "scores": None, "aggregated": 0.1}, "left at the probe"),
        ({"scores": None}, "neither scores nor aggregated"),
        ({"aggregated": 1.2}, "aggregated 1.2"),
        ({"scores": dict.fromkeys(DIMENSIONS, 4.5)}, "4.5"),
        ({"scores": {"density": 1}}, "density"),
        ({"aggregated": float("nan")}, "nan"),
    ],
)
def test_a_row_that_is_no_prediction_is_refused(tmp_path: Path, row: Any, why: str) -> None:
    labels, path = write_val(tmp_path, 0, 40, "plain")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[3] = {"doc_id": rows[3]["doc_id"]} | row
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    with pytest.raises(CalibrationError, match=why) as refused:
        calibrate_predictions(labels, path, tmp_path / "out")
    assert refused.value.code == "E-CALIBRATION-PREDICTIONS"
    assert not (tmp_path / "out").exists()


def scored_val(seed: int, count: int, kind: str) -> tuple[list[dict[str, Any]], np.ndarray]:
    """Predictions and oracle grades `[N, 5]` of documents of one latent quality."""
    rng = np.random.default_rng(seed)
    quality = rng.normal(size=count)
    judge, probe = (quality + rng.normal(0, 0.7, count) for _ in range(2))
    if kind == "skewed":
        judge = 1 / (1 + np.exp(-judge)) ** 6
    elif kind == "tied":
        judge = np.clip(np.rint(2 * judge + 4), 0, 9) / 9
    else:
        judge = 0.5 + 0.1 * judge
    probe = 0.5 + 0.1 * probe
    rows = [
        {"doc_id": f"{seed}-{i}", "aggregated": round(float(np.clip(a, 0, 1)), 6), "q_probe": p}
        for i, (a, p) in enumerate(zip(judge, np.clip(probe, 0, 1).round(6).tolist()))
    ]
    noise = rng.normal(0, 0.5, (count, 5))
    return rows, np.clip(np.rint(quality[:, None] + 2 + noise), 0, 4)


@pytest.mark.parametrize("count", [40, 2000])
@pytest.mark.parametrize("kind", ["skewed", "tied", "plain"])
def test_the_share_kept_of_new_documents_is_in_the_interval_in_93_of_100_trials(
    kind: str, count: int
) -> None:
    """200 trials, each against 20,000 documents that were not there when it was fitted."""
    from nmoe_core.calibration.measures import Aggregates, decisions
    from nmoe_core.calibration.summary import keep_interval
    from nmoe_core.calibration.thresholds import Targets, fit_thresholds, would_keep

    population, population_grades = scored_val(10**6, 20_000, kind)
    known = _arrays(population, population_grades)
    hits = targets_hit = 0
    for trial in range(200):
        rows, grades = scored_val(trial, count, kind)
        scores = _arrays(rows, grades)
        target = (0.1, 0.3, 0.5, 0.8)[trial % 4]
        fit, report = slice(0, count // 2), slice(count // 2, count)
        a, b = (Aggregates(*(x[half] for x in scores)) for half in (fit, report))
        taus = fit_thresholds(
            a.probe, a.judge, a.oracle >= would_keep(a.oracle, target), Targets(target, 0.02)
        )
        assert 0 <= taus.tau_drop <= taus.tau_keep <= 1
        kept = [decisions(half, taus) == 2 for half in (a, b)]
        low, high = keep_interval(*kept)
        assert count < 2000 or (high - low) / 2 <= 0.03
        share = (decisions(Aggregates(*known), taus) == 2).mean()
        hits += low <= share <= high
        targets_hit += low <= target <= high
    assert hits >= 186
    assert kind == "tied" or targets_hit >= 186, "a tie can only be kept whole"


def _arrays(rows: list[dict[str, Any]], grades: np.ndarray) -> tuple[np.ndarray, ...]:
    probe = np.array([row["q_probe"] for row in rows])
    judge = np.array([row["aggregated"] for row in rows])
    return probe, judge, np.round(grades.mean(axis=1) / 4, 6)


def write_val(tmp_path: Path, seed: int, count: int, kind: str) -> tuple[Path, Path]:
    rows, grades = scored_val(seed, count, kind)
    path = tmp_path / "predictions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    ids = [(row["doc_id"], "web") for row in rows]
    return write_labels(tmp_path / "labels_val.jsonl", ids, grades), path


def test_what_is_said_of_the_thresholds_is_true_of_new_documents(tmp_path: Path) -> None:
    labels, predictions = write_val(tmp_path, 3, 4000, "plain")
    summary = calibrate_predictions(labels, predictions, tmp_path, max_false_drop=0.05).summary
    assert 0 < summary["tau_probe"] < summary["tau_keep"], "the probe lets documents leave"
    assert 0 < summary["tau_drop"] < summary["tau_keep"], "a band lies between"
    assert min(summary[f"achieved_{d}"] for d in ("drop", "band", "keep")) > 0.02
    assert summary["probe_false_drop_rate"] <= 0.05
    rows, grades = scored_val(10**6, 20_000, "plain")
    probe, judge, oracle = _arrays(rows, grades)
    exits = probe < summary["tau_probe"]
    kept = ~exits & (judge >= summary["tau_keep"])
    worth = oracle >= summary["oracle_tau_keep"]
    low, high = summary["achieved_keep_ci95"]
    assert low <= kept.mean() <= high
    assert worth[exits].mean() <= 0.05
    assert worth[exits | (judge < summary["tau_drop"])].mean() <= 0.05
    low, high = summary["precision_keep_ci95"]
    assert low <= worth[kept].mean() <= high
    assert summary["ece_keep"] < 0.06
    low, high = summary["achieved_keep_ci95"]
    assert low <= summary["target_keep"] <= high
    assert summary["decision_kappa"] > 0.2
    assert summary["heads"]["judge"]["spearman_ci95"][0] > 0.5


def test_the_halves_do_not_depend_on_the_order_of_the_labels(tmp_path: Path) -> None:
    labels, predictions = write_val(tmp_path, 5, 300, "plain")
    first = calibrate_predictions(labels, predictions, tmp_path / "a").summary
    for path in (labels, predictions):
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(reversed(lines)))
    again = calibrate_predictions(labels, predictions, tmp_path / "b").summary
    for key in ("tau_probe", "tau_drop", "tau_keep", "achieved_keep", "count_fit"):
        assert first[key] == again[key]


def test_a_share_to_drop_is_dropped_as_asked(tmp_path: Path) -> None:
    labels, predictions = write_val(tmp_path, 7, 1200, "plain")
    for drop in (0.0, 0.3):
        summary = calibrate_predictions(
            labels, predictions, tmp_path / str(drop), target_drop=drop, max_false_drop=0.2
        ).summary
        assert summary["achieved_drop"] == pytest.approx(drop, abs=0.06)
        assert summary["achieved_band"] == pytest.approx(0.5 - drop, abs=0.06)


def test_documents_that_the_heads_were_trained_on_are_left_out(own: Any) -> None:
    from nmoe_core.heads.features import content_digests, read_documents
    from nmoe_core.shards.documents import DocumentReader

    ids = [doc_id for doc_id, _ in own.rows[:30]]
    reader = DocumentReader(own.data)
    documents = read_documents(reader, ids, EOS, MAX_CTX)
    torch.manual_seed(0)
    judge = Judge(JudgeArch(32, 16, 4, 32))
    header = {"backbone": {"digest": own.model.digest}, "max_ctx": MAX_CTX}
    save_head(own.heads / "hydra_judge.safetensors", judge, header, content_digests(documents))
    summary = own.calibrate().summary
    assert summary["left_out"]["trained_on"] == 30
    assert summary["count"] == len(own.rows) - 30


def test_an_independent_target_in_the_labels_sets_the_weights(own: Any) -> None:
    rng = np.random.default_rng(1)
    grades = rng.integers(0, 5, (len(own.rows), 5))
    targets = (grades / 4 @ np.array([0.6, 0.4, 0, 0, 0])).tolist()
    own.labels = write_labels(own.labels, own.rows, grades, target=targets)
    summary = own.calibrate().summary
    assert list(summary["weights"].values()) == pytest.approx([0.6, 0.4, 0, 0, 0], abs=1e-6)
    assert "target" in summary["weights_source"]


def test_too_few_documents_constant_scores_failed_labels_and_odd_targets_are_refused(
    own: Any,
) -> None:
    path = own.calibration / "calibration_summary.json"
    payload = path.read_bytes()

    def code_of(**more: Any) -> str:
        with pytest.raises(CalibrationError) as refused:
            own.calibrate(**more)
        assert path.read_bytes() == payload
        return refused.value.code

    odd = ({"target_keep": 0.0}, {"target_keep": 1.0}, {"max_false_drop": 1.0})
    for targets in (*odd, {"target_keep": 0.5, "target_drop": 0.6}):
        assert code_of(**targets) == "E-CALIBRATION-TARGET"
    labels = own.labels
    grades = np.random.default_rng(0).integers(0, 5, (len(own.rows), 5))
    own.labels = write_labels(own.base / "few.jsonl", own.rows[:19], grades)
    assert code_of() == "E-CALIBRATION-FEW"
    garbage = [i % 3 == 0 for i in range(len(own.rows))]
    own.labels = write_labels(own.base / "bad.jsonl", own.rows, grades, ok=garbage)
    assert code_of() == "E-CALIBRATION-COVERAGE"
    own.labels = write_labels(own.base / "none.jsonl", own.rows, grades, ok=[False] * len(own.rows))
    assert code_of() == "E-CALIBRATION-COVERAGE"
    own.labels = labels
    torch.manual_seed(0)
    dead = Probe(ProbeArch(32))
    torch.nn.init.zeros_(dead.proj.weight)
    header = {"backbone": {"digest": own.model.digest}, "max_ctx": MAX_CTX}
    save_head(own.heads / "hydra_probe.safetensors", dead, header)
    assert code_of() == "E-CALIBRATION-CONSTANT"


def test_the_published_rule_is_reproduced_number_for_number(tmp_path: Path) -> None:
    grades = np.random.default_rng(0).integers(0, 5, (500, 5))
    rows = [(f"d{i}", "web") for i in range(500)]
    labels = write_labels(tmp_path / "labels_val.jsonl", rows, grades)
    aggregated = grades.mean(axis=1) / 4
    for target in (0.5, 0.7):
        summary = calibrate_compat(labels, tmp_path / "out", target).summary
        assert list(summary["weights"].values()) == pytest.approx([0.2] * 5)
        assert summary["tau_drop"] == pytest.approx(np.quantile(aggregated, 1 - target))
        assert summary["tau_keep"] == pytest.approx(np.quantile(aggregated, target))
        assert summary["count"] == 500
        loaded = load_calibration(tmp_path / "out")
        assert loaded.thresholds.tau_probe == loaded.thresholds.tau_drop
        loaded.require_heads("any, as the rule does not know the heads", compat=True)
    assert calibrate_compat(labels, tmp_path / "out", 0.3).summary["tau_drop"] > 0.5
    with pytest.raises(CalibrationError) as crossed:
        load_calibration(tmp_path / "out")
    assert crossed.value.code == "E-CALIBRATION-FORMAT"
