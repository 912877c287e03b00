"""A program that was told to stop stops, wherever the signal met it."""

import subprocess
import sys

import pytest

# The signal comes while Python runs the callback of a weak reference, and its handler raises there.
PROGRAM = """
import os, signal, sys, time, weakref
from nmoe_core.base.interrupts import send_again_if_ignored

class Stopped(BaseException):
    pass

def stop(signum, frame):
    raise Stopped

def ask(reference):
    {ignored}
    time.sleep(0.2)

class Engine:
    pass

signal.signal(signal.SIGTERM, stop)
{keep}
try:
    engine = Engine()
    reference = weakref.ref(engine, ask)
    del engine
    print("goes on", flush=True)
    time.sleep({rest})
    print("went on to its end")
except Stopped:
    print("stopped")
"""


SENT_AGAIN = "send_again_if_ignored(Stopped, signal.SIGTERM)"
TERMINATE = "os.kill(os.getpid(), signal.SIGTERM)"
WENT_ON = ["goes on", "went on to its end"]


@pytest.mark.parametrize(
    ("keep", "ignored", "rest", "printed", "error"),
    [
        (SENT_AGAIN, TERMINATE, 200, ["goes on", "stopped"], ""),
        ("", TERMINATE, 1, WENT_ON, "Exception ignored in"),
        (SENT_AGAIN.replace("Stopped", "OSError"), TERMINATE, 1, WENT_ON, "Exception ignored in"),
        (SENT_AGAIN, "raise OSError('disk')", 1, WENT_ON, "OSError: disk"),
    ],
)
def test_only_an_interrupt_raised_where_python_ignores_exceptions_is_sent_again(
    keep: str, ignored: str, rest: int, printed: list[str], error: str
) -> None:
    program = PROGRAM.format(keep=keep, rest=rest, ignored=ignored)
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == printed
    assert error in done.stderr
    assert bool(error) == bool(done.stderr)
