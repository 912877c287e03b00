"""`nmoe run` and `nmoe ui`: run a project's jobs, and serve its pages, with DAGSTER_HOME set up."""

import importlib.resources
import os
import secrets
import shutil
import signal
import socket
import sys
import sysconfig
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import dagster as dg
from dotenv import dotenv_values

from nmoe_assets.assets.cost import Stopwatch
from nmoe_assets.assets.recorded import Recorded
from nmoe_assets.component import build_definitions
from nmoe_assets.names import prefixed
from nmoe_assets.ops.interrupts import ToldToStop, interrupts_since
from nmoe_assets.ops.jobs import console, task_jobs
from nmoe_assets.ops.pipeline import step_error
from nmoe_assets.ops.restarts import NEW_TOKEN, keep_running
from nmoe_assets.ops.schedules import schedules
from nmoe_core.base.compute.api import kept_pools
from nmoe_core.base.errors import ConfigError
from nmoe_core.config.run import Run
from nmoe_core.prep.mixture import run_sources
from nmoe_core.tasks.graph.require import require_tasks
from nmoe_core.tasks.graph.walk import walk
from nmoe_core.tasks.shards import require_startable

_HOST = "127.0.0.1"
# Fewer database commits, and no telemetry; values in the user's environment take precedence.
_ENVIRONMENT = {"DAGSTER_EVENT_BATCH_SIZE": "1000", "DAGSTER_DISABLE_TELEMETRY": "yes"}


@kept_pools()
def run_tasks(
    run: Run, names: Sequence[str], show: Callable[[dict[str, Any], int, int], None]
) -> tuple[int, list[dict[str, Any]]]:
    """Execute the jobs of these tasks, or of all tasks, for the outputs that need it. Returns the
    exit status and one row per task: `task`, `run_id`, `is_good`, `seconds`, `cpu_seconds`, and
    `last_seconds`, the time of the last good run; `run_id` is None if the task had nothing to do.
    Raises ConfigError if a task is unknown; for all tasks also raises the errors of
    `require_startable`, before the first task begins.

    The status is 1 if a task failed, 130 after an interrupt, and 143 after SIGTERM. `show` is
    called for each task before it starts and when it has ended, with its number, from 1, and the
    number of tasks."""
    _set_up(run)
    sources = run_sources(run)
    jobs = {job.name: job for job in task_jobs(run, sources)}
    tasks = [*jobs]
    made = build_definitions(run)
    known = {job.name for job in made.resolve_all_job_defs() if not job.name.startswith("__")}
    chosen = [prefixed(run, name) for name in names] or tasks
    for name in chosen:
        if name not in known:
            expected = ", ".join([*tasks, *sorted(known.difference(tasks))])
            raise ConfigError("unknown task", where=run.path, found=name, expected=expected)
    if names:
        require_tasks(run, names)
    else:  # the job `pipeline` does the same check
        require_startable(run)
    done: list[dict[str, Any]] = []
    states = walk(run, sources)
    keys = [key for job in jobs.values() for key in job.keys]
    with dg.DagsterInstance.get() as instance, interrupts_since() as raise_if_interrupted:
        recorded = Recorded(instance, made.resolve_asset_graph(), keys)
        for i, name in enumerate(chosen, 1):
            task: dict[str, Any] = {"task": name, "last_seconds": _last_seconds(instance, name)}
            show(task, i, len(chosen))
            watch = Stopwatch()
            if name in jobs:
                outcome = jobs[name].execute_needed(made, recorded, states, "CRITICAL")
            else:  # `verify` and `retention` make no output
                outcome = made.resolve_job_def(name).execute_in_process(
                    instance=instance, raise_on_error=False, run_config=console("CRITICAL")
                )
            try:
                raise_if_interrupted()
            except ToldToStop as stopped:
                is_term = stopped.signum == signal.SIGTERM
                print("terminated" if is_term else "interrupted", file=sys.stderr)
                return 128 + stopped.signum, done
            if outcome is None:
                task |= {"run_id": None, "is_good": True, "seconds": 0.0, "cpu_seconds": 0.0}
                done.append(task)
                show(task, i, len(chosen))
                continue
            recorded = Recorded(instance, recorded.graph, keys)
            states = walk(run, sources)
            states.remember()
            cost = watch.read()
            task |= {"run_id": outcome.run_id, "is_good": outcome.success}
            task |= {"seconds": round(cost.seconds, 3), "cpu_seconds": round(cost.cpu_seconds, 3)}
            done.append(task)
            if not outcome.success:
                _print_failure(name, outcome)
                return 1, done
            show(task, i, len(chosen))
    return 0, done


