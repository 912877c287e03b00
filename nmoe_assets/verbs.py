"""`nmoe run`, `nmoe ui`: a project's jobs and pages, with Dagster's home and environment set up."""

import importlib.resources
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import dagster as dg

from nmoe_assets.assets.cost import Stopwatch
from nmoe_assets.assets.names import named
from nmoe_assets.component import build_definitions
from nmoe_assets.ops.interrupts import interrupts_since
from nmoe_assets.ops.jobs import task_jobs
from nmoe_assets.ops.pipeline import innermost_error
from nmoe_core.base.errors import ConfigError
from nmoe_core.config.run import Run
from nmoe_core.prep.mixture import run_sources

# The console shows a line per task; the UI keeps every event.
_QUIET = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}
# Fewer commits, and no call home; a value of the user's environment stands.
_ENVIRONMENT = {
    "DAGSTER_EVENT_BATCH_SIZE": "1000",
    "DAGSTER_MAX_PARTITIONS_FOR_DA_TIMESTAMP_FETCH": "10000",
    "DAGSTER_DISABLE_TELEMETRY": "yes",
}


def run_tasks(run: Run, names: Sequence[str]) -> int:
    """Execute the jobs of these tasks, or of all; 1 where one failed, 130 after an interrupt.
    Raises ConfigError where there is no such task."""
    _set_up(run)
    tasks = [job.name for job in task_jobs(run, run_sources(run))]
    made = build_definitions(run)
    known = {job.name for job in made.resolve_all_job_defs() if not job.name.startswith("__")}
    chosen = [named(run, name) for name in names] or tasks
    for name in chosen:
        if name not in known:
            expected = ", ".join([*tasks, *sorted(known.difference(tasks))])
            raise ConfigError("no such task", where=run.path, found=name, expected=expected)
    with dg.DagsterInstance.get() as instance, interrupts_since() as raise_if_interrupted:
        whole = Stopwatch()
        for i, name in enumerate(chosen, 1):
            print(f"{name} ({i} of {len(chosen)}){_last_time(instance, name)}", flush=True)
            watch = Stopwatch()
            outcome = made.resolve_job_def(name).execute_in_process(
                instance=instance, raise_on_error=False, run_config=_QUIET
            )
            try:
                raise_if_interrupted()
            except dg.DagsterExecutionInterruptedError:
                print("interrupted", file=sys.stderr)
                return 130
            if not outcome.success:
                _print_failure(name, outcome)
                return 1
            print(f"    {watch.read()}", flush=True)
        print(f"all is current after {whole.read()}; look: nmoe report, nmoe ui")
    return 0


def _last_time(instance: dg.DagsterInstance, name: str) -> str:
    """How long the last run of a job that succeeded took."""
    chosen = dg.RunsFilter(job_name=name, statuses=[dg.DagsterRunStatus.SUCCESS])
    for record in instance.get_run_records(chosen, limit=1):
        if record.start_time and record.end_time:
            return f": {record.end_time - record.start_time:,.0f} s last time"
    return ""


def _print_failure(name: str, outcome: dg.ExecuteInProcessResult) -> None:
    """The checks that did not pass and the errors of steps, a line each."""
    for check in outcome.get_asset_check_evaluations():
        if not check.passed and check.severity is dg.AssetCheckSeverity.ERROR:
            where = check.asset_key.to_user_string()
            print(f"{where}: {check.check_name}: {check.description}", file=sys.stderr)
    for event in outcome.all_events:
        if event.event_type is dg.DagsterEventType.STEP_FAILURE:
            print(f"{event.step_key}: {innermost_error(event)}", file=sys.stderr)
    print(f"ERROR: {name} failed; `nmoe ui` shows run {outcome.run_id[:8]}", file=sys.stderr)


def serve(run: Run, port: int) -> int:
    """Become `dagster dev` of the project."""
    _set_up(run)
    arguments = ["-m", "dagster", "dev", "-m", "nmoe_assets.definitions", "-p", str(port)]
    os.chdir(run.base)
    os.execv(sys.executable, [sys.executable, *arguments])


def _set_up(run: Run) -> None:
    """The environment as a run of this project has it; DAGSTER_HOME is made where it is missing."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ["NMOE_CONFIG"] = str(run.path)
    home = Path(os.environ.setdefault("DAGSTER_HOME", str(run.base / ".dagster"))).absolute()
    home.mkdir(parents=True, exist_ok=True)
    if not (home / "dagster.yaml").exists():
        shipped = importlib.resources.files("nmoe_core") / "configs" / "dagster" / "dagster.yaml"
        with importlib.resources.as_file(shipped) as path:
            shutil.copy(path, home)
