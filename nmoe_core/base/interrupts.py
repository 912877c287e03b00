"""Interrupts: SIGTERM ends a command in one line, and one that Python ignores is sent again.

Python prints and ignores (`sys.unraisablehook`) what the handler of a signal raises inside a
finaliser, or inside a callback of a weak reference or of the garbage collector: the program was
told to stop and goes on.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_WAIT_S = 0.05
_signals: dict[type[BaseException], signal.Signals] = {}
_told: list[BaseException] = []
_hook_before: Callable[[Any], object] = sys.unraisablehook


@contextmanager
def stops_when_told() -> Iterator[None]:
    """Inside, SIGTERM is one line and the exit that lets everything be cleaned up, and Ctrl-C
    raises KeyboardInterrupt, unless it is ignored or handled otherwise. That holds as well where a
    library puts an error of its own in the place of what the handler raised, as C code may."""
    _told.clear()
    signal.signal(signal.SIGTERM, terminate)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    send_again_if_ignored(SystemExit, signal.SIGTERM)
    send_again_if_ignored(KeyboardInterrupt, signal.SIGINT)
    try:
        yield
    except Exception:
        if _told:
            raise _told[-1] from None
        raise


def terminate(signum: int, frame: object) -> None:
    """Handler of SIGTERM."""
    os.write(2, b"terminated\n")  # print may be what is interrupted
    _told.append(SystemExit(128 + signum))
    raise _told[-1]


def _interrupt(signum: int, frame: object) -> None:
    _told.append(KeyboardInterrupt())
    raise _told[-1]


def send_again_if_ignored(raised: type[BaseException], asked: signal.Signals) -> None:
    """Where `raised`, which the handler of `asked` raises, is ignored, send `asked` again."""
    global _hook_before
    _signals[raised] = asked
    if sys.unraisablehook is not _send_again:
        _hook_before, sys.unraisablehook = sys.unraisablehook, _send_again


def _send_again(ignored: Any) -> None:
    for raised, asked in _signals.items():
        if issubclass(ignored.exc_type, raised):
            # Later, from a thread: what is raised within this hook is ignored as well.
            timer = threading.Timer(_WAIT_S, os.kill, (os.getpid(), asked))
            timer.daemon = True
            timer.start()
            return
    _hook_before(ignored)
