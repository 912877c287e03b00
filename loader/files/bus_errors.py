"""If a mapped file becomes shorter while it is read, the process ends with a line that names the
file.

Linux sends SIGBUS to a thread that reads a page which is gone. The default action ends the process
without a message. Here the process says which file it was and exits with status 1. A handler that
is already installed, such as the handler of `faulthandler` or of a trainer, stays.
"""

import ctypes
import faulthandler
import functools
import os
import signal
import sys

from loader.errors import FormatError

_SA_SIGINFO = 4
_ADDRESS = 16  # of the page in `siginfo_t`: its offset in bytes


class _Action(ctypes.Structure):
    """`struct sigaction` of Linux with 64 bits."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_byte * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


@functools.cache
def report_bus_errors() -> None:
    """Report bus errors from now on in this process and in its forks; one call is enough."""
    if sys.platform != "linux" or sys.maxsize < 2**32 or faulthandler.is_enabled():
        return
    sigaction = ctypes.CDLL(None).sigaction
    old = _Action()
    sigaction(signal.SIGBUS, None, ctypes.byref(old))
    if not old.handler:  # a handler that is already installed stays
        handler = ctypes.cast(_report, ctypes.c_void_p)
        new = _Action(handler=handler, flags=_SA_SIGINFO)
        sigaction(signal.SIGBUS, ctypes.byref(new), None)


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
def _report(number: int, info: int, context: int) -> None:
    """Runs in the thread that reads, in the middle of a copy: it holds no lock that this needs."""
    try:
        address = ctypes.c_void_p.from_address(info + _ADDRESS).value or 0
        error = FormatError(
            "a mapped file became shorter while it was read, or its disk failed",
            where=_file_at(address),
            do="restore the file, or start again from data that does not change",
            code="E-SHARD-CHANGED",
        )
        os.write(2, f"{error.line()}\n".encode(errors="replace"))
    finally:
        os._exit(1)  # a return would read the page again


def _file_at(address: int) -> str:
    with open("/proc/self/maps", errors="replace") as maps:
        for line in maps:
            ends, *_, path = line.rstrip("\n").split(None, 5)
            first, last = (int(end, 16) for end in ends.split("-"))
            if first <= address < last:
                return path
    return f"address {address:#x}"
