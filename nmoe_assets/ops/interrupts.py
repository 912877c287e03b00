"""A run that receives Terminate or a signal stops at a safe point."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import dagster as dg

from nmoe_core.base.interrupts import send_again_if_ignored

_ASKED = {signal.SIGINT, signal.SIGTERM}


class ToldToStop(dg.DagsterExecutionInterruptedError):
    """The process received this signal; SIGTERM if it received both."""

    def __init__(self, signum: signal.Signals) -> None:
        super().__init__("told to stop")
        self.signum = signum


def keep_ignored() -> None:
    """Send an interrupt again if Python ignored it: Dagster's handler may raise in code in which
    Python drops exceptions."""
    send_again_if_ignored(dg.DagsterExecutionInterruptedError, signal.SIGINT)


@contextmanager
def interrupts_since() -> Iterator[Callable[[], None]]:
    """Yield a function that raises if the process received SIGINT or SIGTERM since the block began.

    Dagster delays interrupts of a run in this process between steps, and drops interrupts that
    arrive after the last step. So the code that executes the run calls the function afterwards; it
    raises ToldToStop.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None  # only the main thread receives signals
        return
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)

    def raise_if_asked() -> None:
        try:
            came = os.read(reader, 4096)
        except BlockingIOError:
            return
        if asked := _ASKED.intersection(came):
            raise ToldToStop(max(asked))

    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield raise_if_asked
    finally:
        signal.set_wakeup_fd(before)
        os.close(reader)
        os.close(writer)
