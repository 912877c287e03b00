"""A run that is told to stop: its workers end with it, and the next run goes on."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from nmoe_assets.ops.interrupts import ToldToStop, interrupts_since
from tests.assets.small_project import append, command, environment, execute
from tests.core.prep.conftest import tree_digest
from tests.project import in_foreground, output_of

pytestmark = pytest.mark.timeout(600)
COMPUTE = "[compute]\nworkers = 2\n"
WHAT_IS_MADE = {"prep": "data", "grade": "quality"}
BESIDE = {"prep": ("prep_valid",), "grade": ()}  # jobs that write below the same directory


@pytest.mark.slow
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
    workers: list[psutil.Process] = []
    deadline = time.monotonic() + 240
    while len(workers) < 2 or not any(p.is_file() for p in output.rglob("*")):
        assert run.poll() is None, (own_project / "log").read_text()[-2000:]
        assert time.monotonic() < deadline, "the workers start"
        time.sleep(0.02)
        workers = psutil.Process(run.pid).children()
    run.send_signal(asked)
    assert run.wait(240) != 0, "it was stopped before it was done"
    assert not [worker for worker in workers if worker.is_running()]
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


@pytest.fixture
def _kept_handlers() -> Iterator[None]:
    """Signals that do nothing in this process by themselves."""
    numbers = (signal.SIGUSR1, signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda *_: None) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("_kept_handlers")
@pytest.mark.parametrize("asked", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_is_known_of_though_its_handler_kept_silent(asked: signal.Signals) -> None:
    with interrupts_since() as raise_if_interrupted:
        os.kill(os.getpid(), asked)
        with pytest.raises(ToldToStop) as stopped:
            raise_if_interrupted()
        assert stopped.value.signum == asked


@pytest.mark.parametrize(
    ("asked", "said"), [(signal.SIGINT, "interrupted\n"), (signal.SIGTERM, "terminated\n")]
)
def test_a_stopped_run_names_its_signal_in_a_line_and_in_its_status(
    asked: signal.Signals, said: str, own_project: Path
) -> None:
    command = in_foreground("run", "--config", "run.toml", "verify", "verify")
    running = subprocess.Popen(
        command, cwd=own_project, env=environment(own_project), stdout=-1, stderr=-1, text=True
    )
    assert running.stdout is not None
    assert running.stdout.readline() == "verify (1 of 2)\n"
    running.send_signal(asked)
    _, errors = running.communicate(timeout=120)
    assert (running.returncode, errors) == (128 + asked, said)


@pytest.mark.usefixtures("_kept_handlers")
def test_signals_before_the_block_and_other_signals_are_no_interrupts() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    with interrupts_since() as raise_if_interrupted:
        os.kill(os.getpid(), signal.SIGUSR1)
        raise_if_interrupted()
    assert signal.set_wakeup_fd(-1) == -1, "what the block had set is taken back"


# The signal comes in the callback of a weak reference, as SQLAlchemy has them.
PROGRAM = """
import os, signal, time, weakref
import dagster as dg
import nmoe_assets.definitions

class Engine:
    pass

def ask(reference):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.2)

@dg.op
def work():
    engine = Engine()
    reference = weakref.ref(engine, ask)
    del engine
    print("goes on", flush=True)
    time.sleep(60)
    print("went on to its end", flush=True)

@dg.job(executor_def=dg.in_process_executor)
def job():
    work()

print(job.execute_in_process(raise_on_error=False).success)
"""


def test_a_run_stops_where_python_ignored_its_interrupt() -> None:
    printed = output_of(sys.executable, "-c", PROGRAM, timeout=100)
    assert printed.splitlines() == ["goes on", "False"]
