"""`nmoe plan`: what it says will be done and changed is what is then done and changed."""

import json
import shutil
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from loader.files.checksummed_json import sealed
from nmoe_assets.component import build_definitions
from nmoe_core.cli import main
from nmoe_core.config.run import Run
from nmoe_core.tasks.checks import check_regrade
from nmoe_core.tasks.graph import settings
from nmoe_core.tasks.hydra import calibrate_heads, grade_shards
from nmoe_core.tasks.preview import RegradePlan, plan_regrade
from tests.assets.small_project import SOURCES
from tests.project import read_rows, said


@pytest.fixture
def run(own_project: Path) -> Run:
    return Run(own_project / "run.toml")


def decisions(run: Run) -> dict[str, str]:
    rows = read_rows(*run.tree.quality.rglob("quality_scores.jsonl"))
    return {row["doc_id"]: row["decision"] for row in rows}


def grade(run: Run) -> int:
    """Grade everything; the number of decisions that flipped."""
    before = decisions(run)
    for source in SOURCES:
        grade_shards(run, source, (0, 1))
    after = decisions(run)
    assert before.keys() == after.keys()
    return sum(before[name] != after[name] for name in before)


def move_threshold(run: Run, **taus: float) -> None:
    path = run.tree.calibration / "calibration_summary.json"
    path.write_text(json.dumps(sealed(json.loads(path.read_text()) | taus)))


