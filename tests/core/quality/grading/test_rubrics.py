"""Rubrics with dimensions of their own: any number of them, any grades, weights."""

from pathlib import Path

import numpy as np
import pytest

from nmoe_core.base.errors import NmoeError
from nmoe_core.config.rubric import Rubric
from nmoe_core.labels.label_files import read_labels
from nmoe_core.labels.scores import QUALITY, Scale, parse_scores
from nmoe_core.quality.calibration.summary_file import load_calibration, read_calibration
from nmoe_core.quality.calibration.thresholds import fit_weights
from nmoe_core.quality.heads.head_files import read_header
from tests.core.labels.oracles.server import JudgeServer
from tests.core.quality.grading.judged import answering, oracle_of
from tests.core.quality.grading.small_run import SETTINGS, TINY, nmoe, source_of
from tests.project import Project, jsonl_source, read_rows, said, write_project
from tests.refusals import refused_line

pytest.importorskip("torch")
SHIPPED = Path("configs/rubrics")
TWO = """
name = "two"
version = "1"
instructions = "Judge."
answer = "Answer with one JSON object of use and form."
[dimensions.use]
question = "Of what use is it?"
lowest = 1
weight = 3
grades = ["none", "some", "much"]
[dimensions.form]
question = "Is it well formed?"
grades = ["no", "yes"]
"""
ONE = TWO.partition("[dimensions.form]")[0].replace("use and form", "use")


@pytest.fixture(
    scope="module", params=[pytest.param("education_v1", marks=pytest.mark.long), "properties_v1"]
)
def graded(
    request: pytest.FixtureRequest, server: JudgeServer, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Project, Scale]:
    """A run by a shipped rubric, from its text to its grades, by probe and judge."""
    scale = Scale.of(Rubric.load(SHIPPED / f"{request.param}.toml"))
    answering(server, scale)
    settings = SETTINGS | TINY | {"calibration": {"max_false_drop": 0.5}}
    settings["oracle"] = oracle_of(server, request.param) | {"relabel": 3}
    made = write_project(tmp_path_factory.mktemp(request.param), [source_of(400)], settings)
    tasks = ("slices", "oracle-label", "merge-labels")
    for words in ("prep-mixture", *(f"hydra {task}" for task in tasks)):
        nmoe(made, words)
    for words in ("train student", "train probe", "train judge", "hydra calibrate", "hydra grade"):
        nmoe(made, words)
    return made, scale


def test_labels_heads_calibration_and_grades_are_of_the_rubric_s_dimensions(
    graded: tuple[Project, Scale], capsys: pytest.CaptureFixture[str]
) -> None:
    project, scale = graded
    tree = project.run.tree
    labels = read_labels(tree.merged_labels("val"))
    assert labels.scale == scale != QUALITY
    assert labels.scores.shape == (len(labels.doc_ids), len(scale))
    assert (labels.scores >= scale.lowest).all()
    assert (labels.scores <= scale.highest).all()
    for name in ("student", "probe", "judge"):
        header = read_header(tree.heads / f"hydra_{name}.safetensors")
        assert Scale.read(header["scale"]) == scale
        assert set(header["metrics"]["dimensions"]) == set(scale.names)
    calibration = load_calibration(tree.calibration)
    assert calibration.scale == scale
    weights = read_calibration(tree.calibration_summary)["weights"]
    assert weights == pytest.approx(dict(zip(scale.names, scale.weights)))
    rows = read_rows(*sorted(tree.data.parent.rglob("quality_scores.jsonl")))
    assert len(rows) == 400
    for row in rows:
        given = row["scores"] or row["probe_scores"] or row["student_scores"]
        low, high = np.array(scale.lowest), np.array(scale.highest)
        shares = (np.array([given[name] for name in scale.names]) - low) / (high - low)
        assert row["aggregated"] == pytest.approx(
            np.average(shares, weights=scale.weights), abs=1e-6
        )
    query = f'SELECT count("{scale.names[-1]}") n, max("{scale.names[0]}") best FROM documents'
    (found,) = said(capsys, "sql", query, "--config", project.config)
    assert found["n"] == sum(row["scores"] is not None for row in rows)
    assert found["best"] <= scale.highest[0]


def test_an_oracle_is_asked_for_the_rubric_s_dimensions_and_no_other_answer_is_taken(
    server: JudgeServer, tmp_path: Path
) -> None:
    scale = Scale.of(Rubric.load(SHIPPED / "properties_v1.toml"))
    answering(server, scale)
    server.requests.clear()
    made = write_project(
        tmp_path, [source_of(60)], SETTINGS | {"oracle": oracle_of(server, "properties_v1")}
    )
    for words in ("prep-mixture", "hydra slices", "hydra oracle-label"):
        nmoe(made, words)
    schema = server.requests[0]["response_format"]["json_schema"]["schema"]
    assert schema["required"] == list(scale.names)
    assert schema["properties"]["safety"] == {"type": "integer", "minimum": 1, "maximum": 5}
    for wrong in (0, 6, 1.5, True, None):
        with pytest.raises(NmoeError):
            parse_scores(dict.fromkeys(scale.names, 3) | {"safety": wrong}, scale)
    with pytest.raises(NmoeError):
        parse_scores(dict.fromkeys(QUALITY.names, 3), scale)


