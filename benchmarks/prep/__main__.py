"""`python -m benchmarks.prep`: one table of prep's speed, memory and what its safety costs.

Every figure is a median over rounds in which all sides take turns, each run a process of its own.
Ratios are against raw: one process, JSON parse and tiktoken's `encode_ordinary`, on one core. The
floor of an engine is as many processes as prep has, which only parse, tokenise, hash and write.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.environments import install
from benchmarks.prep import ENGINES
from benchmarks.prep.corpus import write_corpus
from benchmarks.prep.measure import Measured, floor, ours, raw
from benchmarks.prep.peers import PEERS, measure, prepare
from benchmarks.rounds import ROUNDS, alternate, ratios, spread
from nmoe_core.cli.output import print_table

PARTS = ("engines", "costs", "memory", "peers")
_PEER_BYTES = 24_000_000
_HEADER = ("run", "MB/s", "x raw", "MB/cpu-s", "x raw by cpu", "peak MB", "remark")


def main() -> None:
    """Measure the parts that were asked for and print one table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prep", description=__doc__)
    parser.add_argument("--directory", type=Path, default=Path("build/bench/prep"))
    corpus_help = "directory of JSONL files to read besides installed text (or NMOE_BENCH_CORPUS)"
    parser.add_argument("--corpus", type=Path, help=corpus_help)
    parser.add_argument("--size-mb", type=int, default=300)
    parser.add_argument("--documents", choices=("all", "short", "long"), default="all")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--engines", nargs="+", default=list(ENGINES))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    arguments = parser.parse_args()
    directory = arguments.directory.resolve()
    named = os.environ.get("NMOE_BENCH_CORPUS")
    corpus = arguments.corpus or (Path(named) if named else None)
    path = directory / "input" / f"{arguments.documents}-{arguments.size_mb}.jsonl"
    size_bytes = write_corpus(path, arguments.size_mb * 10**6, corpus, arguments.documents)
    print(f"{size_bytes / 1e6:.1f} MB of text, {os.cpu_count()} cores", flush=True)
    table: list[list[object]] = []
    if "engines" in arguments.parts:
        table += _engines(path, size_bytes, arguments.engines, arguments.rounds)
    if "costs" in arguments.parts:
        table += _costs(path, arguments.rounds)
    if "memory" in arguments.parts:
        table += _memory(directory / "memory", path, arguments.engines)
    if "peers" in arguments.parts:
        table += _peers(directory, corpus)
    print_table(_HEADER, table)


def _engines(path: Path, size_bytes: int, engines: list[str], rounds: int) -> list[list[object]]:
    sides = {"raw": partial(raw, path)} | {name: partial(ours, path, name) for name in engines}
    sides |= {f"floor of {name}": partial(floor, path, name) for name in engines}
    runs = alternate(sides, rounds, show=True)
    table = []
    for name, found in runs.items():
        remark = ""
        if name in engines:
            floors = [run.cpu_s for run in runs[f"floor of {name}"]]
            shares = ratios(floors, [run.cpu_s for run in found])
            remark = f"{spread(shares, '.0%')} of the floor by cpu"
        table.append(_row(name, size_bytes, found, runs["raw"], remark))
    return table


def _costs(path: Path, rounds: int) -> list[list[object]]:
    """Journal and fsync, a resume after a kill at half, one shard of 64; against a whole run."""

    def resumed() -> Measured:
        ours(path, "quicktok", "--kill-at", "0.5")
        return ours(path, "quicktok", fresh=False)

    runs = alternate(
        {
            "without": lambda: ours(path, "quicktok", "--no-safety"),
            "whole": lambda: ours(path, "quicktok"),
            "shard": lambda: ours(path, "quicktok", "--bucket", "7", fresh=False),
            "resume": resumed,
        },
        rounds,
        show=True,
    )
    walls = {name: [run.wall_s for run in found] for name, found in runs.items()}
    safety = [ratio - 1 for ratio in ratios(walls["whole"], walls["without"])]
    shares = {
        "journal and fsync": (safety, "of the run without them"),
        "resume": (ratios(walls["resume"], walls["whole"]), "of the whole run, killed at 50 %"),
        "one shard of 64": (ratios(walls["shard"], walls["whole"]), "of the whole run"),
    }
    return [
        [name, "", "", "", "", "", f"{spread(found, '.1%')} {remark}"]
        for name, (found, remark) in shares.items()
    ]


def _memory(directory: Path, path: Path, engines: list[str]) -> list[list[object]]:
    """Peak of one process at 100 MB and at 2 GB of input."""
    directory.mkdir(parents=True, exist_ok=True)
    table: list[list[object]] = []
    for size_mb in (100, 2000):
        repeated = directory / f"{size_mb}.jsonl"
        size_bytes = _repeat(path, repeated, size_mb * 10**6)
        for engine in engines:
            table.append(_row(f"{engine}, {size_mb} MB", size_bytes, [ours(repeated, engine)]))
        repeated.unlink()
    return table


def _repeat(path: Path, target: Path, size_bytes: int) -> int:
    """The documents again and again, each time with another first word."""
    num_bytes = part = 0
    with open(target, "wb") as file:
        while num_bytes < size_bytes:
            with open(path, "rb") as lines:
                for line in lines:
                    num_bytes += file.write(b'{"text":"part %d ' % part + line[9:])
                    if num_bytes >= size_bytes:
                        break
            part += 1
    return num_bytes


def _peers(directory: Path, corpus: Path | None) -> list[list[object]]:
    path = directory / "peers" / "input.jsonl"
    size_bytes = write_corpus(path, _PEER_BYTES, corpus)
    documents, tokenizer = prepare(path, directory / "peers")
    reference = raw(path)
    table = [_row("raw, for peers", size_bytes, [reference], remark="the same documents")]
    own = ours(path, "quicktok")
    table.append(_row("quicktok, for peers", size_bytes, [own], [reference]))
    for name, peer in PEERS.items():
        python, reason = install(name, peer.requirements, directory)
        try:
            found = None if reason else measure(name, python, documents, tokenizer)
        except (RuntimeError, subprocess.SubprocessError) as error:
            found, reason = None, " ".join(str(error).split())[-160:]
        if found is None:
            table.append([name, "", "", "", "", "", f"did not run: {reason}"])
        else:
            table.append(_row(name, size_bytes, [found], [reference], peer.remark))
    return table


def _row(
    name: str,
    size_bytes: int,
    found: list[Measured],
    reference: Sequence[Measured] = (),
    remark: str = "",
) -> list[object]:
    walls, cpus = [run.wall_s for run in found], [run.cpu_s for run in found]
    by_wall = ratios([run.wall_s for run in reference], walls) if reference else []
    by_cpu = ratios([run.cpu_s for run in reference], cpus) if reference else []
    row: list[object] = [
        name,
        f"{size_bytes / statistics.median(walls) / 1e6:.1f}",
        spread(by_wall) if by_wall else "",
        f"{size_bytes / statistics.median(cpus) / 1e6:.1f}",
        spread(by_cpu) if by_cpu else "",
        f"{max(run.peak_bytes for run in found) / 1e6:.0f}",
        remark,
    ]
    print(row, flush=True)
    return row


if __name__ == "__main__":
    main()
