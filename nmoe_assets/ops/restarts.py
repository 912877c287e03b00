"""Runs a server's command, and starts it again if it ends by itself."""

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType

# This variable holds the token of a webserver that is started again: it may be printed.
NEW_TOKEN = "NMOE_UI_NEW_TOKEN"
_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# A command that ends so soon after its start, so often in a row, is not started again.
_SOON_S = 60.0
_MAX_SOON = 3


def keep_running(command: Sequence[str], name: str) -> int:
    """Run a command until this process is told to stop by SIGINT, SIGTERM or SIGHUP; the command
    then gets SIGINT, and its exit status is returned. If it ends by itself, a line that calls it
    `name` says so, and it is started again; returns 1 if it ended three times in a row within a
    minute."""
    started: list[subprocess.Popen[bytes]] = []
    told: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        told.append(number)
        if started:
            started[-1].send_signal(signal.SIGINT)

    for number in _STOPS:
        signal.signal(number, stop)
    num_soon = 0
    while True:
        began = time.monotonic()
        # In a group of its own: a terminal's Ctrl-C would reach the command a second time.
        process = subprocess.Popen(command, process_group=0)
        started.append(process)
        if told:
            process.send_signal(signal.SIGINT)
        status = process.wait()
        if told:
            return status
        num_soon = num_soon + 1 if time.monotonic() - began < _SOON_S else 0
        if num_soon == _MAX_SOON:
            print(f"ERROR: {name} ended {num_soon} times, each within a minute", file=sys.stderr)
            return 1
        print(f"{name} ended by itself and is started again", file=sys.stderr, flush=True)
