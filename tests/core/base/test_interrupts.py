"""A program that was told to stop stops, wherever the signal met it."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nmoe_core.cli import main

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


IMPORT = """
import os, signal, time
from nmoe_core.base.interrupts import graceful_shutdown

signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background of a shell
try:
    with graceful_shutdown():
        os.environ["ASKED"] = "{asked}"
        import module
        time.sleep(20)
except BaseException as error:
    print(repr(error))
"""
MODULE = """
import os, signal, time
os.kill(os.getpid(), getattr(signal, os.environ["ASKED"]))
time.sleep(0.2)
print("imported", flush=True)
"""


@pytest.mark.parametrize(
    ("asked", "raised"), [("SIGINT", "KeyboardInterrupt()"), ("SIGTERM", "SystemExit(143)")]
)
def test_a_signal_waits_for_the_end_of_an_import_in_which_an_error_could_abort_the_process(
    tmp_path: Path, asked: str, raised: str
) -> None:
    (tmp_path / "module.py").write_text(MODULE)
    paths = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "-c", IMPORT.format(asked=asked)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | paths, check=True
    )
    assert done.stdout.splitlines() == ["imported", raised]


@pytest.fixture
def handlers() -> Iterator[None]:
    """A shell's, whose commands Ctrl-C ends; those of the tests afterwards."""
    before = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for one, handler in before.items():
        signal.signal(one, handler)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("asked", [signal.SIGTERM, signal.SIGINT])
def test_a_command_stops_though_a_library_puts_an_error_of_its_own_in_the_place_of_the_interrupt(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], asked: signal.Signals
) -> None:
    def converted(*_: object, **__: object) -> None:
        try:
            os.kill(os.getpid(), asked)
        except BaseException:  # noqa: BLE001  (as C code does, which sees that a call failed)
            raise ValueError("could not determine the shape") from None

    monkeypatch.setattr("nmoe_core.engine.weights.tiny.make_tiny_checkpoint", converted)
    try:
        status = main(["make-tiny-checkpoint", "directory"])
    except SystemExit as error:
        status = error.code
    said = "terminated\n" if asked == signal.SIGTERM else "interrupted\n"
    assert (status, capfd.readouterr().err) == (128 + asked, said)
