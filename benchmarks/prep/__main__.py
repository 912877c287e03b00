"""`python -m benchmarks.prep`: one table of prep's speed, memory and what its safety costs.

Every figure is a median over rounds in which all sides take turns, each run a process of its own.
Ratios are against raw: one process, JSON parse and tiktoken's `encode_ordinary`, on one core.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
from pathlib import Path

from benchmarks.environments import install
from benchmarks.prep import ENGINES
from benchmarks.prep.corpus import write_corpus
from benchmarks.prep.measure import Measured, ours, raw
from benchmarks.prep.peers import PEERS, measure, prepare
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
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--engines", nargs="+", default=list(ENGINES))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    arguments = parser.parse_args()
    directory = arguments.directory.resolve()
    named = os.environ.get("NMOE_BENCH_CORPUS")
    corpus = arguments.corpus or (Path(named) if named else None)
    path = directory / "input" / f"{arguments.size_mb}.jsonl"
    size_bytes = write_corpus(path, arguments.size_mb * 10**6, corpus)
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
    runs: dict[str, list[Measured]] = {name: [] for name in ("raw", *engines)}
    for i in range(rounds):
        order = list(runs) if i % 2 == 0 else list(runs)[::-1]
        for name in order:
            runs[name].append(raw(path) if name == "raw" else ours(path, name))
            last = runs[name][-1]
            print(f"  {i} {name}: {last.wall_s:.2f} s, {last.cpu_s:.2f} cpu-s", flush=True)
    table = []
    for name, found in runs.items():
        ratios = [r.wall_s / f.wall_s for r, f in zip(runs["raw"], found)]
        by_cpu = [r.cpu_s / f.cpu_s for r, f in zip(runs["raw"], found)]
        remark = "" if name == "raw" else f"{min(ratios):.2f} to {max(ratios):.2f} x raw"
        table.append(_row(name, size_bytes, found, ratios, by_cpu, remark))
        print(table[-1], flush=True)
    return table


def _costs(path: Path, rounds: int) -> list[list[object]]:
    """Journal and fsync, a resume after a kill at half, one shard of 64; against a whole run."""
    shares: dict[str, list[float]] = {"journal and fsync": [], "resume": [], "one shard of 64": []}
    for i in range(rounds):
        sides = [lambda: ours(path, "quicktok"), lambda: ours(path, "quicktok", "--no-safety")]
        first, second = (side() for side in (sides if i % 2 == 0 else sides[::-1]))
        whole, without = (first, second) if i % 2 == 0 else (second, first)
        shares["journal and fsync"].append(whole.wall_s / without.wall_s - 1)
        one = ours(path, "quicktok", "--bucket", "7", fresh=False)
        shares["one shard of 64"].append(one.wall_s / whole.wall_s)
        whole = ours(path, "quicktok")  # anew: the machine's speed drifts
        ours(path, "quicktok", "--kill-at", "0.5")
        shares["resume"].append(ours(path, "quicktok", fresh=False).wall_s / whole.wall_s)
        print(f"  {i}", {name: round(found[-1], 3) for name, found in shares.items()}, flush=True)
    remarks = {
        "journal and fsync": "of the run without them",
        "resume": "of the whole run, after a kill at 50 %",
        "one shard of 64": "of the whole run, start-up included",
    }
    table: list[list[object]] = []
    for name, found in shares.items():
        span = f"{min(found):.0%} to {max(found):.0%}"
        text = f"{statistics.median(found):.1%} {remarks[name]} ({span})"
        table.append([name, "", "", "", "", "", text])
        print(table[-1], flush=True)
    return table


def _memory(directory: Path, path: Path, engines: list[str]) -> list[list[object]]:
    """Peak of one process at 100 MB and at 2 GB of input."""
    directory.mkdir(parents=True, exist_ok=True)
    table: list[list[object]] = []
    for size_mb in (100, 2000):
        repeated = directory / f"{size_mb}.jsonl"
        size_bytes = _repeat(path, repeated, size_mb * 10**6)
        for engine in engines:
            found = [ours(repeated, engine)]
            table.append(_row(f"{engine}, {size_mb} MB", size_bytes, found, [], [], ""))
            print(table[-1], flush=True)
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
    table = [_row("raw, for peers", size_bytes, [reference], [], [], "the same documents")]
    table.append(_against(reference, "quicktok, for peers", size_bytes, ours(path, "quicktok"), ""))
    for name, peer in PEERS.items():
        python, reason = install(name, peer.requirements, directory)
        try:
            found = None if reason else measure(name, python, documents, tokenizer)
        except (RuntimeError, subprocess.SubprocessError) as error:
            found, reason = None, " ".join(str(error).split())[-160:]
        if found is None:
            table.append([name, "", "", "", "", "", f"did not run: {reason}"])
        else:
            table.append(_against(reference, name, size_bytes, found, peer.remark))
        print(table[-1], flush=True)
    return table


def _against(
    reference: Measured, name: str, size_bytes: int, found: Measured, remark: str
) -> list[object]:
    by_wall, by_cpu = [reference.wall_s / found.wall_s], [reference.cpu_s / found.cpu_s]
    return _row(name, size_bytes, [found], by_wall, by_cpu, remark)


def _row(
    name: str,
    size_bytes: int,
    found: list[Measured],
    by_wall: list[float],
    by_cpu: list[float],
    remark: str,
) -> list[object]:
    wall_s = statistics.median(run.wall_s for run in found)
    cpu_s = statistics.median(run.cpu_s for run in found)
    return [
        name,
        f"{size_bytes / wall_s / 1e6:.1f}",
        f"{statistics.median(by_wall):.2f}" if by_wall else "",
        f"{size_bytes / cpu_s / 1e6:.1f}",
        f"{statistics.median(by_cpu):.2f}" if by_cpu else "",
        f"{max(run.peak_bytes for run in found) / 1e6:.0f}",
        remark,
    ]


if __name__ == "__main__":
    main()
