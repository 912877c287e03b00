"""Interrupts: SIGTERM ends a command with one line, and the signal is sent again if Python ignores
it.

Python prints and ignores (`sys.unraisablehook`) an exception that a signal handler raises inside a
finaliser, a weak-reference callback or a garbage-collection callback, so the program would
continue. C++ code that imports a Python module, as torch does, aborts the process if the import
raises, so a signal during an import is delayed until the import ends, for some seconds at most.
"""

import _thread
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_WAIT_S = 0.05
_MAX_WAIT_S = 3.0
_signals: dict[type[BaseException], signal.Signals] = {}
_told: list[BaseException] = []
_waits_since: dict[signal.Signals, float] = {}
_hook_before: Callable[[Any], object] = sys.unraisablehook


@contextmanager
def graceful_shutdown() -> Iterator[None]:
    """In the block, SIGTERM prints one line and exits with all cleanup, and Ctrl-C raises
    KeyboardInterrupt unless SIGINT is ignored or has another handler. This also works if a library,
    such as C code, replaces the handler's exception with another one."""
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


def terminate(signum: int, frame: FrameType | None) -> None:
    """Handler of SIGTERM."""
    if _waits(signal.SIGTERM, frame):
        return
    os.write(2, b"terminated\n")  # the signal may interrupt a print
    _told.append(SystemExit(128 + signum))
    raise _told[-1]


def _interrupt(signum: int, frame: FrameType | None) -> None:
    if _waits(signal.SIGINT, frame):
        return
    _told.append(KeyboardInterrupt())
    raise _told[-1]


def _waits(asked: signal.Signals, frame: FrameType | None) -> bool:
    """Whether the signal arrived during an import and will be sent again."""
    since = _waits_since.setdefault(asked, time.monotonic())
    if _is_importing(frame) and time.monotonic() - since < _MAX_WAIT_S:
        _send_later(asked)
        return True
    _waits_since.pop(asked, None)
    return False


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def _send_later(asked: signal.Signals) -> None:
    def send() -> None:
        time.sleep(_WAIT_S)
        os.kill(os.getpid(), asked)

    # Not `threading`: it takes locks, which the interrupted code may hold.
    _thread.start_new_thread(send, ())


def send_again_if_ignored(raised: type[BaseException], asked: signal.Signals) -> None:
    """Send the signal `asked` again if Python ignores `raised`, the exception that the signal's
    handler raises."""
    global _hook_before
    _signals[raised] = asked
    if sys.unraisablehook is not _send_again:
        _hook_before = sys.unraisablehook
        sys.unraisablehook = _send_again


def _send_again(ignored: Any) -> None:
    for raised, asked in _signals.items():
        if issubclass(ignored.exc_type, raised):
            # An exception raised in this hook is ignored as well.
            return _send_later(asked)
    _hook_before(ignored)


def is_running(process: str) -> bool:
    """Whether a process of this machine, given by its id as text, has not ended."""
    try:
        os.kill(int(process), 0)
    except (ProcessLookupError, ValueError, OverflowError):
        return False
    except PermissionError:
        return True
    return True
