"""Student and probe that grade together, if `grader = "auto"` chooses them."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loader.files.checksummed_json import sealed
from nmoe_core.base.intervals import spearman
from nmoe_core.cli import main
from nmoe_core.labels.label_files import read_labels
from nmoe_core.labels.scores import QUALITY
from nmoe_core.quality.calibration.choice import choose
from nmoe_core.quality.calibration.rows import CalibrationRows
from nmoe_core.quality.calibration.summary_file import load_calibration, read_calibration
from nmoe_core.quality.few_labels import FEW_LABELS_SAID, samples
from nmoe_core.quality.heads.features import is_batch_invariant
from nmoe_core.quality.heads.head_files import read_header
from nmoe_core.quality.heads.scores import DocumentTokens
from nmoe_core.quality.heads.scoring import HeadScorer
from nmoe_core.quality.heads.student import fit_student
from nmoe_core.quality.heads.student_file import token_table
from nmoe_core.tasks.hydra import head_corpus, load_grader, student_corpus
from nmoe_core.tasks.preview import plan_regrade
from nmoe_core.tasks.report.summary import few_labels_of
from nmoe_core.text.tokenizer import load_tokenizer
from tests.core.quality.grading.small_run import SETTINGS, TINY, nmoe
from tests.project import Project, Source, jsonl_source, read_rows, write_project
from tests.refusals import refused_line

pytest.importorskip("torch")
AUTO: dict[str, Any] = {
    "heads": {"max_ctx": 32, "judge": {"mid_dim": 16, "num_heads": 4, "ffn_dim": 32}},
    "calibration": {"max_false_drop": 0.5},
    "grading": {"grader": "auto", "batch_size": 8},
}
LABELLED = ("prep-mixture", "hydra slices", "hydra oracle-label", "hydra merge-labels")
TRAINED = ("train student", "train probe", "train judge", "hydra calibrate")


def texts_of(count: int) -> Source:
    """Texts of made-up words, on which neither n-grams nor random states tell everything."""
    rng = np.random.default_rng(1)
    words = [
        f"{'abcdefghijklmnopqrstuvwxyz'[i % 26]}{'aeiou'[i % 5]}{'lmnrst'[i % 6]}{i // 7}"
        for i in range(300)
    ]
    rows = []
    for i in range(count):
        chosen = rng.zipf(1.3, int(rng.integers(4, 40))) % len(words)
        end = rng.choice([".", "!", "?", " and it is the end."])
        text = f"the number {i} is {' '.join(words[j] for j in chosen)}{end}"
        rows.append({"id": f"d{i}", "text": text})
    return jsonl_source("web", rows)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A graded run whose calibration chose student and probe."""
    directory = tmp_path_factory.mktemp("stacked")
    made = write_project(directory, [texts_of(500)], SETTINGS | TINY | AUTO)
    for words in (*LABELLED, *TRAINED, "hydra grade"):
        nmoe(made, words)
    assert load_calibration(made.run.tree.calibration).grader == "stacked"
    return made


def graded(project: Project) -> list[dict[str, Any]]:
    return read_rows(*sorted(project.run.tree.quality.rglob("quality_scores.jsonl")))


def test_a_grade_is_the_weighted_mean_of_student_and_probe(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    calibration = load_calibration(project.run.tree.calibration)
    weight = calibration.probe_weight
    assert weight is not None
    rows = graded(project)
    assert len(rows) == 500
    judged = [row for row in rows if not row["early_exit"]]
    assert judged
    for row in judged:
        probe, student = (
            np.array(QUALITY.vector(row[f"{name}_scores"])) for name in ("probe", "student")
        )
        mean = weight * probe + (1 - weight) * student
        assert QUALITY.vector(row["scores"]) == pytest.approx(mean.tolist(), abs=1e-6)
        assert row["aggregated"] == calibration.aggregate(np.array(QUALITY.vector(row["scores"])))
    nmoe(project, "explain", judged[0]["doc_id"])
    assert "student and probe 0." in capsys.readouterr().out


def test_grading_again_from_scratch_gives_the_same_bytes_and_grading_twice_gives_none(
    project: Project, tmp_path: Path
) -> None:
    paths = sorted(project.run.tree.quality.rglob("quality_scores.jsonl"))
    nmoe(project, "hydra grade", "--out", tmp_path)
    again = sorted(tmp_path.rglob("quality_scores.jsonl"))
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in paths]
    before = [path.stat().st_mtime_ns for path in paths]
    nmoe(project, "hydra grade")
    assert [path.stat().st_mtime_ns for path in paths] == before
    assert plan_regrade(project.run, ["web"]).shards == []


