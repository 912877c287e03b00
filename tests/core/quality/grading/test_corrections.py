"""Several people correct labels, see how far they agree, and withdraw a correction."""

from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest

from nmoe_core.base.intervals import alpha
from nmoe_core.labels.label_files import read_labels
from tests.core.quality.grading.small_run import SETTINGS, labelled_run, nmoe
from tests.project import Project, json_lines, read_rows, said
from tests.refusals import refused_line


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return labelled_run(tmp_path_factory.mktemp("corrections"), 120, SETTINGS)


@pytest.fixture
def project(fresh: Project) -> Project:
    """A labelled run without corrections."""
    (fresh.run.tree.labels / "corrections.jsonl").unlink(missing_ok=True)
    nmoe(fresh, "hydra merge-labels")
    return fresh


def merged(project: Project) -> list[dict[str, Any]]:
    nmoe(project, "hydra merge-labels")
    return read_rows(project.run.tree.merged_labels("train"))


def correct(project: Project, doc_id: str, by: str, **scores: int) -> None:
    grades = [f"{name}={grade}" for name, grade in scores.items()]
    nmoe(project, "hydra review", "--correct", doc_id, "--scores", *grades, "--by", by)


def corrections_of(project: Project, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return said(capsys, "hydra", "corrections", "--config", project.config)


def test_the_median_of_the_people_counts_and_each_of_them_judges_alone(project: Project) -> None:
    before = merged(project)[0]
    doc_id, was = before["doc_id"], before["scores"]
    correct(project, doc_id, "mara", density=0)
    correct(project, doc_id, "jo", coherence=4)
    correct(project, doc_id, "mara", density=(was["density"] + 1) % 5)
    both = merged(project)[0]
    density = median([(was["density"] + 1) % 5, was["density"]])
    coherence = median([was["coherence"], 4])
    assert both["scores"] == was | {"density": density, "coherence": coherence}
    assert both["aggregated"] == pytest.approx(sum(both["scores"].values()) / 20)
    assert both["corrected"]["by"] == "jo, mara"
    assert both["corrected"]["was"] == was
    labels = read_labels(project.run.tree.merged_labels("train"))
    assert labels.scale.by_name(labels.scores[0]) == both["scores"], "between two grades"
    correct(project, doc_id, "ann", density=4, coherence=4)
    three = merged(project)[0]
    grades = median([(was["density"] + 1) % 5, 4, was["density"]]), 4
    assert (three["scores"]["density"], three["scores"]["coherence"]) == grades


def test_a_withdrawn_correction_stays_in_the_file_and_does_not_count(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    before = merged(project)
    doc_id = before[0]["doc_id"]
    file = project.run.tree.labels / "corrections.jsonl"
    correct(project, doc_id, "mara", density=0)
    correct(project, doc_id, "jo", density=4)
    correct(project, doc_id, "mara", density=1)
    lines = file.read_bytes()
    withdraw = ("hydra", "review", "--config", project.config, "--withdraw", doc_id, "--by")
    (made,) = said(capsys, *withdraw, "mara", "--note", "mistaken")
    assert (made["withdrawn"], made["by"], made["note"]) == (True, "mara", "mistaken")
    assert file.read_bytes().startswith(lines)
    assert merged(project)[0]["scores"]["density"] == 4
    line = refused_line(capsys, *map(str, withdraw), "mara", code="E-LABEL-MISSING")
    assert "by mara" in line
    said(capsys, *withdraw, "jo")
    assert merged(project) == before
    found = corrections_of(project, capsys)["entries"]
    assert [(row["by"], row["counts"]) for row in found] == [
        (by, False) for by in ("mara", "jo", "mara", "mara", "jo")
    ]
    assert [row["density"] for row in found] == [0, 4, 1, None, None]
    correct(project, doc_id, "mara", density=3)
    assert merged(project)[0]["scores"]["density"] == 3


def test_people_s_agreement_is_told_with_the_number_of_documents_that_several_corrected(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = list({row["text_sha256"]: row["doc_id"] for row in merged(project)}.values())[:3]
    grades = {"mara": [0, 2, 4], "jo": [1, 2, None], "ann": [None, 3, None]}
    for by, given in grades.items():
        for doc_id, grade in zip(ids, given):
            if grade is not None:
                correct(project, doc_id, by, density=grade)
    facts = corrections_of(project, capsys)
    assert (facts["documents"], facts["by_several"]) == (3, 2)
    row = next(row for row in facts["agreement"] if row["dimension"] == "density")
    table = np.array([[0, 1, np.nan], [2, 2, 3]])
    assert row["alpha"] == pytest.approx(alpha(table), abs=1e-6)
    assert (row["n"], row["raters"]) == (2, 3)
    assert row["low"] is None, "no interval below ten documents"


def test_a_file_of_an_earlier_version_gives_the_labels_that_it_gave(project: Project) -> None:
    """There the last line of a text replaced all earlier ones, whoever wrote it."""
    record = merged(project)[0]
    keys = ("doc_id", "text_sha256", "rubric_hash")
    entry = {key: record[key] for key in keys} | {"note": "", "was": record["scores"]}
    rows = [
        entry | {"scores": record["scores"] | {"density": grade}, "by": by, "at": at}
        for grade, by, at in ((1, "mara", "2026-01-01"), (3, "jo", "2026-01-02"))
    ]
    file: Path = project.run.tree.labels / "corrections.jsonl"
    file.write_text(json_lines(rows))
    found = merged(project)[0]
    assert found["scores"]["density"] == 3
    assert found["corrected"] == {
        "by": "jo", "note": "", "at": "2026-01-02", "was": record["scores"]
    }  # fmt: skip
    correct(project, record["doc_id"], "ann", density=2)
    assert merged(project)[0]["scores"]["density"] == 2.5, "ann is added, and mara stays replaced"
