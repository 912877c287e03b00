"""Runs commands and measures them from outside: wall time, cpu time, peak memory of a process.

Start-up counts on both sides: every run is a new process that imports, loads and ends.
"""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from nmoe_core.text.vocabulary import ensure_vocabulary

_SET_CHILD_SUBREAPER = 36
ROOT = Path(__file__).resolve().parents[2]


class Measured(NamedTuple):
    """One run. `peak_bytes` is the most that one process of it had resident."""

    wall_s: float
    cpu_s: float
    peak_bytes: int
    code: int


def run(command: list[str | Path], check: bool = True) -> Measured:
    """Run a command to its end; its children's time counts too.

    Raises:
        RuntimeError: It failed, and `check` is on.
    """
    environment = {
        **os.environ,
        "TIKTOKEN_CACHE_DIR": str(ensure_vocabulary()),
        "PYTHONPATH": str(ROOT),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    # Orphans of the command become children of this process, whose time can be asked for.
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1)
    # A new process begins with the peak of the one that starts it: that one's is forgotten first.
    Path("/proc/self/clear_refs").write_text("5")
    started = time.perf_counter()
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    errors = process.stderr.read() if process.stderr else b""
    _, status, usage = os.wait4(process.pid, 0)
    wall_s = time.perf_counter() - started
    usages = [usage, *_orphans()]
    code = os.waitstatus_to_exitcode(status)
    if check and code:
        raise RuntimeError(f"{command[-3:]} ended with {code}: {errors.decode()[-600:]}")
    cpu_s = sum(usage.ru_utime + usage.ru_stime for usage in usages)
    return Measured(wall_s, cpu_s, max(usage.ru_maxrss for usage in usages) * 1024, code)


def _orphans() -> Iterator[resource.struct_rusage]:
    """What processes took that outlived the command, such as a fork server's."""
    with suppress(ChildProcessError):
        while True:
            yield os.wait4(-1, 0)[2]


def raw(path: Path) -> Measured:
    """One process: JSON parse and tiktoken's `encode_ordinary`."""
    return run([sys.executable, "-m", "benchmarks.prep.raw", path])


def floor(path: Path, engine: str, workers: int = 2) -> Measured:
    """Only parse, tokenise with an engine, hash and write, in as many processes as `ours`."""
    out = path.with_name("floor.bin")
    return run([sys.executable, "-m", "benchmarks.prep.floor", path, engine, out, str(workers)])


def growth_floor(path: Path) -> Measured:
    """One process: read and hash the file; read, hash, write and hash again what was made of it."""
    return run([sys.executable, "-m", "benchmarks.prep.growth_floor", path, path.parent / "out"])


def grown(path: Path, engine: str) -> Measured:
    """Prep after one document in a hundred changed, in the place of the whole file's shards."""
    before = path.read_bytes()
    ours(path, engine)
    lines = before.splitlines(keepends=True)
    lines[::100] = [line[:-3] + b' changed"}\n' for line in lines[::100]]
    path.write_bytes(b"".join(lines))
    time.sleep(2)  # a file that changed a moment ago is hashed twice
    try:
        return ours(path, engine, fresh=False)
    finally:
        path.write_bytes(before)


def ours(path: Path, engine: str, *options: str, fresh: bool = True, workers: int = 2) -> Measured:
    """Prep of the file into `out` beside it: read, normalise, tokenise, hash, write, commit."""
    out = path.parent / "out"
    if fresh:
        shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, "-m", "benchmarks.prep.ours", path, out, engine, str(workers)]
    # A run that is to kill itself half-way ends with SIGKILL.
    return run([*command, *options], check="--kill-at" not in options)
