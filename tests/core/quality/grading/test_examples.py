"""`nmoe hydra review`: labelled documents are read, and a person corrects one."""

import json
from pathlib import Path

import pytest

from nmoe_core.labels.corrections import corrected, read_corrections
from nmoe_core.labels.label_files import read_labels
from nmoe_core.labels.oracle import is_salvaged
from tests.core.quality.grading.small_run import SETTINGS, labelled_run, nmoe
from tests.project import Project, json_lines, read_rows, said
from tests.refusals import refused_line


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    made = labelled_run(tmp_path_factory.mktemp("look"), 300, SETTINGS)
    nmoe(made, "train student")
    return made


def test_labels_are_shown_with_the_text_that_was_judged_and_the_worst_disagreements_first(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    look = ("hydra", "review", "--config", project.config)
    shown = said(capsys, *look, "--documents", "4")
    labels = {row["doc_id"]: row for row in read_rows(project.run.tree.merged_labels("val"))}
    assert len(shown) == 4
    for row in shown:
        assert row["scores"] == labels[row["doc_id"]]["scores"]
        assert row["text"].startswith(labels[row["doc_id"]]["snippet"][:40])
    worst = said(capsys, *look, "--kind", "disagreements", "--documents", "6")
    gaps = [abs(row["student"] - row["aggregated"]) for row in worst]
    assert gaps == sorted(gaps, reverse=True)
    assert said(capsys, *look, "--kind", "failures") == []
    assert said(capsys, *look, "--kind", "corrected") == []
    assert said(capsys, *look, "--source", "none") == []
    line = refused_line(capsys, *map(str, look), "--kind", "disagreements", "--split", "train")
    assert "E-LABEL-MIXED" in line


def test_a_correction_is_merged_with_its_origin_for_every_document_of_the_text(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    tree, look = project.run.tree, ("hydra", "review", "--config", project.config)
    path = tree.merged_labels("val")
    before = read_rows(path)
    doc_id, was = before[0]["doc_id"], before[0]["scores"]
    grade = (was["density"] + 1) % 5
    asked = ("--correct", doc_id, "--scores", f"density={grade}", "--by", "mara", "--note", "why")
    (made,) = said(capsys, *look, *asked)
    assert made["scores"] == was | {"density": grade}
    assert read_rows(path) == before, "until labels are merged again"
    nmoe(project, "hydra merge-labels")
    after = read_rows(path)
    assert after[0]["scores"] == made["scores"]
    assert after[0]["aggregated"] == pytest.approx(sum(made["scores"].values()) / 20)
    told = after[0]["corrected"]
    assert (told["by"], told["note"], told["was"]) == ("mara", "why", was)
    assert [row for row in after if "corrected" not in row] == before[1:]
    assert read_labels(path).scores[0].tolist() == list(made["scores"].values())
    (shown,) = said(capsys, *look, "--kind", "corrected")
    assert shown["doc_id"] == doc_id
    assert shown["corrected"]["was"] == was, "not the corrected scores"
    line = refused_line(capsys, *map(str, look), "--kind", "disagreements")
    assert "run nmoe train student" in line, "it was reported on the labels as they were"
    # A person's last correction counts, and a second one starts from the first.
    again = ("--correct", doc_id, "--scores", "coherence=4", "--by", "mara")
    (second,) = said(capsys, *look, *again)
    assert second["scores"] == made["scores"] | {"coherence": 4}
    nmoe(project, "hydra merge-labels")
    merged = read_rows(path)[0]
    assert merged["scores"] == second["scores"]
    assert (merged["corrected"]["by"], merged["corrected"]["note"]) == ("mara", "")
    assert merged["corrected"]["was"] == was
    corrections = read_corrections(tree)
    assert corrected(before[0], corrections) == merged
    other = before[0] | {"rubric_hash": "of another rubric"}
    assert corrected(other, corrections) == other


def test_a_failed_label_gets_scores_and_labels_made_again_keep_them(tmp_path: Path) -> None:
    project = labelled_run(tmp_path, 120, SETTINGS)
    shard = next(iter(sorted((project.run.tree.labels / "train").glob("shard_*/scores.jsonl"))))
    doc_id = read_rows(shard)[0]["doc_id"]
    scores = [f"{name}=3" for name in project.run.rubric.dimensions]
    nmoe(project, "hydra review", "--correct", doc_id, "--scores", *scores, "--by", "mara")
    for words in ("hydra oracle-label", "hydra merge-labels"):
        nmoe(project, words)
    found = {row["doc_id"]: row for row in read_rows(project.run.tree.merged_labels("train"))}
    assert set(found[doc_id]["scores"].values()) == {3}
    assert not is_salvaged(found[doc_id])
    assert read_rows(shard)[0].get("corrected") is None, "the oracle's own label stays"


def test_a_correction_of_another_rubrics_failed_label_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    project = labelled_run(tmp_path, 40, SETTINGS)
    path = next(iter(sorted((project.run.tree.labels / "train").glob("shard_*/scores.jsonl"))))
    rows = read_rows(path)
    failed = {key: rows[0][key] for key in rows[0].keys() - {"scores", "aggregated"}}
    path.write_text(json_lines([failed | {"ok": False, "raw": "?", "answered": True}, *rows[1:]]))
    review = ("hydra", "review", "--config", str(project.config), "--by", "mara")
    asked = (*review, "--correct", failed["doc_id"], "--scores", "education=3")
    line = refused_line(capsys, *asked, "--set", "oracle.rubric=education_v1")
    assert "E-LABEL-MIXED" in line
    assert not (project.run.tree.labels / "corrections.jsonl").exists()


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (("--scores", "density=5"), "E-LABEL-SCORES"),
        (("--scores", "density"), "E-LABEL-SCORES"),
        (("--scores", "depth=1"), "E-LABEL-SCORES"),
        ((), "--scores"),
    ],
)
def test_a_correction_that_is_none_is_refused_and_nothing_is_written(
    project: Project, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], code: str
) -> None:
    tree = project.run.tree
    file = tree.labels / "corrections.jsonl"
    before = file.read_bytes() if file.is_file() else None
    doc_id = read_rows(tree.merged_labels("val"))[1]["doc_id"]
    asked = ("hydra", "review", "--config", str(project.config), "--by", "jo", "--correct")
    assert code in refused_line(capsys, *asked, doc_id, *flags)
    line = refused_line(capsys, *asked, "web//x#s=0:e=2", "--scores", "density=1")
    assert "E-LABEL-MISSING" in line
    assert (file.read_bytes() if file.is_file() else None) == before


def test_a_damaged_line_of_corrections_is_named(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    file = project.run.tree.labels / "corrections.jsonl"
    before = file.read_bytes() if file.is_file() else b""
    file.write_bytes(before + json.dumps({"doc_id": "x"}).encode() + b"\n")
    try:
        number = before.count(b"\n") + 1
        line = refused_line(capsys, "hydra", "merge-labels", "--config", str(project.config))
        assert "E-LABEL-CORRUPT" in line
        assert f"corrections.jsonl:{number}" in line
    finally:
        file.write_bytes(before)