def test_other_weights_ask_the_oracle_nothing_and_change_every_aggregate(
    server: JudgeServer, tmp_path: Path
) -> None:
    rubric = tmp_path / "two.toml"
    rubric.write_text(TWO)
    answering(server, Scale.of(Rubric.load(rubric)))
    made = write_project(
        tmp_path / "run", [source_of(80)], SETTINGS | {"oracle": oracle_of(server, str(rubric))}
    )
    tasks = ("slices", "oracle-label", "merge-labels")
    for words in ("prep-mixture", *(f"hydra {task}" for task in tasks)):
        nmoe(made, words)
    path = made.run.tree.merged_labels("train")
    before, asked = read_rows(path), server.asked.total()
    grade = 3 if before[0]["scores"]["use"] == 1 else 1
    correction = ("--correct", before[0]["doc_id"], "--scores", f"use={grade}", "--by", "mara")
    nmoe(made, "hydra review", *correction)
    rubric.write_text(TWO.replace("weight = 3", "weight = 1"))
    for words in ("hydra oracle-label", "hydra merge-labels"):
        nmoe(made, words)
    after = read_rows(path)
    assert server.asked.total() == asked
    assert after[0]["scores"] == before[0]["scores"] | {"use": grade}
    assert [row["scores"] for row in after[1:]] == [row["scores"] for row in before[1:]]
    assert read_labels(path).doc_ids, "corrections have the scale of all labels"
    for old, new in zip(before, after, strict=True):
        use, form = (new["scores"]["use"] - 1) / 2, new["scores"]["form"]
        was = (old["scores"]["use"] - 1) / 2
        assert old["aggregated"] == pytest.approx(0.75 * was + 0.25 * form)
        assert new["aggregated"] == pytest.approx(0.5 * use + 0.5 * form)


def test_a_grader_of_one_rubric_meets_no_labels_of_another(
    server: JudgeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in (("two", TWO), ("one", ONE)):
        (tmp_path / f"{name}.toml").write_text(text)
    settings = SETTINGS | {"grading": {"grader": "student"}}
    runs = {}
    for name in ("two", "one"):
        rubric = tmp_path / f"{name}.toml"
        answering(server, Scale.of(Rubric.load(rubric)))
        oracle = {"oracle": oracle_of(server, str(rubric))}
        runs[name] = write_project(tmp_path / name / "run", [source_of(300)], settings | oracle)
        tasks = ("hydra slices", "hydra oracle-label", "hydra merge-labels", "train student")
        for words in ("prep-mixture", *tasks):
            nmoe(runs[name], words)
    heads = runs["two"].run.tree.heads
    line = refused_line(
        capsys, "hydra", "calibrate", "--config", str(runs["one"].config), "--heads-dir", str(heads)
    )
    assert "E-LABEL-MIXED" in line
    assert "scores of use" in line


def test_the_heuristic_oracle_refuses_a_rubric_that_it_does_not_know(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    oracle = {"oracle": {"kind": "heuristic", "rubric": "education_v1"}}
    made = write_project(
        tmp_path, [jsonl_source("web", [{"id": "1", "text": "a b"}])], SETTINGS | oracle
    )
    for words in ("prep-mixture", "hydra slices"):
        nmoe(made, words)
    line = refused_line(capsys, "hydra", "oracle-label", "--config", str(made.config))
    assert "education" in line
    assert "helpfulness" in line


@pytest.mark.parametrize(
    ("wrong", "said_of_it"),
    [
        (TWO.replace("dimensions.use", "dimensions.decision"), "the name of another column"),
        (TWO.replace("dimensions.use", "dimensions.Use"), "is not a valid name"),
        (TWO.replace("weight = 3", "weight = -1"), "weight"),
        (TWO.replace('["no", "yes"]', '["no"]'), "grades"),
        (TWO.partition("[dimensions")[0], "dimensions"),
        (ONE.replace("weight = 3", "weight = 0"), "every weight is 0"),
    ],
)
def test_a_rubric_that_cannot_be_asked_is_refused(
    tmp_path: Path, wrong: str, said_of_it: str
) -> None:
    path = tmp_path / "rubric.toml"
    path.write_text(wrong)
    with pytest.raises(NmoeError, match=said_of_it):
        Rubric.load(path)


def test_weights_of_many_dimensions_are_those_of_least_squares() -> None:
    rng = np.random.default_rng(0)
    for num in (3, 10, 14):
        names = tuple(f"d{i}" for i in range(num))
        scale = Scale(names, (1,) * num, (5,) * num, (1 / num,) * num)
        planted = rng.dirichlet(np.ones(num) * 0.4)
        scores = rng.integers(1, 6, (600, num))
        found = fit_weights(scores, scale.shares(scores) @ planted, scale)
        assert [found[name] for name in names] == pytest.approx(planted.tolist(), abs=1e-4)
