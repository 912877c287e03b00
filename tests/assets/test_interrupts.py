"""A run that is told to stop: its workers end with it, and the next run goes on."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.assets.small_project import append, command, environment, execute
from tests.core.prep.conftest import tree_digest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
COMPUTE = "[compute]\nworkers = 2\n"
WHAT_IS_MADE = {"prep": "data", "grade": "quality"}
BESIDE = {"prep": ("prep_valid",), "grade": ()}  # jobs that write below the same directory


@pytest.mark.parametrize(
    ("job", "asked"),
    [("prep", signal.SIGTERM), ("grade", signal.SIGTERM), ("grade", signal.SIGINT)],
)
def test_a_stopped_run_leaves_no_process_and_no_temporary_file_and_is_gone_on_with(
    own_project: Path, job: str, asked: signal.Signals
) -> None:
    config = own_project / "run.toml"
    config.write_text(config.read_text().replace("workers = 1", "workers = 2"))
    append(own_project, COMPUTE)
    output = own_project / "out" / WHAT_IS_MADE[job]
    before = tree_digest(output)
    shutil.rmtree(output)
    env = environment(own_project)
    with open(own_project / "log", "wb") as log:
        run = subprocess.Popen(command(job), env=env, cwd=own_project, stdout=log, stderr=log)
    workers: list[int] = []
    deadline = time.monotonic() + 240
    while len(workers) < 2 or not any(p.is_file() for p in output.rglob("*")):
        assert run.poll() is None, (own_project / "log").read_text()[-2000:]
        assert time.monotonic() < deadline, "the workers start"
        time.sleep(0.02)
        workers = _children(run.pid)
    run.send_signal(asked)
    assert run.wait(240) != 0, "it was stopped before it was done"
    assert not [pid for pid in workers if _is_alive(pid)]
    assert not [p for p in output.rglob("*.tmp.*") if p.name.rpartition(".")[2].isdecimal()]
    again = subprocess.run(command(job), env=env, cwd=own_project, capture_output=True, check=False)
    assert again.returncode == 0, again.stderr[-2000:]
    for other in BESIDE[job]:
        assert execute(own_project, other).returncode == 0
    assert tree_digest(output) == before
    text = again.stderr.decode()
    if job == "grade":
        assert "grade code/0000:" in text, "what workers log is in the log of the run"
        assert "grade code/0001:" in text


def _children(pid: int) -> list[int]:
    """Processes started by a process, as /proc has them; helpers of the pool are among them."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return []


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
