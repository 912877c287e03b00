"""Runs stop that were told to at a moment when Dagster or Python forgets it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import dagster as dg
import pytest

from nmoe_assets.ops.interrupts import interrupts_since

pytestmark = pytest.mark.timeout(120)


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
        with pytest.raises(dg.DagsterExecutionInterruptedError):
            raise_if_interrupted()


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
    time.sleep(5)
    print("went on to its end", flush=True)

@dg.job(executor_def=dg.in_process_executor)
def job():
    work()

print(job.execute_in_process(raise_on_error=False).success)
"""


def test_a_run_stops_where_python_ignored_its_interrupt() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=100
    )
    assert done.stdout.splitlines() == ["goes on", "False"]
