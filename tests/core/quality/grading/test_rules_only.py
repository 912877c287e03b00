"""`[grading] grader = "none"`: every document is kept, and nothing is labelled or scored."""

import pytest

from nmoe_core.cli import main
from nmoe_core.quality.calibration.graded import PARTIAL_NAMES
from nmoe_core.tasks.checks import check_grades
from tests.core.quality.grading.small_run import SETTINGS, nmoe, source_of
from tests.project import Project, read_rows, said, write_project
from tests.refusals import refused_line

UNSCORED = {"scores": None, "aggregated": None, "q_probe": None, "probe_scores": None}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    settings = SETTINGS | {"grading": {"grader": "none"}}
    made = write_project(tmp_path_factory.mktemp("unscored"), [source_of(90)], settings)
    nmoe(made, "prep-mixture")
    nmoe(made, "hydra grade")
    return made


def test_without_a_grader_each_document_is_kept_and_has_no_score(project: Project) -> None:
    shards = project.run.tree.shards("web", 2)
    rows = read_rows(*(shard.scores for shard in shards))
    documents = [read_rows(*shard.manifest.parent.glob("*.ids.jsonl")) for shard in shards]
    assert [len(read_rows(shard.scores)) for shard in shards] == list(map(len, documents))
    assert len({row["doc_id"] for row in rows}) == 90
    assert {row["decision"] for row in rows} == {"keep"}
    assert all(row.items() >= UNSCORED.items() for row in rows)
    assert all(row["doc_id"].startswith("web//web/train/shard_000") for row in rows)
    verdicts = check_grades(project.run, "web", [0, 1])
    assert {name: verdict.passed for name, verdict in verdicts.items()} == {"counts": True}


def test_grades_without_a_grader_are_made_once_and_again_where_they_were_edited(
    project: Project,
) -> None:
    shard = project.run.tree.shard("web", 0)
    before, made_at = shard.scores.read_bytes(), shard.scores.stat().st_mtime_ns
    lefts = [shard.graded / name for name in PARTIAL_NAMES]
    for left in lefts:
        left.touch()  # by a killed grading of other documents
    nmoe(project, "hydra grade")
    assert shard.scores.stat().st_mtime_ns == made_at
    assert not any(left.exists() for left in lefts)
    shard.scores.write_bytes(before.replace(b'"keep"', b'"drop"', 1))
    nmoe(project, "hydra grade")
    assert shard.scores.read_bytes() == before


def test_what_needs_scores_says_that_the_run_makes_none(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused_line(capsys, "hydra", "calibrate", "--config", str(project.config))
    assert "this run has no grader" in line
    doc_id = read_rows(project.run.tree.shard("web", 1).scores)[0]["doc_id"]
    assert said(capsys, "explain", doc_id, "--config", project.config)["grade"]["scores"] is None
    assert main(["explain", doc_id, "--config", str(project.config)]) == 0
    shown = capsys.readouterr().out
    assert "keep: not scored, the run has no grader" in shown
    assert "label" not in shown
    assert main(["plan", "--config", str(project.config)]) == 0
    assert "documents are not scored" in capsys.readouterr().out
