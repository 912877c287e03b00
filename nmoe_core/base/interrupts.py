"""An interrupt that Python ignores is sent again.

A signal's handler runs between any two instructions of the main thread. What it raises inside a
finaliser, or a callback of a weak reference or of the garbage collector, Python prints and ignores
(`sys.unraisablehook`): the program was told to stop and goes on.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

_WAIT_S = 0.05
_signals: dict[type[BaseException], signal.Signals] = {}
_hook_before: Callable[[Any], object] = sys.unraisablehook


def send_again_if_ignored(raised: type[BaseException], asked: signal.Signals) -> None:
    """From now on, where `raised` was ignored, this process sends itself `asked` again.

    `raised` is what the handler of the signal `asked` raises.
    """
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
