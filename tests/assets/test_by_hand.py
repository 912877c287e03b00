"""What people and deployments do to runs and events, and what automation makes of it."""

from pathlib import Path
from unittest.mock import patch

import dagster as dg
import pytest
from dagster import AssetKey, DagsterInstance

from nmoe_assets.component import build_definitions
from nmoe_assets.dagster_private import launch_backfill
from nmoe_assets.partitions import label_partitions, range_tags
from nmoe_core.config.run import Run
from tests.assets.daemon import GRADES, REGRADE_PLAN, Daemon, of_finished
from tests.assets.small_project import KEYS, tick

pytestmark = pytest.mark.filterwarnings("ignore::dagster.BetaWarning")
SCORES = AssetKey(["docs", "quality_scores"])
TOPICS = {f"{source}/topics" for source in ("code", "docs", "notes")}


@pytest.mark.long
def test_a_terminated_run_is_not_requested_again_and_its_readers_wait(daemon: Daemon) -> None:
    daemon.report("hydra", "calibration", version="2")
    assert daemon.tick().keys() >= {"docs/quality_scores"}
    run = daemon.start("grade", "docs/quality_scores")
    daemon.tick()
    daemon.instance.report_run_canceled(run)
    assert daemon.tick() == {}
    daemon.report("curation", "topic_model", version="2")
    assert daemon.tick().keys() == TOPICS
    for key in KEYS:
        daemon.report("docs", "topics", version="2" + key, partition=key)
    daemon.pass_checks({AssetKey(["docs", "topics"])})
    assert daemon.tick() == {}, "curated shards would be of stale scores"


@pytest.mark.long
def test_an_input_is_used_though_its_run_failed_at_another_asset(daemon: Daemon) -> None:
    run = daemon.start("curate", "curation/topic_model", "docs/topics")
    model = AssetKey(["curation", "topic_model"])
    daemon.made(run, "curation/topic_model", "2", None)
    daemon.pass_checks({model}, run.run_id)
    assert daemon.tick().keys() == TOPICS - {"docs/topics"}, "the run makes these"
    daemon.instance.report_run_failed(run)
    assert daemon.tick() == {"docs/topics": set(KEYS)}
    assert daemon.tick() == {}


def test_an_output_that_was_made_without_its_checks_is_used_once_they_pass(daemon: Daemon) -> None:
    run = daemon.start("curate", "docs/curated_manifest")
    daemon.made(run, "docs/curated_manifest", "2", None)
    ended = dg.DagsterEvent(event_type_value="PIPELINE_SUCCESS", job_name="curate")
    daemon.instance.report_dagster_event(ended, run_id=run.run_id)
    assert daemon.tick() == {}
    daemon.verify("docs", "curated_manifest")
    assert daemon.tick() == {"mixture/loader_plan": {None}}


@pytest.mark.long
def test_wiped_outputs_are_made_again_where_missing_ones_are_made(
    run: Run, in_memory: DagsterInstance
) -> None:
    made = run.with_settings({"automation.grade": "make"})
    daemon = of_finished(build_definitions(made), in_memory)
    daemon.instance.wipe_assets([SCORES])
    assert daemon.tick() == {"docs/quality_scores": set(KEYS)}
    assert daemon.tick() == {}


def test_outputs_of_a_deleted_run_are_made_again_where_missing_ones_are_made(
    run: Run, in_memory: DagsterInstance
) -> None:
    made = run.with_settings({"automation.grade": "make"})
    daemon = of_finished(build_definitions(made), in_memory)
    daemon.instance.wipe_assets([SCORES])
    scores = daemon.start("grade", "docs/quality_scores")
    daemon.makes(scores, "docs/quality_scores", "1")
    for _ in range(3):
        daemon.tick()
    daemon.instance.delete_run(scores.run_id)
    assert daemon.tick() == {"docs/quality_scores": set(KEYS)}