def test_states_kept_by_the_training_are_not_computed_again_and_give_the_same_scores(
    project: Project,
) -> None:
    scorer = load_grader(project.run).scorer
    assert isinstance(scorer, HeadScorer)
    labels = read_labels(project.run.tree.merged_labels("val"))
    corpus = replace(head_corpus(project.run), max_ctx=scorer.max_ctx)
    labelled = corpus.read(labels.doc_ids)
    others = [tokens[::-1] for tokens in labelled.tokens[:9]]
    names = [*labelled.names, *(f"other {i}" for i in range(9))]
    documents = DocumentTokens(names, [*labelled.tokens, *others])
    found = scorer.score(documents)
    fresh = replace(scorer, kept=None).score(documents)
    assert np.array_equal(found.judge, fresh.judge)
    assert np.array_equal(found.probe, fresh.probe)
    assert len(fresh.ran) == len(documents)
    if is_batch_invariant(scorer.model):
        assert 1 <= len(found.ran) <= 9
    else:
        assert scorer.kept is None


def test_a_regrade_to_another_target_makes_decisions_again_from_recorded_scores(
    project: Project, tmp_path: Path
) -> None:
    shutil.copytree(project.directory, tmp_path / "own")
    own = write_project(tmp_path / "own", [texts_of(500)], SETTINGS | TINY | AUTO)
    before = {row["doc_id"]: row["decision"] for row in graded(own)}
    asked = {"calibration.target_keep": 0.2}
    nmoe(own, "hydra calibrate", "--target-keep", 0.2)
    plan = plan_regrade(own.run.with_settings(asked), ["web"])
    nmoe(own, "hydra grade", "--set=calibration.target_keep=0.2")
    flips = sum(row["decision"] != before[row["doc_id"]] for row in graded(own))
    assert plan.may_flip == (flips, flips)
    assert flips > 0


def test_val_grades_calibrate_student_and_probe_as_their_scores_do(
    project: Project, tmp_path: Path
) -> None:
    tree = project.run.tree
    words = ("--input-docids", tree.slices / "docids_val.jsonl", "--set=grading.early_exit=false")
    nmoe(project, "hydra grade", *words, "--out", tmp_path / "val")
    predictions = tmp_path / "val" / "quality_scores.jsonl"
    words = ("--predictions", str(predictions), "--labels", str(tree.merged_labels("val")))
    assert main(["hydra", "calibrate", *words, "--out", str(tmp_path / "own")]) == 0
    found, expected = map(load_calibration, (tmp_path / "own", tree.calibration))
    for name in ("grader", "heads_digest", "student_digest", "probe_weight"):
        assert getattr(found, name) == getattr(expected, name)


