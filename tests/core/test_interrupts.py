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


def _printed(
    keep: str, rest: int = 1, ignored: str = "os.kill(os.getpid(), signal.SIGTERM)"
) -> tuple[str, str]:
    """Both outputs of the program, which rests for that many seconds unless it is stopped."""
    program = PROGRAM.format(keep=keep, rest=rest, ignored=ignored)
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout, done.stderr


def test_an_interrupt_raised_where_python_ignores_exceptions_is_sent_again() -> None:
    printed, errors = _printed("send_again_if_ignored(Stopped, signal.SIGTERM)", rest=200)
    assert printed == "goes on\nstopped\n"
    assert errors == ""


@pytest.mark.parametrize("keep", ["", "send_again_if_ignored(KeyboardInterrupt, signal.SIGINT)"])
def test_without_that_python_prints_it_and_the_program_goes_on(keep: str) -> None:
    printed, errors = _printed(keep)
    assert printed == "goes on\nwent on to its end\n"
    assert "Exception ignored in" in errors


def test_other_ignored_exceptions_are_printed_as_before() -> None:
    keep = "send_again_if_ignored(Stopped, signal.SIGTERM)"
    printed, errors = _printed(keep, ignored="raise OSError('disk')")
    assert printed == "goes on\nwent on to its end\n"
    assert "OSError: disk" in errors
