"""A named job runs its parts in order, until one fails or it is told to stop."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from nmoe_assets.definitions import build_definitions
from nmoe_assets.jobs import PART_OF, StageJob, innermost_error, named_jobs
from nmoe_assets.resources import Machine
from nmoe_core.config.run import Run


@pytest.mark.parametrize("asked", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("is_terminated", [True, False])
def test_no_part_starts_after_an_interrupt_at_the_end_of_the_part_before(
    monkeypatch: pytest.MonkeyPatch, asked: signal.Signals, is_terminated: bool
) -> None:
    with dg.DagsterInstance.ephemeral() as instance:
        handle = instance.handle_new_event

        def handle_and_stop(event: dg.EventLogEntry, **how: Any) -> None:
            handle(event, **how)
            if (
                event.job_name == "first"
                and event.dagster_event_type == dg.DagsterEventType.RUN_SUCCESS
            ):
                around = instance.get_runs(dg.RunsFilter(job_name="all"))[0]
                if is_terminated:
                    instance.report_run_canceling(around)
                os.kill(os.getpid(), asked)

        monkeypatch.setattr(instance, "handle_new_event", handle_and_stop)
        outcome = _run_two_parts(instance)
        parts = [run.job_name for run in instance.get_runs() if PART_OF in run.tags]
        assert parts == ["first"]
        status = instance.get_run_by_id(outcome.run_id).status
        stopped = dg.DagsterRunStatus.CANCELED if is_terminated else dg.DagsterRunStatus.FAILURE
        assert status == stopped


def test_parts_that_nothing_interrupts_all_run() -> None:
    with dg.DagsterInstance.ephemeral() as instance:
        assert _run_two_parts(instance).success
        parts = [run.job_name for run in instance.get_runs() if PART_OF in run.tags]
        assert sorted(parts) == ["first", "second"]


def test_a_part_that_fails_ends_the_job_and_is_linked() -> None:
    with dg.DagsterInstance.ephemeral() as instance:
        outcome = _run_two_parts(instance, fails="first")
        [part] = [run for run in instance.get_runs() if PART_OF in run.tags]
    [failed] = [event for event in outcome.all_events if event.is_step_failure]
    assert innermost_error(failed) == f"first failed: the disk is full (run {part.run_id})"
    link = failed.step_failure_data.user_failure_data.metadata["first"]
    assert link == dg.MetadataValue.dagster_run(part.run_id)


def _run_two_parts(instance: dg.DagsterInstance, fails: str = "") -> dg.ExecuteInProcessResult:
    def part(name: str) -> dg.JobDefinition:
        @dg.op(name=f"{name}_op")
        def work() -> None:
            if name == fails:
                raise OSError("the disk is full")

        @dg.job(
            name=name,
            executor_def=dg.in_process_executor,
            logger_defs={"console": dg.colored_console_logger},  # that the parts are told to quiet
        )
        def job() -> None:
            work()

        return job

    stages = {"all": [StageJob("first", ()), StageJob("second", ())]}
    jobs = {job.name: job for job in named_jobs(stages, part)}
    defined = dg.Definitions(jobs=[jobs["all"]], resources={"machine": Machine()})
    return defined.resolve_job_def("all").execute_in_process(
        instance=instance, raise_on_error=False
    )


@pytest.mark.parametrize("missing", ["backbone", "oracle.engine"])
def test_a_pipeline_without_its_checkpoint_ends_before_any_part(
    tmp_path: Path, make_project: Callable[..., Path], missing: str
) -> None:
    path = make_project(tmp_path / "project")
    text = path.read_text().replace('[backbone]\nkind = "tiny"\n', "")
    text = text.replace("[oracle]", '[oracle]\nkind = "engine"')
    (tmp_path / "project" / "there").mkdir()
    for table in ("backbone", "oracle.engine"):
        text += f'\n[{table}]\ncheckpoint = "{"absent" if table == missing else "there"}"\n'
    path.write_text(text)
    run = Run(path)
    with dg.DagsterInstance.ephemeral() as instance:
        job = build_definitions(run).resolve_job_def("pipeline")
        outcome = job.execute_in_process(instance=instance, raise_on_error=False)
        assert not [part for part in instance.get_runs() if PART_OF in part.tags]
    [failed] = [event for event in outcome.all_events if event.is_step_failure]
    assert "absent: no checkpoint here" in innermost_error(failed)
    assert not run.paths.root.exists()
