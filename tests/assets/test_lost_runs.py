"""Runs that end otherwise than by themselves: killed with everything else, or terminated."""

from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.assets.server import Dagster
from tests.assets.small_project import ALL, SOURCES, append
from tests.core.prep.conftest import file_digests

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
COMPUTE = "[compute]\nworkers = 2\n"


def test_runs_that_a_power_cut_ended_are_failed_and_done_again(
    dagster: Dagster, own_project: Path
) -> None:
    quality = own_project / "out" / "quality"
    before = _grades(quality)
    run_id = _grade_until_it_works(dagster, quality)
    dagster.cut_power()
    dagster.open()
    dagster.wait(lambda: dagster.status(run_id) == "FAILURE", 180, "the lost run is failed")
    again = dagster.wait(lambda: _retry_of(dagster, run_id), 120, "it is started again")
    dagster.wait(lambda: dagster.status(again) == "SUCCESS", 300, "it is done")
    assert _grades(quality) == before
    told, log = f"Dagster restarts it (run {run_id})", own_project / "dagster-daemon.log"
    dagster.wait(lambda: told in log.read_text(), 120, "it is told that it is done again")
    for source in SOURCES:
        assert dagster.partitions(source, "quality_scores") == (2, 0)


def test_a_terminated_run_leaves_no_process_and_no_temporary_file_and_is_gone_on_with(
    dagster: Dagster, own_project: Path
) -> None:
    quality = own_project / "out" / "quality"
    before = _grades(quality)
    run_id = _grade_until_it_works(dagster, quality)
    workers = _workers(dagster)
    assert workers, "two processes grade"
    dagster.terminate(run_id)
    dagster.wait(lambda: dagster.status(run_id) == "CANCELED", 120, "the run is cancelled")
    psutil.wait_procs(workers, 30)
    assert not [worker for worker in workers if worker.is_running()]
    assert not [p for p in quality.rglob("*.tmp.*") if p.name.rpartition(".")[2].isdecimal()]
    assert _retry_of(dagster, run_id) is None, "what a person ended stays ended"
    assert dagster.launch("grade", **ALL) == "SUCCESS"
    assert _grades(quality) == before


def _grades(quality: Path) -> dict[str, str]:
    """Digests of the grades; a kill may leave a lock, or come before the note for a later reuse."""
    found = file_digests(quality)
    return {name: found[name] for name in found if not Path(name).name.startswith(".")}


def _grade_until_it_works(dagster: Dagster, quality: Path) -> str:
    """Make all grades anew; gives the run's id as soon as there is something of them."""
    append(quality.parents[1], COMPUTE)
    for path in [p for p in quality.rglob("*") if p.is_file()]:
        path.unlink()
    run_id = dagster.start("grade", **ALL)
    dagster.wait(lambda: any(p.is_file() for p in quality.rglob("*")), 240, "grades are written")
    return run_id


def _workers(dagster: Dagster) -> list[psutil.Process]:
    """The processes below the one that executes a run, which is below a server of code."""
    found = []
    for top in (dagster.daemon, dagster.server):
        for server in psutil.Process(top.pid).children():
            found += [worker for run in server.children() for worker in run.children()]
    return found


def _retry_of(dagster: Dagster, run_id: str) -> str | None:
    for run in dagster.runs():
        tags = _tags(run)
        if tags.get("dagster/parent_run_id") == run_id and "dagster/retry_number" in tags:
            return run["runId"]
    return None


def _tags(run: dict[str, Any]) -> dict[str, str]:
    return {tag["key"]: tag["value"] for tag in run["tags"]}
