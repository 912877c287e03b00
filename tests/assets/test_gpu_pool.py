"""The pool `gpu` under the configuration of the repository: one step that holds it at a time."""

import os
import subprocess
import threading
import time
from pathlib import Path

import dagster as dg
import pytest

from nmoe_assets.resources import Machine
from tests.assets.dagster_internals import at_work, ended_process
from tests.assets.small_project import environment, execute, opened, program_of
from tests.project import output_of

ENDS = ("STEP_SUCCESS", "STEP_FAILURE")
_PAUSE_S = 0.2


def holding(instance: dg.DagsterInstance, pid: int, status: dg.DagsterRunStatus) -> dg.DagsterRun:
    """A run in a process that holds the pool."""
    run = instance.add_run(dg.DagsterRun(job_name="grade_docs", status=status))
    at_work(instance, run, pid)
    assert claim(instance, run)
    return run


def claim(instance: dg.DagsterInstance, run: dg.DagsterRun) -> bool:
    """What Dagster does before a step of the pool."""
    log = instance.event_log_storage
    log.initialize_concurrency_limit_to_default("gpu")
    return log.claim_concurrency_slot("gpu", run.run_id, "step").is_claimed


@pytest.mark.long
def test_two_gpu_steps_of_one_run_never_overlap(own_project: Path) -> None:
    """Of a run as the UI and automation make it: with the executor of the location."""
    config = own_project / "run.toml"
    config.write_text(config.read_text().replace("[heads]\n", "[heads]\nseed = 7\n"))
    selection = 'key:"hydra/probe_head" or key:"hydra/judge_head"'
    command = (program_of("dagster"), "asset", "materialize", "-m", "nmoe_assets.definitions")
    output_of(*command, "--select", selection, env=environment(own_project), cwd=own_project)
    with opened(own_project) as instance:
        [run] = instance.get_runs(limit=1)
        events = [e.dagster_event for e in instance.all_logs(run.run_id) if e.dagster_event]
    steps = [
        (event.step_key, event.event_type_value)
        for event in events
        if event.event_type_value in ("STEP_START", *ENDS)
    ]
    assert [kind for _, kind in steps] == ["STEP_START", "STEP_SUCCESS"] * 2
    assert steps[0][0] == steps[1][0] != steps[2][0] == steps[3][0]


def test_a_gpu_step_waits_for_that_of_another_run(own_project: Path) -> None:
    with opened(own_project) as instance:
        held = holding(instance, os.getpid(), dg.DagsterRunStatus.STARTED)
        log, before = instance.event_log_storage, instance.get_runs_count()
        done: list[subprocess.CompletedProcess[str]] = []
        job = threading.Thread(target=lambda: done.append(execute(own_project, "grade")))
        job.start()
        while job.is_alive() and not log.get_concurrency_info("gpu").pending_step_count:
            time.sleep(_PAUSE_S)
        assert not done, "it ran while another run held the pool"
        log.free_concurrency_slots_for_run(held.run_id)
        job.join()
        assert instance.get_runs_count() == before + 1
    assert done[0].returncode == 0


@pytest.mark.parametrize("status", [dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.CANCELED])
def test_a_run_frees_the_pool_slot_of_a_dead_run(
    instance: dg.DagsterInstance, status: dg.DagsterRunStatus
) -> None:
    """Killed or terminated: no daemon need run to free the slot."""
    ended = status == dg.DagsterRunStatus.CANCELED
    gone = holding(instance, os.getpid() if ended else ended_process(), status)
    assert graded_by_another(instance)
    assert gone.run_id not in held_by(instance)


def test_a_run_at_work_keeps_its_slot(instance: dg.DagsterInstance) -> None:
    held = holding(instance, os.getpid(), dg.DagsterRunStatus.STARTED)
    assert graded_by_another(instance, pool=None)
    assert held.run_id in held_by(instance)


def graded_by_another(instance: dg.DagsterInstance, pool: str | None = "gpu") -> bool:
    """A run whose step holds the pool."""

    @dg.asset(pool=pool)
    def scores(machine: Machine) -> None:
        assert machine is not None

    return dg.materialize([scores], instance=instance, resources={"machine": Machine()}).success


def held_by(instance: dg.DagsterInstance) -> set[str]:
    return instance.event_log_storage.get_concurrency_info("gpu").active_run_ids
