"""The launcher of one machine knows the dead from the living."""

import os
import subprocess
import sys
import time

import dagster as dg
import pytest

from nmoe_assets import launcher
from nmoe_assets.dagster_private import WorkerStatus
from nmoe_assets.launcher import LocalRunLauncher
from nmoe_assets.partitions import range_tags
from tests.assets.dagster_internals import (
    answering_location,
    at_work,
    ended_process,
    run_of_another_location,
    time_out_start,
)


def _health(instance: dg.DagsterInstance, *pids: int) -> WorkerStatus:
    """Of a run that told these process ids, one after the other."""
    assert isinstance(instance.run_launcher, LocalRunLauncher)
    run = instance.add_run(dg.DagsterRun(job_name="grade", status=dg.DagsterRunStatus.STARTED))
    for pid in pids:
        at_work(instance, run, pid)
    instance.report_engine_event("of something else", run)
    return instance.run_launcher.check_run_worker_health(run).status


def test_the_daemon_watches_runs_and_starts_lost_ones_again(instance: dg.DagsterInstance) -> None:
    assert instance.run_monitoring_enabled
    assert instance.run_launcher.supports_check_run_worker_health
    assert instance.run_retries_enabled
    assert instance.run_retries_max_retries == 2
    assert not instance.run_retries_retry_on_asset_or_op_failure


def test_a_queued_run_waits_for_a_code_location_that_is_starting(
    instance: dg.DagsterInstance,
) -> None:
    queue = instance.get_concurrency_config().run_queue_config
    assert queue is not None
    assert queue.max_user_code_failure_retries * queue.user_code_failure_retry_delay == 300  # s
    assert queue.max_concurrent_runs == 4, "the limit beside it holds"


def test_a_run_lives_as_long_as_the_process_it_named_last(instance: dg.DagsterInstance) -> None:
    ended = ended_process()
    assert _health(instance) == WorkerStatus.RUNNING, "it has named none yet"
    assert _health(instance, os.getpid()) == WorkerStatus.RUNNING
    assert _health(instance, ended, os.getpid()) == WorkerStatus.RUNNING
    assert _health(instance, ended) == WorkerStatus.NOT_FOUND
    assert _health(instance, os.getpid(), ended) == WorkerStatus.NOT_FOUND


def test_a_run_that_ended_with_its_code_location_is_lost_only_when_that_answers_again(
    instance: dg.DagsterInstance,
) -> None:
    asked = instance.run_launcher
    assert isinstance(asked, LocalRunLauncher)

    def status(port: int) -> WorkerStatus:
        run = instance.add_run(run_of_another_location(port))
        at_work(instance, run, ended_process())
        return asked.check_run_worker_health(run).status

    assert status(1) == WorkerStatus.RUNNING, "Dagster could not start it again yet"
    with answering_location() as port:
        assert status(port) == WorkerStatus.NOT_FOUND


def test_a_process_that_ended_and_was_not_waited_for_is_gone(instance: dg.DagsterInstance) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    deadline = time.monotonic() + 120
    while _health(instance, process.pid) == WorkerStatus.RUNNING and time.monotonic() < deadline:
        time.sleep(0.05)
    assert _health(instance, process.pid) == WorkerStatus.NOT_FOUND
    process.wait()


def test_an_id_that_was_given_again_is_another_process(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "_CLOCK_S", -3600.0)  # as if it had been told an hour before
    assert _health(instance, os.getpid()) == WorkerStatus.NOT_FOUND


@pytest.mark.parametrize("was_launched", [False, True])
def test_a_refused_run_fails_with_its_partitions_and_is_not_started_again(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch, was_launched: bool
) -> None:
    """Dagster refuses a run that names a partition that does not exist before it queues it."""
    run = instance.add_run(dg.DagsterRun(job_name="grade", tags=range_tags(["0001", "0009"])))
    if was_launched:
        starts = dg.DagsterEvent(event_type_value="PIPELINE_STARTING", job_name="grade")
        instance.report_dagster_event(starts, run.run_id)
    time_out_start(instance, run.run_id, monkeypatch)
    ended = instance.get_run_by_id(run.run_id)
    assert ended is not None
    assert ended.status == dg.DagsterRunStatus.FAILURE
    assert ended.tags["dagster/will_retry"] == str(was_launched).lower()
    logged = instance.all_logs(run.run_id, of_type=dg.DagsterEventType.RUN_FAILURE)
    told = [entry.get_dagster_event().message or "" for entry in logged]
    assert ["0001 to 0009" in text for text in told] == [not was_launched]