def test_wiped_outputs_are_left_where_existing_ones_are_followed(daemon: Daemon) -> None:
    daemon.instance.wipe_assets([SCORES])
    assert daemon.tick() == {}
    for key in KEYS:
        daemon.report("docs", "quality_scores", version="1" + key, partition=key)
    daemon.pass_checks({SCORES})
    # What the scores were is not known any more; a run finds the curated shards current.
    assert daemon.tick() == {"docs/curated": set(KEYS)}


@pytest.mark.long
def test_an_asset_that_waits_is_requested_though_a_source_was_added_meanwhile(
    run: Run, in_memory: DagsterInstance
) -> None:
    config = Path(run.path)
    mixture = config.with_name("mixture.toml").read_text()
    head, *tables = mixture.split("[[")
    kept = [table for table in tables if '"notes"' not in table]
    assert len(kept) == len(tables) - 1
    fewer = config.with_name("fewer.toml")
    fewer.write_text("[[".join([head, *kept]))
    before = build_definitions(run.with_settings({"mixture_toml": str(fewer)}))
    daemon = Daemon(before, in_memory)
    daemon.everything(sources=("code", "docs"))
    assert daemon.tick() == {}
    daemon.report("docs", "curated_manifest", version="2")
    daemon.check("docs", "curated_manifest", name="alignment", passed=False)
    daemon.report("hydra", "judge_head", version="2")
    daemon.check("hydra", "judge_head", name="promotion", passed=False)
    assert daemon.tick() == {}
    daemon.defs = build_definitions(run)
    assert daemon.tick() == {}
    daemon.source("notes")
    keys = daemon.defs.resolve_asset_graph().get_all_asset_keys()
    daemon.pass_checks({key for key in keys if key.path[0] == "notes"})
    daemon.check("docs", "curated_manifest", name="alignment", passed=True)
    daemon.check("hydra", "judge_head", name="promotion", passed=True)
    requested = daemon.tick()
    assert "mixture/loader_plan" in requested
    assert "hydra/calibration" not in requested, "documents of the new source have no labels"
    for key in label_partitions.get_partition_keys():
        daemon.report("hydra", "oracle_labels", version="1", partition=key)
    daemon.pass_checks({AssetKey(["hydra", "oracle_labels"])})
    assert "hydra/calibration" in daemon.tick()


@pytest.mark.long
@pytest.mark.parametrize("num_shards", [1, 3])
def test_ticks_go_on_if_a_source_gets_more_or_fewer_partitions(
    daemon: Daemon, run: Run, num_shards: int
) -> None:
    daemon.report("docs", "shards", version="2", partition="0001")
    daemon.check("docs", "shards", name="integrity", passed=False)
    assert "docs/quality_scores" not in daemon.tick()
    daemon.defs = build_definitions(run.with_settings({"prep.num_shards": num_shards}))
    assert "docs/quality_scores" not in daemon.tick()
    daemon.check("docs", "shards", name="integrity", passed=True)
    requested = daemon.tick().get("docs/quality_scores", set())
    assert requested == ({"0001"} if num_shards > 1 else set())


@pytest.mark.parametrize(("most", "ranges"), [(None, [KEYS]), (1, [KEYS[:1], KEYS[1:]])])
def test_all_partitions_that_automation_requests_are_made_in_one_run_or_in_runs_of_a_size(
    run: Run, in_memory: DagsterInstance, most: int | None, ranges: list[tuple[str, ...]]
) -> None:
    settings = {"automation.max_partitions_per_run": most} if most else None
    daemon = of_finished(build_definitions(Run(run.path, settings)), in_memory)
    daemon.report("hydra", "calibration", version="2")
    requests = tick("follow_changes", daemon.defs, in_memory, daemon.cursor).run_requests
    scores = AssetKey(["code", "quality_scores"])
    tags = [request.tags.items() for request in requests if scores in request.asset_selection]
    assert len(tags) == len(ranges)
    assert all(found >= range_tags(keys).items() for found, keys in zip(tags, ranges))


