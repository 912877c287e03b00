from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from nmoe_core.docid import DocumentReader
from nmoe_core.errors import CalibrationError
from nmoe_core.hydra.grade import Grader
from nmoe_core.hydra.head_files import save_head
from nmoe_core.hydra.heads import Probe, ProbeArch


def test_calibration_writes_what_users_know_and_does_no_work_twice(own: Any) -> None:
    path = own.calibration / "calibration_summary.json"
    summary = json.loads(path.read_text())
    assert set(summary["weights"].values()) == {0.2}
    assert summary["weights_source"].startswith("uniform")
    assert summary["tau_drop"] <= summary["tau_keep"]
    assert summary["count"] == len(own.rows)
    assert abs(summary["achieved_keep"] - 0.4) <= 0.01
    assert summary["false_drop_rate"] <= 0.36
    assert summary["scorer_model"] == "fake"
    assert len(summary["keep_curve"]) == 99
    before = path.stat().st_mtime_ns
    tokens = own.model.tokens_processed
    assert own.calibrate().is_current
    assert (path.stat().st_mtime_ns, own.model.tokens_processed) == (before, tokens)


def test_thresholds_are_those_of_the_deployed_path(own: Any) -> None:
    """Grading the calibration's own documents keeps the share that it says it keeps."""
    grader = Grader.load(own.model, own.heads, own.calibration, own.world.MAX_CTX, 16)
    ids = [doc_id for doc_id, _ in own.rows]
    rows = list(grader.rows(DocumentReader(own.data), ids, "all", own.world.EOS))
    summary = json.loads((own.calibration / "calibration_summary.json").read_text())
    shares = {d: np.mean([r["decision"] == d for r in rows]) for d in ("keep", "drop")}
    assert shares["keep"] == pytest.approx(summary["achieved_keep"], abs=1e-6)
    assert shares["drop"] == pytest.approx(summary["achieved_drop"], abs=1e-6)
    exits = np.mean([r["early_exit"] for r in rows])
    assert exits == pytest.approx(summary["early_exit_rate"], abs=1e-6)


def test_an_independent_target_in_the_labels_sets_the_weights(own: Any) -> None:
    rng = np.random.default_rng(1)
    grades = rng.integers(0, 5, (len(own.rows), 5))
    targets = (grades / 4 @ np.array([0.6, 0.4, 0, 0, 0])).tolist()
    own.labels = own.world.write_labels(own.labels, own.rows, grades, target=targets)
    summary = own.calibrate().summary
    assert list(summary["weights"].values()) == pytest.approx([0.6, 0.4, 0, 0, 0], abs=1e-6)
    assert "target" in summary["weights_source"]


def test_too_few_documents_constant_scores_and_odd_targets_are_refused(own: Any) -> None:
    path = own.calibration / "calibration_summary.json"
    payload = path.read_bytes()

    def code_of(**more: Any) -> str:
        with pytest.raises(CalibrationError) as refused:
            own.calibrate(**more)
        assert path.read_bytes() == payload
        return refused.value.code

    for odd in ({"target_keep": 0.0}, {"target_keep": 1.0}, {"max_false_drop": 1.0}):
        assert code_of(**odd) == "E-CALIBRATION-TARGET"
    labels = own.labels
    grades = np.random.default_rng(0).integers(0, 5, (19, 5))
    own.labels = own.world.write_labels(own.base / "few.jsonl", own.rows[:19], grades)
    assert code_of() == "E-CALIBRATION-FEW"
    own.labels = labels
    torch.manual_seed(0)
    dead = Probe(ProbeArch(32))
    torch.nn.init.zeros_(dead.proj.weight)
    header = {"backbone": {"digest": own.model.digest}, "max_ctx": own.world.MAX_CTX}
    save_head(own.heads / "hydra_probe.safetensors", dead, header)
    assert code_of() == "E-CALIBRATION-CONSTANT"
