"""`[grading] grader`: the student, or the better one by calibration; and audits of grades."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loader.files.checksummed_json import sealed
from nmoe_core.base.intervals import spearman, spearman_interval, upper_bound
from nmoe_core.cli import main
from nmoe_core.config.run import Run
from nmoe_core.labels.scores import QUALITY
from nmoe_core.quality.calibration.choice import Candidate, choose
from nmoe_core.quality.calibration.rows import CalibrationRows
from nmoe_core.quality.calibration.summary_file import load_calibration, read_calibration
from nmoe_core.quality.heads.student_file import load_student, token_table
from nmoe_core.tasks.checks import LEVELS, check_grades
from nmoe_core.tasks.preview import plan_regrade
from nmoe_core.tasks.report.summary import grader_costs, scoreboard
from nmoe_core.text.tokenizer import load_tokenizer
from tests.core.quality.grading.small_run import SETTINGS, TINY, labelled_run, nmoe, source_of
from tests.core.small_gradings import RUBRIC
from tests.project import Project, jsonl_source, output_of, read_rows, said, write_project
from tests.refusals import refused_line

pytest.importorskip("torch")
GRADED: dict[str, Any] = {
    "backbone": {"checkpoint": "none here"},
    "calibration": {"max_false_drop": 0.5},
    "grading": {"grader": "student"},
}
COUNT = 500


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A run that the student calibrated; there is no backbone and no head."""
    made = labelled_run(tmp_path_factory.mktemp("student"), COUNT, GRADED)
    nmoe(made, "train student")
    nmoe(made, "hydra calibrate")
    return made