def test_a_finished_run_has_nothing_to_do(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    plan = said(capsys, "plan", "--config", run.path)
    assert plan["outputs"] == []
    assert plan["num_current"] > 60
    assert plan["regrade"]["shards"] == []
    assert plan["regrade"]["current_shards"] == 6
    assert plan["regrade"]["seconds"] == 0
    assert plan["curated"] == {source: {} for source in SOURCES}
    assert {(s["made"], s["num_shards"], s["is_changed"]) for s in plan["splits"]} == {
        (2, 2, False),
        (1, 1, False),
    }


def test_flips_of_a_new_threshold_are_counted_exactly(run: Run) -> None:
    taus = json.loads((run.tree.calibration / "calibration_summary.json").read_text())
    move_threshold(run, tau_keep=(taus["tau_keep"] + 1) / 2)
    plan = plan_regrade(run, SOURCES)
    assert {(s.source, s.shard) for s in plan.shards} == {
        (source, f"shard_000{i}") for source in SOURCES for i in (0, 1)
    }
    assert {s.reasons for s in plan.shards} == {("input hydra/calibration",)}
    low, high = plan.may_flip
    flipped = grade(run)
    assert low == flipped
    assert low > 0
    assert high - low == sum(s.open_flips for s in plan.shards)
    assert plan_regrade(run, SOURCES).shards == []


def test_grades_follow_a_way_of_multiplying_whose_numbers_differ_and_no_form_in_memory(
    run: Run,
) -> None:
    """To `grouped` and back: by the plan, by the grading task and by the asset's code version."""
    forms = [run.with_settings({"backbone.moe_backend": form}) for form in ("decoded", "packed")]
    assert {settings.grades(form).version for form in forms} == {settings.grades(run).version}
    assert {settings.calibration(form).version for form in forms} == {
        settings.calibration(run).version
    }
    assert plan_regrade(forms[1], SOURCES).shards == []
    grouped = run.with_settings({"backbone.moe_backend": "grouped"})
    assert settings.grades(grouped).version != settings.grades(run).version
    assert settings.calibration(grouped).version != settings.calibration(run).version
    hub = run.with_settings({"backbone.moe_backend": "hub"})
    assert len({settings.grades(each).version for each in (run, grouped, hub)}) == 3
    assert len({settings.calibration(each).version for each in (run, grouped, hub)}) == 3
    assert _changed(plan_regrade(hub, SOURCES)) == {"backbone.moe_backend"}
    before = decisions(run)
    for now in (grouped, run):
        plan = plan_regrade(now, SOURCES)
        assert _changed(plan) == {"backbone.moe_backend"}
        calibrate_heads(now)
        grade(now)
        assert plan_regrade(now, SOURCES).shards == []
    assert decisions(run) == before
    by_student = [each.with_settings({"grading.grader": "student"}) for each in (run, grouped)]
    assert settings.grades(by_student[0]) == settings.grades(by_student[1])


def _changed(plan: RegradePlan) -> set[str]:
    """The keys of the settings for which shards are to be graded."""
    return {reason.partition(":")[0] for shard in plan.shards for reason in shard.reasons}


@pytest.mark.slow
def test_documents_that_no_longer_leave_at_the_probe_stay_open(run: Run) -> None:
    before = json.loads((run.tree.calibration / "calibration_summary.json").read_text())
    move_threshold(run, tau_probe=1.0, tau_keep=1.0, tau_drop=1.0)
    grade(run)
    assert set(decisions(run).values()) == {"drop"}
    move_threshold(run, **{name: before[name] for name in ("tau_probe", "tau_keep", "tau_drop")})
    plan = plan_regrade(run, SOURCES)
    assert plan.may_flip == (0, len(decisions(run)))
    assert 0 < grade(run) <= plan.may_flip[1]


def test_a_sample_bounds_the_flips_and_measures_the_time(run: Run) -> None:
    other = run.with_settings({"grading.early_exit": False})
    blind = plan_regrade(other, SOURCES)
    assert blind.may_flip == (0, len(decisions(run)))
    assert blind.seconds is not None  # by what calibration took
    plan = plan_regrade(other, SOURCES, sample_documents=60)
    assert {s.reasons for s in plan.shards} == {("grading.early_exit: True -> False",)}
    assert 50 <= plan.sampled <= 60  # small shards have fewer than their share
    assert plan.seconds is not None
    assert plan.seconds > 0
    assert plan.may_flip[0] <= grade(other) <= plan.may_flip[1] < len(decisions(run))


def test_heads_without_their_calibration_are_named_as_the_problem(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    move_threshold(run, heads_digest="f" * 64)
    assert main(["plan", "--config", str(run.path)]) == 0
    assert "calibration was fitted for other heads" in capsys.readouterr().out


def test_the_table_names_changed_sources_stale_grades_and_their_dependents(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    with open(run.base / "in" / "docs.jsonl", "a", encoding="utf-8") as file:
        file.write('{"text": "a document that is new since the shards were made, of some words"}\n')
    shutil.rmtree(run.tree.quality / "code" / "shard_0000")
    stale = {(s.source, s.shard): s.reasons for s in plan_regrade(run, SOURCES).shards}
    assert stale["code", "shard_0000"] == ("not made yet",)
    assert stale["docs", "shard_0001"][0].startswith("after docs/shards")
    scores = run.tree.quality / "notes" / "shard_0001" / "quality_scores.jsonl"
    scores.write_text(scores.read_text().replace('"keep"', '"band"'))
    assert main(["plan", "--config", str(run.path), "--sample", "0"]) == 0
    text = capsys.readouterr().out
    lines = {tuple(line.split()[:2]): line for line in text.splitlines() if line.strip()}
    assert lines["prep", "docs/shards"].endswith("input docs/documents")
    assert "not made yet" in text
    assert "the file was edited or damaged: grade again" in lines["grade", "notes/quality_scores"]
    assert "made again if its inputs change" in lines["curate", "docs/curated"]


def test_the_asset_shows_the_plan_and_warns_of_too_many_flips(run: Run) -> None:
    move_threshold(run, tau_keep=1.0)
    job = dg.define_asset_job("plan_only", selection=[dg.AssetKey(["hydra", "regrade_plan"])])
    defs = dg.Definitions.merge(build_definitions(run), dg.Definitions(jobs=[job]))
    config: dict[str, Any] = {"ops": {"hydra__regrade_plan": {"config": {"sample_documents": 0}}}}
    with dg.DagsterInstance.ephemeral() as instance:
        done = defs.resolve_job_def("plan_only").execute_in_process(
            instance=instance, run_config=config
        )
    [event] = done.get_asset_materialization_events()
    facts = {k: v.value for k, v in event.materialization.metadata.items()}
    assert facts["stale_shards"] == 6
    assert facts["documents_to_grade"] == len(decisions(run))
    assert facts["may_flip_most"] >= facts["may_flip_least"] > 0
    assert "decisions may flip" in facts["summary"]
    assert len(facts["stale"].records) == 6
    [check] = done.get_asset_check_evaluations()
    assert (check.check_name, check.passed) == ("flips", True)
    plan = plan_regrade(run, SOURCES)
    share = plan.may_flip[1] / plan.documents
    for most, passed in ((share + 0.01, True), (share - 0.01, False)):
        held = run.with_settings({"checks.max_flip_share": most})
        assert check_regrade(held, plan)["flips"].passed == passed
