"""Ends the process with a message that names the file, if a mapped file becomes shorter while it is
read.

Linux sends SIGBUS to a thread that reads a missing page of a file. The default action ends the
process without a message. This handler prints the name of the file and exits with status 1. A
handler that is already installed, such as the handler of `faulthandler` or of a trainer, stays.
"""

import ctypes
import faulthandler
import functools
import os
import signal
import sys

from loader.errors import FormatError

_SA_SIGINFO = 4
_ADDRESS = 16  # offset in bytes of the page's address in `siginfo_t`


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
    """Install the handler in this process and in its forks; one call is enough."""
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
    """Handler of SIGBUS. Runs in the thread that was reading the file. That thread is inside a
    copy, so it holds no lock that this function needs."""
    try:
        address = ctypes.c_void_p.from_address(info + _ADDRESS).value or 0
        error = FormatError(
            "a mapped file became shorter while it was read, or its disk failed",
            where=_file_at(address),
            do="restore the file, or start again with data that does not change",
            code="E-SHARD-CHANGED",
        )
        os.write(2, f"{error.line()}\n".encode(errors="replace"))
    finally:
        os._exit(1)  # returning from the handler would read the page again


def _file_at(address: int) -> str:
    with open("/proc/self/maps", errors="replace") as maps:
        for line in maps:
            ends, *_, path = line.rstrip("\n").split(None, 5)
            first, last = (int(end, 16) for end in ends.split("-"))
            if first <= address < last:
                return path
    return f"address {address:#x}"