def test_a_tick_that_was_killed_is_repeated_under_the_same_keys_and_a_lost_cursor_asks_nothing(
    daemon: Daemon,
) -> None:
    daemon.report("hydra", "calibration", version="2")
    ticks = [tick("follow_changes", daemon.defs, daemon.instance, daemon.cursor) for _ in range(2)]
    first, again = ([one.run_key for one in found.run_requests] for found in ticks)
    assert first == again != []
    assert daemon.tick().keys() >= {"docs/quality_scores", "hydra/regrade_plan"}
    daemon.cursor = None
    assert daemon.tick() == {}, "the runs are in the event log"


def test_an_output_waits_for_a_partition_of_an_input_that_another_run_makes_again(
    daemon: Daemon,
) -> None:
    """The later run of the input has passed its checks, the earlier one is still at work."""
    slow = daemon.start("curate", "code/topics", partitions=["0001"])
    quick = daemon.start("curate", "code/topics", partitions=["0000"])
    daemon.made(quick, "code/topics", "2", "0000")
    daemon.end(quick)
    for key in KEYS:
        daemon.report("code", "quality_scores", version="2" + key, partition=key)
    daemon.pass_checks({AssetKey(["code", "quality_scores"])})
    assert daemon.tick() == {"code/curated": {"0000"}}
    daemon.made(slow, "code/topics", "2", "0001")
    daemon.end(slow)
    daemon.verify("code", "topics")
    assert daemon.tick() == {"code/curated": {"0001"}}


def test_a_partition_that_a_run_found_current_under_new_code_is_not_requested_after_later_events(
    daemon: Daemon, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nmoe_core.tasks.graph.settings.GRADE_CODE", "grade/next")
    daemon.defs = build_definitions(run)
    scores = "code/quality_scores"
    first = daemon.start("grade", scores, partitions=["0000"])
    daemon.made(first, scores, "2", "0000")
    daemon.end(first)
    daemon.end(daemon.start("grade", scores, partitions=["0001"]))
    assert scores not in daemon.tick()
    again = daemon.start("grade", scores, partitions=["0000"])
    daemon.made(again, scores, "3", "0000")
    daemon.end(again)
    assert scores not in daemon.tick()


def test_an_event_that_is_committed_after_later_ones_is_noticed(daemon: Daemon) -> None:
    log = daemon.instance.event_log_storage
    newest = log.get_maximum_record_id() or 0
    with patch.object(log, "get_maximum_record_id", lambda: newest + 100):
        assert daemon.tick() == {}
    daemon.report("hydra", "calibration", version="2")
    assert "docs/quality_scores" in daemon.tick()


def test_an_output_that_waits_is_named_with_its_input_by_the_tick(daemon: Daemon) -> None:
    daemon.report("docs", "curated_manifest", version="2")
    daemon.check("docs", "curated_manifest", name="alignment", passed=False)
    for _ in range(2):
        found = tick("follow_changes", daemon.defs, daemon.instance, daemon.cursor)
        daemon.cursor = found.cursor or daemon.cursor
        assert found.skip_message == (
            "mixture/loader_plan waits: docs/curated_manifest: it has not passed the check "
            "alignment"
        )


def test_nothing_is_requested_while_a_run_of_pipeline_makes_all_outputs(daemon: Daemon) -> None:
    run = daemon.start("pipeline")
    daemon.report("hydra", "calibration", version="2")
    assert daemon.tick() == {}
    daemon.instance.report_run_failed(run)
    assert daemon.tick() == GRADES | REGRADE_PLAN


def test_the_backfill_of_the_pipeline_is_one_that_outlives_a_restart_of_the_location(
    defs: dg.Definitions, in_memory: DagsterInstance
) -> None:
    """Dagster fails a backfill of a job if the location cannot be reached, one of assets waits."""
    keys = defs.resolve_asset_graph().materializable_asset_keys
    number = launch_backfill(in_memory, defs, keys, "pipeline", {})
    backfill = in_memory.get_backfill(number)
    assert backfill is not None
    assert backfill.is_asset_backfill
