"""Launches runs on one machine and knows whether their processes are alive.

Dagster's default launcher learns that a process is dead only from the server that started it. If
the server is dead too, for example after a power cut, the run would stay "started" for ever:
automation would wait for it, and it would keep its place in the queue. With this launcher the
daemon's run monitoring fails such a run, and `run_retries` of dagster.yaml starts it again. All
processes of a DAGSTER_HOME must see each other: one machine, not several containers.
"""

import dagster as dg

from nmoe_assets.dagster_private import CheckRunHealthResult, WorkerStatus, location_is_silent
from nmoe_assets.partitions import RANGE_END, RANGE_START

# Tolerance between two clocks: events use the system clock, which may be adjusted, and start times
# of processes are counted from boot.
_CLOCK_S = 60.0


class LocalRunLauncher(dg.DefaultRunLauncher):
    """Dagster's default launcher, with health checks by process id."""

    @property
    def supports_check_run_worker_health(self) -> bool:
        """True: this launcher can check the health of runs."""
        return True

    def check_run_worker_health(self, run: dg.DagsterRun) -> CheckRunHealthResult:
        """Whether the process that the run's log names is alive. While its code location is
        silent, the run could not be started again, so it counts as alive until then."""
        found = _named_process(self._instance, run.run_id)
        if found is None or _is_alive(*found) or location_is_silent(run):
            return CheckRunHealthResult(WorkerStatus.RUNNING)
        return CheckRunHealthResult(WorkerStatus.NOT_FOUND, f"process {found[0]} has ended")

    def get_run_worker_debug_info(
        self, run: dg.DagsterRun, include_container_logs: bool | None = True
    ) -> str | None:
        """Why a run that is failed by run monitoring did not start, if its request was refused:
        `run_retries` then does not start it again."""
        if run.status != dg.DagsterRunStatus.NOT_STARTED:
            return None
        self._instance.add_run_tags(run.run_id, {"dagster/max_retries": "0"})
        named = [run.tags[tag] for tag in (RANGE_START, RANGE_END) if tag in run.tags]
        return (
            "Dagster refused the request of this run, so it is not started again; check that its "
            f"partitions exist: {' to '.join(named) or 'none are named'}"
        )


def run_is_dead(instance: dg.DagsterInstance, run_id: str) -> bool:
    """Whether a run has ended, was deleted, or lost the process that its log names."""
    run = instance.get_run_by_id(run_id)
    if run is None or run.is_finished:
        return True
    found = _named_process(instance, run_id)
    return found is not None and not _is_alive(*found)


def _named_process(instance: dg.DagsterInstance, run_id: str) -> tuple[int, float] | None:
    """Id of the process that a run's log names last, and the time of that event, in Unix
    seconds."""
    for entry in reversed(instance.all_logs(run_id, of_type=dg.DagsterEventType.ENGINE_EVENT)):
        metadata = entry.get_dagster_event().engine_event_data.metadata
        if "pid" in metadata:
            return int(str(metadata["pid"].value)), entry.timestamp
    return None


def _is_alive(pid: int, named_s: float) -> bool:
    """Whether the process with an id is alive. The system reuses ids, so a process that started
    after the log named the id does not count."""
    import psutil  # imported late, so that definitions load fast

    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and (
            process.create_time() < named_s + _CLOCK_S
        )
    except psutil.NoSuchProcess:
        return False
