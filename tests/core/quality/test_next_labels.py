"""`nmoe hydra plan-labels`: documents of train to label next."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nmoe_core.base.docid import split_of
from nmoe_core.labels.label_files import read_labels
from nmoe_core.prep.mixture import run_sources
from nmoe_core.quality.next_labels import choose_next
from nmoe_core.tasks.checks.hydra import check_labels
from nmoe_core.tasks.graph.walk import walk
from tests.core.quality.grading.small_run import SETTINGS, TINY, labelled_run, nmoe, source_of
from tests.project import Project, read_rows, said, write_project
from tests.refusals import refused_line

COUNT = 500
SAMPLED: dict[str, Any] = {"oracle": {"max_doc_tokens": 32, "max_documents": 200}}


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A run that labelled a sample of 200 of its documents."""
    return labelled_run(tmp_path_factory.mktemp("planned"), COUNT, SAMPLED | TINY)


@pytest.fixture
def project(labelled: Project, tmp_path: Path) -> Project:
    shutil.copytree(labelled.directory, tmp_path / "own")
    return write_project(tmp_path / "own", [source_of(COUNT)], SETTINGS | SAMPLED | TINY)


def labels_of(project: Project, split: str) -> set[str]:
    return set(read_labels(project.run.tree.merged_labels(split)).doc_ids)


def test_planned_documents_are_of_train_and_are_labelled_beside_the_sample(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {split: labels_of(project, split) for split in ("train", "val", "test")}
    words = ("hydra", "plan-labels", "--config", project.config, "--budget", 40)
    facts = said(capsys, *words)["plan"]
    assert (facts["labels"], facts["planned"]) == (len(before["train"]), 40)
    planned = [row["doc_id"] for row in read_rows(Path(facts["path"]))]
    assert len(set(planned)) == 40
    assert {split_of(doc_id) for doc_id in planned} == {"train"}
    assert before["train"].isdisjoint(planned)
    assert not check_labels(project.run)["coverage"].passed
    why = ["input docid_slices"]
    assert stale_labels(project) == {f"train-0{i}": why for i in range(8)}
    for task in ("hydra oracle-label", "hydra merge-labels"):
        nmoe(project, task)
    assert labels_of(project, "train") == before["train"] | set(planned)
    assert all(labels_of(project, split) == before[split] for split in ("val", "test"))
    assert check_labels(project.run)["coverage"].passed
    assert stale_labels(project) == {}


def stale_labels(project: Project) -> dict[str, list[str]]:
    """Why labels of slices are not current."""
    states = walk(project.run, run_sources(project.run)).of("hydra/oracle_labels")
    return {s.partition: [*map(str, s.changes)] for s in states if not s.is_current}


def test_a_plan_is_the_same_each_time_and_the_next_one_adds_other_documents(
    project: Project,
) -> None:
    path = project.run.tree.slices / "planned.jsonl"
    nmoe(project, "hydra plan-labels", "--budget", 20)
    first = path.read_bytes()
    path.unlink()
    nmoe(project, "hydra plan-labels", "--budget", 20)
    assert path.read_bytes() == first
    nmoe(project, "hydra plan-labels", "--budget", 10)
    assert path.read_bytes().startswith(first)
    rows = read_rows(path)
    assert len({row["doc_id"] for row in rows}) == len(rows) == 30


@pytest.mark.long
def test_documents_are_also_chosen_by_the_states_of_the_backbone(project: Project) -> None:
    pytest.importorskip("torch")
    path = project.run.tree.slices / "planned.jsonl"
    nmoe(project, "hydra plan-labels", "--budget", 10)
    by_ngrams = read_rows(path)
    path.unlink()
    nmoe(project, "train probe")
    nmoe(project, "hydra plan-labels", "--budget", 10, "--by", "probe")
    by_states = read_rows(path)
    assert len(by_states) == 10
    assert by_states != by_ngrams


def test_documents_of_val_that_are_written_into_the_plan_are_not_labelled(project: Project) -> None:
    rows = read_rows(project.run.tree.slices / "docids_val.jsonl")
    labelled = labels_of(project, "val")
    extra = next(row for row in rows if row["doc_id"] not in labelled)
    (project.run.tree.slices / "planned.jsonl").write_text(json.dumps(extra) + "\n")
    for task in ("hydra oracle-label", "hydra merge-labels"):
        nmoe(project, task)
    assert labels_of(project, "val") == labelled


def test_a_budget_of_more_than_half_of_the_other_documents_is_refused(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("hydra", "plan-labels", "--config", str(project.config), "--budget")
    assert "twice the budget" in refused_line(capsys, *words, "150", code="E-LABEL-FEW")
    every = project.config.read_text().replace("max_documents = 200", "max_documents = 9000")
    project.config.write_text(every)
    for task in ("hydra oracle-label", "hydra merge-labels"):
        nmoe(project, task)
    assert "0 texts of train" in refused_line(capsys, *words, "5", code="E-LABEL-FEW")


def test_the_chosen_are_near_the_threshold_and_unlike_the_labelled_and_each_other() -> None:
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(6), 40)
    features = np.eye(6)[groups] + rng.normal(0, 0.02, (240, 6))
    features[:, 0] += 2 * rng.uniform(-1, 1, 240)  # what the score is
    labelled = np.flatnonzero(groups < 3)[::3]
    order = np.concatenate([labelled, np.setdiff1d(np.arange(240), labelled)])
    ordered = features[order]
    scores = 0.5 + 0.2 * ordered[: len(labelled), 0]
    chosen = choose_next(ordered @ ordered.T, scores, 6)
    assert len(set(chosen)) == 6
    assert min(chosen) >= len(labelled)
    assert set(groups[order[chosen[:3]]]) == {3, 4, 5}, "groups without a label come first"
    others = ordered[len(labelled) :, 0]
    distance = np.abs(ordered[chosen, 0] - np.median(ordered[:, 0]))
    assert distance.max() < np.quantile(np.abs(others - np.median(others)), 0.6)