def test_the_student_grades_without_a_backbone(
    project: Project, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = project.run
    assert load_calibration(run.tree.calibration).grader == "student"
    nmoe(project, "hydra grade", "--out", tmp_path / "one")
    nmoe(project, "hydra grade", "--out", tmp_path / "many", "--batch-size", 7)
    found = read_rows(*sorted((tmp_path / "one").rglob("quality_scores.jsonl")))
    assert found == read_rows(*sorted((tmp_path / "many").rglob("quality_scores.jsonl")))
    assert len(found) == 500
    assert {row["decision"] for row in found} == {"keep", "band", "drop"}
    assert {row["early_exit"] for row in found} == {False}
    assert all(row["q_probe"] is row["probe_scores"] is None for row in found)
    tokenizer = load_tokenizer(run.tokenizer)
    loaded, table = load_student(run.tree.student), token_table(tokenizer)
    row = found[3]
    facts = said(capsys, "explain", row["doc_id"], "--config", project.config)
    tokens = np.array(tokenizer.rows([facts["text"]])[0][:32], np.uint32)
    expected = loaded.student.predict([tokens], table)[0]
    assert QUALITY.vector(row["scores"]) == pytest.approx(expected.tolist())
    assert row["aggregated"] == pytest.approx(QUALITY.aggregate(expected))


_WITHOUT_TORCH = """
import sys
from nmoe_core.base.compute.api import kept_pools, map_shards
from nmoe_core.base.compute.tables import ComputeTable
from nmoe_core.config.run import Run
from nmoe_core.tasks.hydra import calibrate_heads
from nmoe_core.tasks.shards import grade_sources

run = Run(sys.argv[1], {"compute.workers": 2, "root": sys.argv[2]})
is_loaded = "'torch' in __import__('sys').modules"
calibrate_heads(run)
with kept_pools():
    assert grade_sources(run)
    print(eval(is_loaded), *set(map_shards(eval, [is_loaded] * 8, ComputeTable(workers=2))))
"""


def test_neither_the_command_nor_its_workers_import_torch_if_only_the_student_grades(
    project: Project, tmp_path: Path
) -> None:
    root = shutil.copytree(project.run.tree.root, tmp_path / "out")
    shutil.rmtree(root / "calibration")
    shutil.rmtree(root / "quality", ignore_errors=True)
    program = [sys.executable, "-c", _WITHOUT_TORCH, project.config, root]
    assert output_of(*program, timeout=240).splitlines()[-1] == "False False"


def test_a_document_s_explanation_and_the_preview_of_a_regrade_know_the_student(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    nmoe(project, "hydra grade")
    doc_id = read_rows(*sorted(project.run.tree.quality.rglob("quality_scores.jsonl")))[0]["doc_id"]
    nmoe(project, "explain", doc_id)
    assert ": student 0." in capsys.readouterr().out
    assert plan_regrade(project.run, ["web"]).shards == []
    nmoe(project, "hydra calibrate", "--target-keep", 0.2)
    plan = plan_regrade(project.run.with_settings({"calibration.target_keep": 0.2}), ["web"])
    assert {shard.reasons for shard in plan.shards} == {("input hydra/calibration",)}
    assert plan.may_flip[0] > 0
    nmoe(project, "hydra calibrate")


def test_calibration_chooses_for_all_shards_and_divides_the_error_of_its_bounds(
    project: Project, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(project.directory, tmp_path / "auto")
    settings = SETTINGS | GRADED | TINY | {"grading": {"grader": "auto"}}
    own = write_project(tmp_path / "auto", [source_of(COUNT)], settings)
    for words in ("train probe", "train judge", "hydra calibrate", "hydra grade"):
        nmoe(own, words)
    summary = read_calibration(own.run.tree.calibration_summary)
    figures = summary["grader_choice"]["report"]["graders"]
    assert figures.keys() == {"hydra", "student", "stacked"}
    chosen = figures["student"]
    for name in ("num_dropped", "false_drop_rate", "precision_keep", "recall_keep"):
        assert chosen[name] == summary[name]
    assert figures["hydra"]["recall_keep"] < chosen["recall_keep"]
    tested = summary["grader_choice"]["test"]["graders"]["student"]
    for name in ("num_dropped", "false_drop_rate", "recall_keep"):
        assert tested[name] == summary["test"][name]
    costs = {one["grader"]: one["hours_per_million_documents"] for one in grader_costs(own.run)}
    assert costs.keys() == {"hydra", "student"}
    assert min(costs.values()) > 0
    splits = scoreboard(own.run)["judge"]
    assert splits["test"]["n"] > 0 < splits["val"]["n"]
    assert splits["test"]["spearman"] != splits["val"]["spearman"]
    assert summary["grader"] == "student"  # random states know less than n-grams
    found = summary["certificate"]
    bound = upper_bound(found["false_drops"], found["dropped"], 0.05 / 3)
    assert found["false_drop_rate_upper95"] == pytest.approx(bound, abs=1e-6)
    assert summary["num_dropped"] > 0
    assert plan_regrade(own.run, ["web"]).shards == []
    row = read_rows(*own.run.tree.quality.rglob("quality_scores.jsonl"))[0]
    assert row["probe_scores"] is None
    words = ("hydra", "grade", "--config", own.config, "--set=grading.grader=hydra")
    refused_line(capsys, *map(str, words), code="E-INPUT-SETTINGS")


def test_thresholds_of_another_grader_and_shards_of_another_tokenizer_are_refused(
    project: Project, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = project.run.tree.calibration_summary
    other = json.loads(path.read_text()) | {"heads_digest": "0" * 64}
    (tmp_path / path.name).write_text(json.dumps(sealed(other)))
    words = ("hydra", "grade", "--config", project.config, "--calibration", tmp_path)
    refused_line(capsys, *map(str, words), code="E-CALIBRATION-HEADS")
    words = (*words[:-2], "--tokenizer", "cl100k_base", "--out", tmp_path / "grades")
    line = refused_line(capsys, *map(str, words), code="E-INPUT-SETTINGS")
    assert "tokenizer = o200k_harmony, expected cl100k_base" in line


@pytest.mark.parametrize("has_mixture", [True, False])
def test_labels_of_another_rater_or_rubric_teach_and_calibrate_nothing(
    project: Project, tmp_path: Path, capsys: pytest.CaptureFixture[str], has_mixture: bool
) -> None:
    lines = project.config.read_text().splitlines()
    kept = [line for line in lines if has_mixture or "toml" not in line]
    config = project.config.with_name("other.toml")
    config.write_text("\n".join(kept))
    rubric = tmp_path / "other.toml"
    rubric.write_text(RUBRIC.read_text().replace("the text itself", "only the text", 1))
    rater = ["oracle.kind=http", "oracle.http.model=m", "oracle.http.base_url=http://h/v1"]
    words = ["train student", "hydra calibrate", *["hydra grade"] * has_mixture]
    for settings in (rater, [f"oracle.rubric={rubric}"]):
        flags = [f"--set={one}" for one in settings]
        for verb in words:
            asked = (*verb.split(), "--config", str(config), "--quiet", *flags)
            line = refused_line(capsys, *asked, code="E-INPUT-SETTINGS")
            assert "hydra/oracle_labels" in line
    nmoe(project, "train student")


def test_an_audit_asks_about_kept_and_dropped_documents_that_nothing_was_fitted_on(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    nmoe(project, "hydra grade")
    tree = project.run.tree
    calibrated = read_calibration(tree.calibration_summary)
    labels = {row["doc_id"]: row for row in read_rows(tree.merged_labels("test"))}
    graded = read_rows(*sorted(tree.quality.rglob("quality_scores.jsonl")))
    words = ("hydra", "audit", "--config", project.config)
    rows = said(capsys, *words, "--documents", 500)
    [sample] = project.directory.rglob("audit/web/docids.jsonl")
    left = sample.with_name("docids.jsonl.tmp.4194305")  # by an audit that was killed
    left.touch()
    assert said(capsys, *words, "--documents", 500) == rows
    assert not left.exists()
    assert [row["source"] for row in rows] == ["web", "web"]  # of one source there is no sum
    found = {row["decision"]: row for row in rows}
    for decision, name in (("keep", "kept"), ("drop", "dropped")):
        asked = [r["doc_id"] for r in graded if r["decision"] == decision and r["doc_id"] in labels]
        keeps = [labels[i]["aggregated"] >= calibrated["oracle_tau_keep"] for i in asked]
        assert found[name]["documents"] == found[name]["asked"] == len(keeps) > 0
        assert found[name]["worth_keeping"] == pytest.approx(np.mean(keeps), abs=1e-6)
        assert found[name]["at_most"] == pytest.approx(upper_bound(sum(keeps), len(keeps)))
        assert found[name]["at_least"] <= found[name]["worth_keeping"] <= found[name]["at_most"]
    less = {row["decision"]: row["asked"] for row in said(capsys, *words, "--documents", 3)}
    assert less == {"kept": 3, "dropped": 3}


def test_an_audit_counts_the_documents_that_got_no_label_and_leaves_them_out_of_the_shares(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = source_of(COUNT)
    russian = "Снег шёл всю ночь, и утром город {} был тихим и белым, как лист бумаги. "
    rows = [{"id": f"r{i}", "text": russian.format(i)} for i in range(100)]
    made = write_project(tmp_path, [source, jsonl_source("law", rows)], SETTINGS | GRADED)
    steps = ("prep-mixture", "hydra slices", "hydra oracle-label", "hydra merge-labels")
    for words in (*steps, "train student", "hydra calibrate", "hydra grade"):
        nmoe(made, words)
    rows = said(capsys, "hydra", "audit", "--config", made.config, "--documents", 500)
    found = {(row["source"], row["decision"]): row for row in rows}
    web, law, both = (found[name, "dropped"] for name in ("web", "law", "all"))
    assert law["unlabelled"] == law["asked"] > 0, "the stand-in for an oracle knows no Russian"
    assert (law["worth_keeping"], law["at_least"], law["at_most"]) == (None, 0, 1)
    assert both["asked"] == web["asked"] + law["asked"] > both["unlabelled"] == law["asked"]
    assert both["worth_keeping"] == web["worth_keeping"]
    assert [found[name, "kept"]["unlabelled"] for name in ("web", "all")] == [0, 0]


def test_a_task_works_on_the_project_of_the_working_directory_unless_a_path_is_named(
    project: Project,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    own = tmp_path / "own"
    shutil.copytree(project.directory, own)
    shutil.rmtree(own / "out" / "quality", ignore_errors=True)
    monkeypatch.chdir(own)
    refused_line(capsys, "hydra", "grade", code="E-CONFIG")
    shutil.copy(project.config, "nmoe.toml")
    assert main(["hydra", "grade"]) == 0
    assert len(read_rows(*own.rglob("quality_scores.jsonl"))) == 500
    for words in (["--calibration", "other"], ["--input-jsonl", "in/web.jsonl"]):
        refused_line(capsys, "hydra", "grade", *words, code="E-CONFIG")


def test_a_shard_whose_scores_are_not_as_those_of_val_fails_its_check(
    project: Project, tmp_path: Path
) -> None:
    nmoe(project, "hydra grade")
    path, moved = project.run.tree.calibration_summary, tmp_path / "moved"
    assert check_grades(project.run, "web", (0, 1))["score_drift"].passed
    summary = read_calibration(path)
    bins = {"edges": [0.9], "counts": [5, 45]}  # val had better documents
    moved.mkdir()
    (moved / path.name).write_text(json.dumps(sealed(summary | {"score_bins": {"web": bins}})))
    other = Run(project.config, roots={"calibration": moved})
    found = check_grades(other, "web", (0, 1))["score_drift"]
    assert not found.passed
    assert found.facts["psi"] > 1
    assert LEVELS["score_drift"] == "warn"


def test_without_the_oracle_s_own_threshold_an_audit_is_refused(
    project: Project, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "calibration"
    nmoe(project, "hydra calibrate", "--compat", "--out", path)
    words = ("hydra", "audit", "--config", project.config, "--calibration", path)
    refused_line(capsys, *map(str, words), code="E-CALIBRATION-HEADS")
    words = (*words[:-1], tmp_path / "none")
    line = refused_line(capsys, *map(str, words), code="E-CALIBRATION-MISSING")
    assert "run nmoe hydra calibrate" in line


def rows_of(
    grader: Any, noise: float, is_held_out: Any = True, keys: Any = None
) -> CalibrationRows:
    """Scores of 400 documents by a grader that differs from the oracle by noise."""
    rng = np.random.default_rng(0)
    oracle = rng.integers(0, 5, (400, 5)).astype(float)
    doc_ids = np.array([f"d{i:03d}" for i in range(400)])
    judge = np.clip(oracle + np.random.default_rng(1).normal(0, noise, oracle.shape), 0, 4)
    return CalibrationRows(
        keys=doc_ids if keys is None else np.asarray(keys),
        doc_ids=doc_ids,
        sources=np.full(400, "web"),
        lengths=np.full(400, 9),
        oracle=oracle,
        targets=None,
        probe=None,
        judge=judge,
        is_held_out=np.broadcast_to(is_held_out, 400).copy(),
        grader=grader,
        heads_digest="",
        left_out={},
    )


@pytest.mark.parametrize(
    ("heads", "student", "winner"),
    [(3.0, 1.0, "student"), (1.0, 3.0, "hydra"), (1.0, 1.0, "student")],
)
def test_the_grader_with_the_higher_lower_bound_is_chosen(
    heads: float, student: float, winner: str
) -> None:
    given = rows_of("hydra", heads), rows_of("student", student)
    (best, *_), facts = choose([(rows, rows) for rows in given])
    assert best.fit.grader == winner
    choice = facts["grader_choice"]
    report = choice["report"]
    half = given[winner == "student"].halves()[1]
    expected = spearman(QUALITY.aggregate(half.judge), QUALITY.aggregate(half.oracle))
    assert report["graders"][winner]["spearman"] == pytest.approx(expected)
    assert report["documents"] + len(best.fit) == 400
    assert choice["test"]["documents"] == 400
    values = {name: figures["spearman"] for name, figures in report["graders"].items()}
    difference = values[winner] - values[report["other"]]
    assert report["difference"] == pytest.approx(difference, abs=2e-6)
    low, high = report["difference_ci95"]
    assert low <= difference <= high
    bounds, half = choice["lower_bounds_fit"], given[winner == "student"].halves()[0]
    interval = spearman_interval(*map(QUALITY.aggregate, (half.judge, half.oracle)))
    assert bounds[winner] == max(bounds.values()) == (interval or [None])[0]
    assert ("may be chance" in choice["sentence"]) == (heads == student)


def test_graders_are_compared_on_documents_that_both_scored_and_neither_was_trained_on() -> None:
    numbers = np.arange(400)
    # The heads read the beginnings alone, which pairs of documents share.
    heads = rows_of("hydra", 1.0, numbers % 4 > 0, [f"d{i // 2}" for i in numbers])
    student = rows_of("student", 2.0, numbers % 5 > 0).take(numbers < 300)
    (best, *_), facts = choose([(heads, None), (student, None)])
    kept = set(best.fit.doc_ids) | set(best.report.doc_ids)
    assert kept == set(student.doc_ids)
    pairs = {int(name[1:]) // 2 for name in best.fit.doc_ids}
    assert pairs.isdisjoint(int(name[1:]) // 2 for name in best.report.doc_ids)
    is_fresh = [int(n[1:]) % 4 > 0 and int(n[1:]) % 5 > 0 for n in best.report.doc_ids]
    assert facts["grader_choice"]["report"]["documents"] == sum(is_fresh)
    assert "test" not in facts["grader_choice"]


def test_a_grader_whose_scores_are_all_alike_loses_and_its_correlation_is_called_undefined() -> (
    None
):
    heads = rows_of("hydra", 1.0)
    alike = replace(rows_of("student", 1.0), judge=np.full((400, 5), 2.0))
    (best, *_), facts = choose([(heads, None), (alike, None)])
    choice = facts["grader_choice"]
    assert (best.fit.grader, choice["lower_bounds_fit"]["student"]) == ("hydra", -1.0)
    assert choice["report"]["difference"] is choice["report"]["difference_ci95"] is None
    assert "the student undefined" in choice["sentence"]
    assert "probe and judge 0." in choice["sentence"]
    assert choice["sentence"].endswith("no difference can be given.")


def test_a_choice_that_the_other_half_refutes_is_said() -> None:
    def candidate(grader: Any, fit: float, report: float) -> Candidate:
        first, second = rows_of(grader, fit), rows_of(grader, report)
        is_fit = np.isin(first.doc_ids, first.halves()[0].doc_ids)
        return replace(first, judge=np.where(is_fit[:, None], first.judge, second.judge)), None

    _, facts = choose([candidate("hydra", 3.0, 0.5), candidate("student", 0.5, 3.0)])
    sentence = facts["grader_choice"]["sentence"]
    assert sentence.startswith("The student grades.")
    assert "so not the better one" in sentence