def costs(run: Run) -> list[dict[str, Any]]:
    """One row per job about its successful runs, in descending order of time: `task`, `runs`,
    `seconds`, and `last`, the end of the last run. Empty if DAGSTER_HOME does not exist yet. Writes
    no file."""
    home = Path(os.environ.get("DAGSTER_HOME", run.base / ".dagster"))
    if not (home / "dagster.yaml").is_file():
        return []
    chosen = dg.RunsFilter(statuses=[dg.DagsterRunStatus.SUCCESS])
    found: dict[str, dict[str, Any]] = {}
    with dg.DagsterInstance.from_config(str(home)) as instance:
        for record in instance.get_run_records(chosen):
            if record.start_time and record.end_time:
                name = record.dagster_run.job_name
                last = datetime.fromtimestamp(record.end_time, UTC).isoformat(" ", "minutes")
                row = {"task": name, "runs": 0, "seconds": 0.0, "last": last}
                row = found.setdefault(name, row)
                row["runs"] += 1
                row["seconds"] += record.end_time - record.start_time
    return sorted(found.values(), key=lambda row: -row["seconds"])


def _last_seconds(instance: dg.DagsterInstance, name: str) -> float | None:
    """Seconds of the last successful run of a job."""
    chosen = dg.RunsFilter(job_name=name, statuses=[dg.DagsterRunStatus.SUCCESS])
    for record in instance.get_run_records(chosen, limit=1):
        if record.start_time and record.end_time:
            return round(record.end_time - record.start_time, 3)
    return None


def _print_failure(name: str, outcome: dg.ExecuteInProcessResult) -> None:
    """Print the checks that did not pass and the errors of steps, one per line."""
    for check in outcome.get_asset_check_evaluations():
        if not check.passed and check.severity is dg.AssetCheckSeverity.ERROR:
            where = check.asset_key.to_user_string()
            print(f"{where}: {check.check_name}: {check.description}", file=sys.stderr)
    failed: dict[str, list[str]] = {}
    for event in outcome.all_events:
        if event.event_type is dg.DagsterEventType.STEP_FAILURE:
            failed.setdefault(step_error(event), []).append(str(event.step_key))
    # print each error once: the same error often occurs in the same step of each source
    for error, steps in failed.items():
        print(f"{', '.join(steps)}: {error}", file=sys.stderr)
    print(f"ERROR: {name} failed; `nmoe ui` shows run {outcome.run_id[:8]}", file=sys.stderr)


def serve(run: Run, port: int) -> int:
    """Run `dagster dev` of the project, whose webserver asks for a token, until interrupted. If one
    of its processes was killed, it is started again, and its address stays. Raises ConfigError if
    the port is in use (E-CONFIG-PORT), or `.env` sets variables that decide which code runs
    (E-CONFIG-ENVIRONMENT); also raises as `schedules`."""
    schedules(run)
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind((_HOST, port))
        except OSError as error:
            do = f"stop the process on this port, or choose another port: --port {port + 1}"
            what = "the port is in use"
            raise ConfigError(
                what, where="nmoe ui", found=port, do=do, code="E-CONFIG-PORT"
            ) from error
    _set_up(run)
    _refuse_code(run.base / ".env")
    # the project's directory may contain a file like json.py, which Python would import
    os.environ["PYTHONSAFEPATH"] = "1"
    # Dagster imports from this directory first, so it must not be the project's.
    stdlib = sysconfig.get_path("stdlib")
    loaded_from = ["-d", stdlib]
    if own := os.environ.get("PYTHONPATH"):
        # Dagster removes the first entry of sys.path, which it takes for the script's directory.
        os.environ["PYTHONPATH"] = os.pathsep.join([stdlib, own])
    quiet = ["-W", "ignore:Function `dev_command` is superseded"]
    served = ["-h", _HOST, "-p", str(port)]
    arguments = ["-m", "nmoe_assets.ops.webserver", "dev", "-m", "nmoe_assets.definitions"]
    arguments = [*quiet, *arguments, *loaded_from, *served, "--log-level", "warning"]
    print("the UI starts; its address follows in a few seconds; Ctrl-C stops it", flush=True)
    os.chdir(run.base)
    os.environ[NEW_TOKEN] = secrets.token_urlsafe(24)
    return keep_running([sys.executable, *arguments], "the UI")


def _refuse_code(path: Path) -> None:
    """Raise ConfigError if a `.env` file sets variables that decide which code Dagster runs."""
    prefixes = ("PYTHON", "LD_", "DYLD_", "DAGSTER_", "NMOE_")
    names = [name for name in dotenv_values(path) if name == "PATH" or name.startswith(prefixes)]
    if names:
        what = "the file sets variables that decide which code runs"
        found = ", ".join(names)
        do = "remove them, and set them in your shell if you need them"
        raise ConfigError(what, where=path, found=found, do=do, code="E-CONFIG-ENVIRONMENT")


def _set_up(run: Run) -> None:
    """Set the environment for runs of this project; DAGSTER_HOME is created if it is missing."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ["NMOE_CONFIG"] = str(run.path)
    home = Path(os.environ.setdefault("DAGSTER_HOME", str(run.base / ".dagster"))).absolute()
    # mode 700, since it contains samples of documents and logs
    home.mkdir(0o700, parents=True, exist_ok=True)
    if not (home / "dagster.yaml").exists():
        shipped = importlib.resources.files("nmoe_core") / "configs" / "dagster" / "dagster.yaml"
        with importlib.resources.as_file(shipped) as path:
            shutil.copy(path, home)