def test_without_their_student_student_and_probe_are_refused(
    project: Project, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(project.directory, tmp_path / "own")
    own = write_project(tmp_path / "own", [texts_of(500)], SETTINGS | TINY | AUTO)
    out = tmp_path / "out"
    words = ("hydra", "grade", "--config", str(own.config), "--input-jsonl", str(out) + ".jsonl")
    Path(f"{out}.jsonl").write_text(json.dumps({"id": "a", "text": "one text"}) + "\n")
    words = (*words, "--out", str(out))
    own.run.tree.student.unlink()
    assert "student" in refused_line(capsys, *words, code="E-HEAD-MISSING")
    own.run.tree.probe.rename(own.run.tree.student)
    refused_line(capsys, *words, code="E-HEAD-MISSING")


def test_thresholds_of_another_weight_or_without_a_weight_are_refused(
    project: Project, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = project.run.tree.calibration_summary
    made = json.loads(path.read_text())
    words = ("hydra", "grade", "--config", str(project.config), "--calibration", str(tmp_path))
    for weight, code in ((0.4, "E-CALIBRATION-HEADS"), (None, "E-CALIBRATION-FORMAT")):
        changed = sealed(made | {"probe_weight": weight})
        (tmp_path / path.name).write_text(json.dumps(changed))
        refused_line(capsys, *words, code=code)


def test_a_report_says_which_grader_is_chosen_and_whether_the_judge_beats_the_probe(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    choice = read_calibration(project.run.tree.calibration_summary)["grader_choice"]
    assert choice["sentence"].startswith("Student and probe together grade. Spearman")
    low, high = choice["report"]["judge_over_probe_ci95"]
    assert low <= choice["report"]["judge_over_probe"] <= high
    said_of = "better than" if low > 0 else "no better than" if high >= 0 else "worse than"
    assert f"The judge alone ranks {said_of} the probe: " in choice["sentence"]
    assert choice["report"]["graders"].keys() == {"hydra", "student", "stacked"}
    nmoe(project, "hydra calibrate")
    assert choice["sentence"] in " ".join(capsys.readouterr().out.split())


def rows_of(grader: Any, seed: int, noise: float, student: int | None = None) -> CalibrationRows:
    """Scores of 400 documents: each grader is the oracle with noise of its own."""
    oracle = np.random.default_rng(0).integers(0, 5, (400, 5)).astype(float)
    names = np.array([f"d{i:03d}" for i in range(400)])

    def noisy(number: int, deviation: float = 2.0) -> np.ndarray:
        found = oracle + np.random.default_rng(number).normal(0, deviation, oracle.shape)
        return np.clip(found, 0, 4).round(6)

    rows = CalibrationRows(
        *(names, names, np.full(400, "web"), np.full(400, 9), oracle, None),
        None if student is None else noisy(seed + 10),
        noisy(seed, noise),
        np.ones(400, np.bool_),
        grader,
        "",
        {},
    )
    return rows if student is None else replace(rows, student=noisy(student), student_digest="s")


def test_student_and_probe_with_errors_of_their_own_are_better_together() -> None:
    heads, student = rows_of("hydra", 1, 4.0, student=2), rows_of("student", 2, 2.0)
    (best, *_), facts = choose([(heads, heads), (student, student)])
    choice = facts["grader_choice"]
    assert (best.fit.grader, choice["report"]["chosen"]) == ("stacked", "stacked")
    assert choice["lower_bounds_fit"].keys() == {"hydra", "student", "stacked"}
    assert best.fit.probe_weight == 0.5
    half = heads.halves()[1]
    assert half.probe is not None
    assert half.student is not None
    mean = QUALITY.aggregate((half.probe + half.student) / 2)
    expected = spearman(mean, QUALITY.aggregate(half.oracle))
    assert choice["report"]["graders"]["stacked"]["spearman"] == pytest.approx(expected, abs=1e-4)
    low, _ = choice["report"]["difference_ci95"]
    assert low > 0
    assert choice["test"]["documents"] == 400


def test_heads_without_a_student_before_them_are_compared_with_the_student_alone() -> None:
    heads, student = rows_of("hydra", 1, 4.0), rows_of("student", 2, 2.0)
    _, facts = choose([(heads, None), (student, None)])
    choice = facts["grader_choice"]
    assert choice["report"]["graders"].keys() == {"hydra", "student"}
    assert "The judge alone" not in choice["sentence"]


def test_the_cards_and_the_page_say_what_fewer_labels_would_have_bought(
    project: Project, tmp_path: Path
) -> None:
    run = project.run
    files = (run.tree.student, run.tree.probe)
    student, probe = (read_header(path)["few_labels"] for path in files)
    assert [row["labels"] for row in probe] == [60, 120, 250, 399]
    assert [row["student"] for row in probe] == [row["student"] for row in student]
    headers = [read_header(path)["metrics"] for path in files]
    assert [probe[-1]["student"], probe[-1]["probe"]] == [one["spearman"] for one in headers]
    assert few_labels_of(run) == probe
    train, val = (read_labels(run.tree.merged_labels(split)) for split in ("train", "val"))
    tokenizer = load_tokenizer(run.tokenizer)
    corpus = student_corpus(run, 32)
    table = token_table(tokenizer)
    rows = samples(len(train.doc_ids))[60]
    assert set(rows) < set(samples(len(train.doc_ids))[120])
    read = corpus.read([train.doc_ids[i] for i in rows]).tokens
    given = fit_student(read, train.scores[rows], table).predict(
        corpus.read(val.doc_ids).tokens, table
    )
    expected = spearman(QUALITY.aggregate(given), QUALITY.aggregate(val.scores))
    assert student[0]["student"] == pytest.approx(expected, abs=1e-6)
    for path, columns in zip(
        files, ("| labels | student |", "| labels | student | probe | both |")
    ):
        card = path.with_suffix(".md").read_text()
        assert columns in card
        assert f"| 60 | {student[0]['student']:.2f} (" in card
    nmoe(project, "report", "--html", tmp_path / "index.html")
    page = (tmp_path / "index.html").read_text()
    assert FEW_LABELS_SAID in page
    assert f">{probe[0]['both']:.2f} (" in page
