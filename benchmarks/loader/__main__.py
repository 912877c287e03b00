"""Loader speed against the floor and other loaders: medians of alternated rounds.

    python -m benchmarks.loader [--files 480] [--shape 2048x32] [--only ours,floor,grain]

Each contender is a process that stays open; a round asks each in turn to read for half a second, so
that all see the same machine. Rates are tokens a cpu-second. A peer that cannot be installed or run
is named with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.environments import TORCH, install, version
from benchmarks.loader.contenders import CONTENDERS
from benchmarks.loader.data import write_tokens
from benchmarks.rounds import ROUNDS, alternate, ratios

REPOSITORY = Path(__file__).resolve().parents[2]
SECONDS = 0.5
# The others need only numpy and torch, and run in the caller's own environment.
PEERS = {
    "litdata": ("litdata", TORCH),
    "streaming": ("mosaicml-streaming", TORCH),
    "datatrove": ("datatrove", TORCH),
    "grain": ("grain",),
    "megatron": ("megatron-core", TORCH),
    "olmo": ("ai2-olmo-core", TORCH),
}


class Contender:
    """A running worker."""

    def __init__(self, name: str, directory: Path, seq_len: int, batch_size: int) -> None:
        self.name = name
        python, self.error = Path(sys.executable), ""
        if name in PEERS:
            python, self.error = install(name, PEERS[name], REPOSITORY / "build" / "bench")
        if self.error:
            return
        self.version = version(PEERS[name][0] if name in PEERS else "torch", python)
        command = [python, "-m", "benchmarks.loader.worker", name, directory, seq_len, batch_size]
        self._log = directory / f"{name}.log"
        with open(self._log, "w") as log:
            self._process = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=REPOSITORY,
                env=os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
            )

    def wait(self) -> None:
        """Wait for the first batch."""
        if not self.error:
            self.first = self._answer()

    def run(self, seconds: float) -> dict[str, float]:
        """Read for some seconds; nothing once the process has failed."""
        if self.error:
            return {}
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seconds}\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End the process."""
        if not self.error:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            lines = self._log.read_text().strip().splitlines()
            self.error = lines[-1] if lines else f"exit {self._process.returncode}"
            return {}
        return json.loads(line)


def main() -> None:
    """Run and print one table for each shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=1, help="files of each source")
    parser.add_argument("--shape", action="append", help="SEQ_LENxBATCH_SIZE; may repeat")
    parser.add_argument("--only", default=",".join(CONTENDERS))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="cpu a side and round")
    arguments = parser.parse_args()
    directory = REPOSITORY / "build" / "bench" / f"tokens-{arguments.files}"
    write_tokens(directory, arguments.files)
    for shape in arguments.shape or ["2048x32", "8192x8"]:
        seq_len, batch_size = map(int, shape.split("x"))
        _table(directory, seq_len, batch_size, arguments)


def _table(directory: Path, seq_len: int, batch_size: int, arguments: argparse.Namespace) -> None:
    names, num_rounds = arguments.only.split(","), arguments.rounds
    running = [Contender(name, directory, seq_len, batch_size) for name in names]
    for contender in running:
        contender.wait()
    sides = {c.name: partial(c.run, arguments.seconds) for c in running if not c.error}
    found = alternate(sides, num_rounds)
    failed = {c.name for c in running if c.error}
    rates = {name: _rates(runs, "cpu_s") for name, runs in found.items() if name not in failed}
    print(f"\nseq_len {seq_len}, batch {batch_size}, {num_rounds} rounds, {directory.name}")
    print("| loader | Mtok/cpu-s | min-max | Mtok/s wall | of the floor | ours is | first batch |")
    print("|---|---|---|---|---|---|---|")
    for contender in running:
        name = contender.name
        if contender.error:
            print(f"| {name} | not run: {contender.error} | | | | | |")
            continue
        own, first = rates[name], contender.first["cpu_s"]
        cells = [
            f"{name} ({contender.version})",
            f"{statistics.median(own):.0f}",
            f"{min(own):.0f}-{max(own):.0f}",
            f"{statistics.median(_rates(found[name], 'wall_s')):.0f}",
            _ratio(own, rates.get("floor")),
            _ratio(rates.get("ours"), own) + " x",
            f"{first * 1e3:.0f} ms cpu",
        ]
        print("| " + " | ".join(cells) + " |", flush=True)
    for contender in running:
        contender.close()


def _rates(runs: list[dict[str, float]], clock: str) -> list[float]:
    """Million tokens per second of a clock."""
    return [run["tokens"] / run[clock] / 1e6 for run in runs]


def _ratio(over: list[float] | None, under: list[float] | None) -> str:
    return f"{statistics.median(ratios(over, under)):.2f}" if over and under else "-"


if __name__ == "__main__":
    main()
