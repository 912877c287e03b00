"""Thresholds by language, from the languages of the shards."""

from pathlib import Path
from typing import Any

import pytest

from nmoe_core.base.docid import split_of
from nmoe_core.labels.scores import QUALITY
from nmoe_core.quality.calibration.summary_file import load_calibration, read_calibration
from nmoe_core.tasks.backbone import make_backbone
from nmoe_core.tasks.preview import plan_regrade
from tests.core.labels.oracles.server import JudgeServer
from tests.core.quality.grading.judged import answering, oracle_of
from tests.core.quality.grading.small_run import SETTINGS, TINY, nmoe
from tests.project import Project, jsonl_source, read_rows, said, write_project
from tests.refusals import refused_line

ENGLISH = "You can use the {n} books of this library because each of them explains one thing well."
GERMAN = "In dieser Bibliothek stehen {n} Bücher, von denen jedes eine einzige Sache gut erklärt."


def text(i: int) -> str:
    """English and German in turns, of 15 to 40 words."""
    return f"{(ENGLISH, GERMAN)[i % 2].format(n=i)} {'example ' * (i // 2 % 23)}".strip()


@pytest.fixture(scope="module")
def project(server: JudgeServer, tmp_path_factory: pytest.TempPathFactory) -> Project:
    rows = [{"id": f"d{i}", "text": text(i)} for i in range(2400)]
    answering(server, QUALITY)
    settings: dict[str, Any] = (
        SETTINGS
        | TINY
        | {
            "grading": {"grader": "student"},
            "attributes": {"use": ["language"]},
            "oracle": oracle_of(server, "quality_v1"),
            "calibration": {
                "max_false_drop": 0.5,
                "target_by": "language",
                "target_of": {"en": 0.3, "de": 0.7},
            },
        }
    )
    made = write_project(tmp_path_factory.mktemp("language"), [jsonl_source("web", rows)], settings)
    tasks = ("slices", "oracle-label", "merge-labels")
    for words in ("prep-mixture", *(f"hydra {task}" for task in tasks), "train student"):
        nmoe(made, words)
    return made


def test_each_language_has_thresholds_of_its_own_once_languages_are_there(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    tree, config = project.run.tree, str(project.config)
    line = refused_line(capsys, "hydra", "calibrate", "--config", config)
    assert "E-ATTRIBUTE-MISSING" in line
    assert "nmoe attributes --only language" in line
    nmoe(project, "attributes --only language")
    nmoe(project, "hydra calibrate")
    found = {row["group"]: row for row in read_calibration(tree.calibration_summary)["groups"]}
    nmoe(project, "hydra grade")
    rows = read_rows(*sorted(tree.quality.rglob("quality_scores.jsonl")))
    calibration = load_calibration(tree.calibration)
    assert {row["group"] for row in rows} >= {"en", "de"}
    for row in rows:
        assert row["decision"] == calibration.of(row["group"]).decide(row["aggregated"])
    for name, share in (("en", 0.3), ("de", 0.7)):
        own = [
            row["decision"] == "keep"
            for row in rows
            if row["group"] == name and split_of(row["doc_id"]) != "train"
        ]
        assert found[name]["has_own"]
        assert sum(own) / len(own) == pytest.approx(share, abs=0.15)
    facts = said(capsys, "explain", rows[0]["doc_id"], "--config", config)
    taus = calibration.of(rows[0]["group"])
    assert facts["thresholds"]["tau_keep"] == taus.tau_keep
    assert plan_regrade(project.run, ["web"]).shards == []
    tree.shard("web", 0).attribute("language").unlink()
    refused_line(capsys, "hydra", "grade", "--config", config, code="E-ATTRIBUTE-MISSING")
    nmoe(project, "attributes --only language")
    nmoe(project, "hydra grade")
    make_backbone(project.run)  # of whose table topics are made
    nmoe(project, "curate shards")
    assert sum(1 for _ in tree.curated.rglob("shard_*/manifest.json")) == 2


def test_other_targets_are_previewed_by_group_and_by_source_without_languages(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    by_source = (
        "hydra",
        "calibrate",
        "--config",
        str(project.config),
        "--set=calibration.target_by=source",
    )
    line = refused_line(capsys, *by_source, code="E-CALIBRATION-TARGET")
    assert "found de, en, expected one of web" in line
    text = project.config.read_text()
    shares = "[calibration.target_of]\nen = 0.3\nde = 0.7\n"
    assert shares in text
    text = text.replace(shares, "").replace('target_by = "language"', 'target_by = "source"')
    project.config.write_text(text)
    nmoe(project, "hydra calibrate")
    plan = plan_regrade(project.run, ["web"])
    assert plan.shards, "languages are no part of grades any more"
    nmoe(project, "hydra grade")
    rows = read_rows(*sorted(project.run.tree.quality.rglob("quality_scores.jsonl")))
    assert {row["group"] for row in rows} == {"web"}
    assert plan_regrade(project.run, ["web"]).shards == []


def test_targets_by_language_without_the_attribute_are_refused_at_once(tmp_path: Path) -> None:
    settings = SETTINGS | {"calibration": {"target_by": "language"}}
    made = write_project(tmp_path, [jsonl_source("web", [{"id": "1", "text": "a"}])], settings)
    with pytest.raises(Exception, match=r"in attributes\.use"):
        _ = made.run
