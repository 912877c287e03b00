"""Triage in three steps: documents leave at the student, at the probe, or are judged."""

import json
from typing import Any

import numpy as np
import pytest

from loader.files.checksummed_json import sealed
from nmoe_core.base.fingerprint import sha256_file
from nmoe_core.labels.scores import QUALITY
from nmoe_core.quality.calibration.summary_file import load_calibration, read_calibration
from nmoe_core.quality.heads.metrics import document_lengths
from nmoe_core.tasks.preview import plan_regrade
from tests.core.quality.grading.small_run import TINY, labelled_run, nmoe
from tests.project import Project, read_rows, said
from tests.refusals import refused_line

pytest.importorskip("torch")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A graded run of so few labels that they prove no early exit."""
    made = labelled_run(tmp_path_factory.mktemp("triage"), 300, TINY)
    for words in ("train probe", "train judge", "hydra calibrate", "hydra grade"):
        nmoe(made, words)
    return made


def rows_of(project: Project) -> dict[str, dict[str, Any]]:
    found = read_rows(*sorted(project.run.tree.quality.rglob("quality_scores.jsonl")))
    return {row["doc_id"]: row for row in found}


def part(project: Project, **changes: Any) -> None:
    """Thresholds that send documents every way, and the digest of the student they are for."""
    path = project.run.tree.calibration_summary
    path.write_text(json.dumps(sealed(read_calibration(path) | changes)))


def test_a_student_at_which_nothing_leaves_is_no_part_of_the_grades(project: Project) -> None:
    summary = read_calibration(project.run.tree.calibration_summary)
    assert summary["tau_student"] == 0
    assert [row["step"] for row in summary["triage"]] == ["student", "probe", "judge"]
    assert "student" in summary["fingerprints"], "it was asked"
    assert load_calibration(project.run.tree.calibration).student_digest == ""
    paths = project.run.tree.quality.rglob("summary.json")
    grades = [json.loads(path.read_text()) for path in paths]
    assert grades
    assert all("student" not in grade["fingerprints"] for grade in grades)
    assert all("q_student" not in row for row in rows_of(project).values())


def test_documents_that_leave_at_the_student_never_reach_the_backbone(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    judged, tree = rows_of(project), project.run.tree
    first = read_calibration(tree.calibration_summary)
    part(project, tau_student=1e-6, student_digest=sha256_file(tree.student))
    nmoe(project, "hydra grade")
    values = {doc_id: row["q_student"] for doc_id, row in rows_of(project).items()}
    tau = float(np.median(list(values.values())))
    taus = {f"tau_{name}": max(tau, first["tau_keep"]) for name in ("probe", "drop", "keep")}
    part(project, tau_student=tau, **taus)
    assert plan_regrade(project.run, ["web"]).may_flip[0] > 0
    capsys.readouterr()
    facts = said(capsys, "hydra", "grade", "--config", project.config)
    found = rows_of(project)
    leave = {doc_id for doc_id, value in values.items() if value < tau}
    assert len(found) // 3 < len(leave) < len(found)
    for doc_id, row in found.items():
        assert row["q_student"] == values[doc_id]
        assert (row["q_probe"] is None) == (doc_id in leave)
        if doc_id in leave:
            assert (row["decision"], row["early_exit"], row["scores"]) == ("drop", True, None)
            assert row["aggregated"] == row["q_student"]
        else:
            before = QUALITY.vector(judged[doc_id]["probe_scores"])
            assert QUALITY.vector(row["probe_scores"]) == pytest.approx(before, abs=1e-4)
    stay = [doc_id for doc_id in found if doc_id not in leave]
    most = 2 * np.minimum(document_lengths(stay), 16).sum()  # once to the probe, once to the judge
    assert 0 < sum(one["backbone_tokens"] for one in facts.values()) <= most
    exits = sum(one["early_exits"] for one in facts.values())
    assert exits == sum(row["early_exit"] for row in found.values())
    assert plan_regrade(project.run, ["web"]).shards == []
    nmoe(project, "explain", next(iter(leave)))
    assert "dropped by the student" in capsys.readouterr().out


def test_thresholds_of_another_student_are_refused_unless_no_document_may_leave(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    part(project, tau_student=0.1, student_digest="0" * 64)
    words = ("hydra", "grade", "--config", str(project.config))
    refused_line(capsys, *words, code="E-CALIBRATION-HEADS")
    assert "with another student" in (plan_regrade(project.run, ["web"]).problem or "")
    nmoe(project, "hydra grade", "--set=grading.early_exit=false")
    assert not any(row["early_exit"] for row in rows_of(project).values())
