"""`pipeline` executes the job of each task in order, until one fails or it is told to stop."""

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from nmoe_assets.component import build_definitions
from nmoe_assets.dagster_private import show_under_location
from nmoe_assets.ops.jobs import TaskJob, console
from nmoe_assets.ops.pipeline import PART_OF, is_divided, pipeline_job, step_error
from nmoe_assets.resources import Machine
from nmoe_core.config.run import Run
from nmoe_core.engine import make_tiny_checkpoint
from tests.assets.small_project import environment, small_project
from tests.project import in_foreground


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
                around = instance.get_runs(dg.RunsFilter(job_name="pipeline"))[0]
                if is_terminated:
                    instance.report_run_canceling(around)
                os.kill(os.getpid(), asked)

        monkeypatch.setattr(instance, "handle_new_event", handle_and_stop)
        outcome = run_two_parts(instance)
        assert parts(instance) == ["first"]
        status = instance.get_run_by_id(outcome.run_id).status
        stopped = dg.DagsterRunStatus.CANCELED if is_terminated else dg.DagsterRunStatus.FAILURE
        assert status == stopped


def test_all_parts_run_in_order_and_are_shown_under_the_location() -> None:
    with dg.DagsterInstance.ephemeral() as instance:
        assert run_two_parts(instance).success
        assert parts(instance) == ["second", "first"], "newest first"
        # The pages of jobs list the runs that have this tag, and the timeline those of a location.
        places = {run.tags.get(".dagster/repository") for run in instance.get_runs()}
        assert places == {"__repository__@nmoe_assets.definitions"}
        origins = [run.remote_job_origin for run in instance.get_runs()]
        names = [(origin.location_name, origin.job_name) for origin in origins if origin]
        location = "nmoe_assets.definitions"
        assert names == [(location, "second"), (location, "first"), (location, "pipeline")]
        assert {run.tags["dagster/max_retries"] for run in instance.get_runs()} == {"0"}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, False),
        ({"automation.max_partitions_per_run": 1}, True),
        ({"compute.pods.grade.gpus": 1}, True),
    ],
)
def test_the_tasks_of_a_launched_pipeline_get_runs_of_their_own_if_a_setting_divides_them(
    instance: dg.DagsterInstance, settings: dict[str, object], expected: bool
) -> None:
    run = Run("demo", settings)
    assert is_divided(run, launched(instance), instance) is expected
    by_command = dg.DagsterRun("pipeline")
    assert not is_divided(run, by_command, instance)


def test_the_tasks_of_a_launched_pipeline_get_runs_of_their_own_on_other_machines(
    in_memory: dg.DagsterInstance,
) -> None:
    assert not isinstance(in_memory.run_launcher, dg.DefaultRunLauncher)
    assert is_divided(Run("demo"), launched(in_memory), in_memory)


def launched(instance: dg.DagsterInstance) -> dg.DagsterRun:
    """A run of `pipeline` that the webserver created."""
    run = instance.add_run(dg.DagsterRun("pipeline"))
    show_under_location(instance, run, "a.location")
    stored = instance.get_run_by_id(run.run_id)
    assert stored is not None
    return stored


def test_the_console_shows_a_line_per_part_and_warnings(capfd: pytest.CaptureFixture[str]) -> None:
    with dg.DagsterInstance.ephemeral() as instance:
        assert run_two_parts(instance).success
        runs = instance.get_runs()
        logged = [entry.user_message for run in runs for entry in instance.all_logs(run.run_id)]
    assert logged.count("a shard is done") == 2
    lines = [line.rpartition(" - ")[2] for line in capfd.readouterr().err.splitlines()]
    assert [line.partition(":")[0] for line in lines if line] == [
        *("a shard is odd", "first (1 of 2)", "a shard is odd", "second (2 of 2)")
    ]


def test_a_part_that_fails_ends_the_job_and_is_linked() -> None:
    with dg.DagsterInstance.ephemeral() as instance:
        outcome = run_two_parts(instance, fails="first")
        [part] = [run for run in instance.get_runs() if PART_OF in run.tags]
    [failed] = [event for event in outcome.all_events if event.is_step_failure]
    assert step_error(failed) == f"first failed: the disk is full (run {part.run_id})"
    link = failed.step_failure_data.user_failure_data.metadata["first"]
    assert link == dg.MetadataValue.dagster_run(part.run_id)


def parts(instance: dg.DagsterInstance) -> list[str]:
    return [run.job_name for run in instance.get_runs() if PART_OF in run.tags]


def run_two_parts(instance: dg.DagsterInstance, fails: str = "") -> dg.ExecuteInProcessResult:
    def part(name: str) -> dg.JobDefinition:
        @dg.op(name=f"{name}_op", required_resource_keys={"machine"})
        def work(context: dg.OpExecutionContext) -> None:
            context.log.info("a shard is done")
            context.log.warning("a shard is odd")
            if name == fails:
                raise OSError("the disk is full")

        @dg.job(
            name=name,
            executor_def=dg.in_process_executor,
            logger_defs={"console": dg.colored_console_logger},  # that the pipeline quiets
        )
        def job() -> None:
            work()

        return job

    run = Run("demo")
    tasks = [TaskJob("first", ()), TaskJob("second", ())]
    defined = dg.Definitions(
        jobs=[pipeline_job(run, tasks, lambda: defined), part("first"), part("second")],
        resources={"machine": Machine()},
    )
    return defined.resolve_job_def("pipeline").execute_in_process(
        instance=instance, raise_on_error=False, run_config=console("INFO")
    )


@pytest.mark.parametrize("missing", ["backbone", "oracle.engine"])
def test_a_pipeline_without_its_checkpoint_ends_before_any_part(
    tmp_path: Path, missing: str
) -> None:
    checkpoints = {
        table: {"checkpoint": "absent" if table == missing else "there"}
        for table in ("backbone", "oracle.engine")
    }
    oracle = {"kind": "engine", "engine": checkpoints["oracle.engine"]}
    (tmp_path / "project" / "there").mkdir(parents=True)
    run = small_project(tmp_path / "project", oracle=oracle, backbone=checkpoints["backbone"]).run
    with dg.DagsterInstance.ephemeral() as instance:
        job = build_definitions(run).resolve_job_def("pipeline")
        outcome = job.execute_in_process(instance=instance, raise_on_error=False)
        assert parts(instance) == []
    [failed] = [event for event in outcome.all_events if event.is_step_failure]
    assert "absent: no checkpoint at this path" in step_error(failed)
    assert not run.tree.root.exists()


@pytest.mark.parametrize(
    ("backbone", "code"), [("absent", "E-CHECKPOINT-MISSING"), ("llama", "E-TOKENIZER-NAME")]
)
def test_nmoe_run_is_refused_before_any_task_where_the_backbone_cannot_read(
    tmp_path: Path, backbone: str, code: str
) -> None:
    """The Llama has no tokenizer of its own, and weights that pass for trained ones."""
    project = small_project(tmp_path / "project", backbone={"checkpoint": backbone})
    llama = project.directory / "llama"
    make_tiny_checkpoint(llama, family="llama", vocab_size=300, num_layers=1)
    config = json.loads((llama / "config.json").read_text())
    del config["nmoe_recipe"]
    (llama / "config.json").write_text(json.dumps(config))
    done = subprocess.run(
        in_foreground("run", "--config", project.config),
        env=environment(project.directory),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith(f"ERROR [{code}]")
    assert not project.run.tree.root.exists()
