"""What the daemon would request after changed content, by real ticks of `follow_changes`."""

import dagster as dg
import pytest
from dagster import AssetKey, DagsterInstance

from nmoe_assets.component import build_definitions
from nmoe_assets.inputs import CHANGED_MEANWHILE
from nmoe_core.config.run import Run
from tests.assets.daemon import (
    CALIBRATION,
    GRADES,
    HEADS_AGAIN,
    PLAN,
    REGRADE_PLAN,
    Daemon,
    of_each,
    of_finished,
)
from tests.assets.dagster_internals import AssetCheckEvaluationPlanned
from tests.assets.small_project import KEYS

# Dagster's own tester uses a parameter that Dagster marks beta.
pytestmark = pytest.mark.filterwarnings("ignore::dagster.BetaWarning")


def test_files_written_again_unchanged_request_nothing(daemon: Daemon) -> None:
    daemon.everything()
    assert daemon.tick() == {}
    daemon.report("docs", "quality_scores", version="10001", partition="0001")
    assert daemon.tick() == {}


ONE = {"0001"}
STUDENT: dict[str, set[str | None]] = {"hydra/student": {None}}


@pytest.mark.parametrize(
    "changes",
    [
        {"hydra/calibration": GRADES | REGRADE_PLAN},
        # Grades wait for the calibration of new heads; nothing but heads follows labels yet.
        {"hydra/judge_head": CALIBRATION, "hydra/calibration": GRADES | REGRADE_PLAN},
        {"hydra/oracle_labels val-03": STUDENT, "hydra/student": HEADS_AGAIN},
        {"docs/shards 0001": {"docs/quality_scores": ONE, "docs/topics": ONE} | REGRADE_PLAN},
        {
            # Where shards begin within a window follows from what earlier ones keep.
            "docs/quality_scores 0001": {"docs/curated": set(KEYS)},
            "docs/curated 0000": {},
            "docs/curated 0001": {"docs/curated_manifest": {None}},
            "docs/curated_manifest": PLAN,
        },
    ],
)
def test_each_change_requests_each_asset_that_reads_it_once(
    daemon: Daemon, changes: dict[str, dict[str, set[str | None]]]
) -> None:
    for changed, requested in changes.items():
        key, _, partition = changed.partition(" ")
        daemon.report(*key.split("/"), version="2", partition=partition or None)
        assert daemon.tick() == requested
    assert daemon.tick() == {}


@pytest.mark.parametrize(
    ("grader", "behind_student"), [("student", CALIBRATION), ("auto", HEADS_AGAIN)]
)
def test_a_new_student_leads_to_new_grades_where_it_may_grade(
    run: Run, in_memory: DagsterInstance, grader: str, behind_student: dict[str, set[str | None]]
) -> None:
    defs = build_definitions(Run(run.path, {"grading.grader": grader}))
    names = {key.path[-1] for key in defs.resolve_asset_graph().get_all_asset_keys()}
    heads = names & {"probe_head", "judge_head"}
    assert len(heads) == (0 if grader == "student" else 2)
    daemon = of_finished(defs, in_memory)
    daemon.report("hydra", "student", version="2")
    assert daemon.tick() == behind_student
    for name in heads:
        daemon.report("hydra", name, version="2")
    assert daemon.tick() == (CALIBRATION if heads else {})
    daemon.report("hydra", "calibration", version="2")
    assert daemon.tick() == GRADES | REGRADE_PLAN


@pytest.mark.parametrize(("is_seen", "ticks"), [(True, 1), (True, 0), (False, 1)])
def test_an_input_that_changes_while_its_output_is_made_requests_it_again(
    daemon: Daemon, ticks: int, *, is_seen: bool
) -> None:
    """Also where no tick lies between the run's start, the change and the run's end."""
    daemon.report("hydra", "calibration", version="2")
    assert daemon.tick().keys() >= GRADES.keys()
    run = daemon.start("grade", "code/quality_scores")
    if is_seen:
        assert daemon.tick() == {}
    daemon.report("hydra", "calibration", version="3")
    for _ in range(ticks):
        assert "code/quality_scores" not in daemon.tick() or not is_seen, "it is at work"
    daemon.instance.add_run_tags(run.run_id, {CHANGED_MEANWHILE: "true"})  # as `CurrentInputs`
    daemon.makes(run, "code/quality_scores", "of 2")
    assert daemon.tick()["code/quality_scores"] == set(KEYS)
    assert daemon.tick() == {}, "and once"
    daemon.makes(daemon.start("grade", "code/quality_scores"), "code/quality_scores", "of 3")
    assert daemon.tick() == {"code/curated": set(KEYS)}


def test_a_run_that_began_after_its_input_changed_is_enough(daemon: Daemon) -> None:
    daemon.report("hydra", "calibration", version="2")
    assert daemon.tick().keys() >= GRADES.keys()
    daemon.report("hydra", "calibration", version="3")
    run = daemon.start("grade", "code/quality_scores")
    daemon.tick()
    daemon.makes(run, "code/quality_scores", "of 3")
    assert "code/quality_scores" not in daemon.tick()


@pytest.mark.parametrize("is_made_after", [False, True])
def test_of_two_events_between_ticks_the_later_one_counts(
    daemon: Daemon, *, is_made_after: bool
) -> None:
    if is_made_after:
        daemon.report("code", "shards", version="2", partition="0001")
    daemon.makes(daemon.start("grade", "code/quality_scores"), "code/quality_scores", "2")
    if not is_made_after:
        daemon.report("code", "shards", version="2", partition="0001")
    requested = daemon.tick().get("code/quality_scores", set())
    assert requested == (set() if is_made_after else {"0001"})


