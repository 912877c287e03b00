"""A server's command is started again, or ends with the signal that its starter gets."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

STARTER = """
import sys
from nmoe_assets.ops.restarts import keep_running
sys.exit(keep_running([sys.executable, "-c", sys.argv[1], sys.argv[2]], "the server"))
"""
# Appends its process id to a file; the first two are killed, the third waits to be told.
SERVER = """
import os, signal, sys, time
with open(sys.argv[1], "a") as file:
    file.write(f"{os.getpid()} ")
if len(open(sys.argv[1]).read().split()) < NUMBER:
    os.kill(os.getpid(), signal.SIGKILL)
signal.signal(signal.SIGINT, lambda *_: os._exit(7))
open(sys.argv[1] + ".ready", "w").close()
while True:
    time.sleep(0.01)
"""


def start(log: Path, number: int) -> "subprocess.Popen[str]":
    server = SERVER.replace("NUMBER", str(number))
    command = [sys.executable, "-c", STARTER, server, str(log)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("told", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_killed_server_is_started_again_until_its_starter_is_told_to_stop(
    tmp_path: Path, told: signal.Signals
) -> None:
    log = tmp_path / "pids"
    with start(log, number=3) as starter:
        while not (tmp_path / "pids.ready").exists():
            assert starter.poll() is None
            time.sleep(0.01)
        starter.send_signal(told)
        assert starter.stderr is not None
        said = starter.stderr.read()
        assert starter.wait() == 7
    assert said == "the server ended by itself and is started again\n" * 2
    pids = [int(one) for one in log.read_text().split()]
    assert len(pids) == 3
    with pytest.raises(ProcessLookupError):
        os.kill(pids[-1], 0)


def test_a_server_that_cannot_stay_up_is_given_up_with_an_error(tmp_path: Path) -> None:
    log = tmp_path / "pids"
    with start(log, number=99) as starter:
        assert starter.stderr is not None
        said = starter.stderr.read().splitlines()
        assert starter.wait() == 1
    assert said[-1] == "ERROR: the server ended 3 times, each within a minute"
    assert len(log.read_text().split()) == 3
