"""`python -m benchmarks.attributes.scale`: processor time and memory of duplicates and signals.

Each size runs in a process of its own, on texts of about 260 bytes of which one in thirteen is an
edited copy of another; the slopes are what docs/operations/scale.md projects from.
"""

from __future__ import annotations

import random
import resource
import subprocess
import sys
from hashlib import sha256

import pyarrow as pa

from benchmarks.rounds import cpu_seconds
from nmoe_core.attributes.duplicates import Shard, resolve
from nmoe_core.attributes.minhash import signatures
from nmoe_core.attributes.signals import signals
from nmoe_core.cli.output import print_table

SIZES = (10_000, 100_000, 1_000_000)
_PER_SHARD, _WORDS, _COPIES = 16_384, 40, 13


def main() -> None:
    """Print a row for each size; with a size, only its numbers."""
    if len(sys.argv) > 1:
        print(*_measure(int(sys.argv[1])))
        return
    table = []
    for size in SIZES:
        command = [sys.executable, "-m", "benchmarks.attributes.scale", str(size)]
        found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        table.append([size, *found.split()])
    header = (
        "documents",
        "MB",
        "sign s",
        "signals s",
        "resolve s",
        "dropped",
        "start MB",
        "peak MB",
    )
    print_table(header, table)


def _measure(size: int) -> list[float]:
    _compile(_texts(64, random.Random(0)))
    rng, shards, spent = random.Random(1), [], [0.0, 0.0]
    size_mb = 0.0
    for first in range(0, size, _PER_SHARD):
        texts = _texts(min(_PER_SHARD, size - first), rng)
        size_mb += texts.nbytes / 1e6
        hashes = [sha256(text.encode()).digest() for text in texts.to_pylist()]
        ids = pa.array([f"d{first + i:08d}" for i in range(len(texts))])
        shard: list[pa.Table] = []
        spent[0] += cpu_seconds(lambda: shard.append(signatures(texts)))  # noqa: B023
        spent[1] += cpu_seconds(lambda: signals(texts))  # noqa: B023
        shards.append(Shard("web", ids, pa.array(hashes, pa.binary(32)), shard[0]))
    start, found = _peak_mb(), list[pa.Table]()
    resolving = cpu_seconds(lambda: found.extend(resolve(shards)))
    dropped = sum(table.column("is_survivor").to_pylist().count(False) for table in found)
    figures = [size_mb, *spent, resolving, dropped, start, _peak_mb()]
    return [round(figure, 2) for figure in figures]


def _compile(texts: pa.Array) -> None:
    hashes = pa.array([bytes(31) + bytes([i]) for i in range(len(texts))], pa.binary(32))
    ids = pa.array([str(i) for i in range(len(texts))])
    resolve([Shard("web", ids, hashes, signatures(texts))])
    signals(texts)


def _texts(count: int, rng: random.Random) -> pa.Array:
    texts: list[str] = []
    for i in range(count):
        if i % _COPIES == _COPIES - 1:
            words = rng.choice(texts).split()
            words[rng.randrange(len(words))] = "edited"
        else:
            words = [f"{rng.randrange(10**6):x}" for _ in range(_WORDS)]
        texts.append(" ".join(words))
    return pa.array(texts, pa.large_string())


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


if __name__ == "__main__":
    main()