def test_outputs_that_a_run_made_and_read_are_not_requested_again(daemon: Daemon) -> None:
    run = daemon.start("curate", "code/topics", "code/curated", "code/curated_manifest")
    assert daemon.tick() == {}
    for name in ("topics", "curated"):
        for key in KEYS:
            daemon.made(run, f"code/{name}", "2" + key, key)
    assert daemon.tick() == {}, "the run will make the manifest"
    daemon.made(run, "code/curated_manifest", "2", None)
    daemon.end(run)
    assert daemon.tick() == {"mixture/loader_plan": {None}}
    assert daemon.tick() == {}


def test_an_input_that_failed_a_blocking_check_triggers_no_asset(daemon: Daemon) -> None:
    daemon.report("docs", "curated_manifest", version="2")
    daemon.check("docs", "curated_manifest", name="alignment", passed=False)
    assert daemon.tick() == {}
    daemon.report("hydra", "probe_head", version="2")
    daemon.check("hydra", "probe_head", name="promotion", passed=False)
    assert daemon.tick() == {}
    daemon.check("docs", "curated_manifest", name="alignment", passed=True)
    assert daemon.tick() == {"mixture/loader_plan": {None}}
    daemon.report("hydra", "probe_head", version="3")
    daemon.check("hydra", "probe_head", name="promotion", passed=True)
    daemon.check("hydra", "probe_head", name="baselines", passed=False)  # which only warns
    assert daemon.tick() == {"hydra/calibration": {None}}


def test_an_unfinished_or_ended_check_has_not_passed(daemon: Daemon) -> None:
    daemon.report("docs", "curated_manifest", version="2")
    daemon.check("docs", "curated_manifest", name="alignment", passed=False)
    planned = dg.DagsterEvent(
        event_type_value="ASSET_CHECK_EVALUATION_PLANNED",
        job_name="verify",
        event_specific_data=AssetCheckEvaluationPlanned(
            asset_key=AssetKey(["docs", "curated_manifest"]), check_name="alignment"
        ),
    )
    run = daemon.start("curate", "docs/topics")
    daemon.instance.report_dagster_event(planned, run.run_id)
    assert daemon.tick() == {}
    daemon.instance.report_run_canceled(run)
    assert daemon.tick() == {}
    daemon.check("docs", "curated_manifest", name="alignment", passed=True)
    assert daemon.tick() == {"mixture/loader_plan": {None}}


def test_no_grades_of_a_shard_or_calibration_that_a_blocking_check_did_not_pass(
    daemon: Daemon,
) -> None:
    daemon.report("docs", "shards", version="2", partition="0001")
    daemon.check("docs", "shards", name="integrity", passed=False)
    assert "docs/quality_scores" not in daemon.tick()
    daemon.report("hydra", "calibration", version="2")
    daemon.check("hydra", "calibration", name="thresholds", passed=False)
    assert not daemon.tick().keys() & GRADES.keys()
    daemon.check("docs", "shards", name="integrity", passed=True)
    daemon.check("hydra", "calibration", name="thresholds", passed=True)
    assert daemon.tick().keys() >= GRADES.keys()


def test_no_reader_of_shards_is_requested_while_their_checksums_fail(daemon: Daemon) -> None:
    daemon.check("docs", "manifest", name="checksums", passed=False)
    daemon.report("hydra", "calibration", version="2")
    requested = daemon.tick()
    assert "docs/quality_scores" not in requested
    assert requested.keys() >= {"code/quality_scores", "notes/quality_scores"}
    daemon.check("docs", "manifest", name="checksums", passed=True)
    assert daemon.tick().keys() >= {"docs/quality_scores"}


def test_curated_shards_wait_for_scores_that_are_due_and_blocked(daemon: Daemon, run: Run) -> None:
    """A run over them would refuse the scores."""
    daemon.report("hydra", "calibration", version="2")
    daemon.check("hydra", "calibration", name="thresholds", passed=False)
    daemon.report("curation", "topic_model", version="2")
    assert daemon.tick().keys() == of_each("topics").keys()
    for key, partitions in of_each("topics").items():
        for partition in partitions:
            daemon.report(*key.split("/"), version="2", partition=partition)
    daemon.pass_checks({AssetKey(key.split("/")) for key in of_each("topics")})
    assert daemon.tick() == {}


@pytest.mark.parametrize("order", ["auto", "shuffle"])
def test_curated_shards_wait_for_stale_scores_that_were_requested_in_vain(
    run: Run, in_memory: DagsterInstance, order: str
) -> None:
    """An order that fills windows needs the scores of all shards, a shuffle those of its own."""
    daemon = of_finished(build_definitions(run.with_settings({"curation.order": order})), in_memory)
    daemon.report("docs", "shards", version="2", partition="0001")
    assert daemon.tick()["docs/quality_scores"] == {"0001"}
    for key in KEYS:
        daemon.report("docs", "topics", version="2" + key, partition=key)
    assert daemon.tick() == ({"docs/curated": {"0000"}} if order == "shuffle" else {})
    daemon.report("docs", "quality_scores", version="2", partition="0001")
    assert daemon.tick() == {"docs/curated": {"0001"} if order == "shuffle" else set(KEYS)}


def test_stages_that_hold_a_gpu_are_in_its_pool(defs: dg.Definitions) -> None:
    graph = defs.resolve_asset_graph()
    pools = {"/".join(key.path): graph.get(key).pools for key in graph.materializable_asset_keys}
    held = {"oracle_labels", "probe_head", "judge_head", "calibration", "regrade_plan"}
    in_pool = {f"hydra/{name}" for name in held}
    assert {key for key, names in pools.items() if "gpu" in names} == in_pool | GRADES.keys()
