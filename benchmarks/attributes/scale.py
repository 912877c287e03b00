"""`python -m benchmarks.attributes.scale`: processor time and memory of duplicates and signals.

Each size runs in a process of its own, on texts of about 260 bytes of which one in thirteen is an
edited copy of another; the slopes are what docs/operations/scale.md projects from.
"""

from __future__ import annotations

import random
import resource
import subprocess
import sys
from collections.abc import Sequence
from hashlib import sha256

import numpy as np
import pyarrow as pa

from benchmarks.rounds import cpu_seconds
from nmoe_core.attributes.copies.duplicates import Shard, resolve, resolve_incremental
from nmoe_core.attributes.minhash import signatures, unpack
from nmoe_core.attributes.shared import Before
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
        "1.6 % added s",
        "1.6 % copies added s",
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
        shard: list[pa.Table] = []
        spent[0] += cpu_seconds(lambda: shard.append(signatures(texts)))  # noqa: B023
        spent[1] += cpu_seconds(lambda: signals(texts))  # noqa: B023
        shards.append(_shard(first, texts, shard[0]))
    start, found = _peak_mb(), list[pa.Table]()
    resolving = cpu_seconds(lambda: found.extend(resolve(shards)))
    first_texts = _texts(size // 64, random.Random(1))
    alike = _texts(size // 64, rng, first_texts.to_pylist())
    both = [_shard(size, new, signatures(new)) for new in (alike, first_texts)]
    added = [cpu_seconds(lambda: _add(shards, found, new)) for new in both]  # noqa: B023
    dropped = sum(table.column("is_survivor").to_pylist().count(False) for table in found)
    figures = [size_mb, *spent, resolving, *added, dropped, start, _peak_mb()]
    return [round(figure, 2) for figure in figures]


def _add(shards: list[Shard], found: list[pa.Table], new: Shard) -> None:
    """Find the copies again after documents came in as another source."""
    new = new._replace(source="zine")
    resolve_incremental([*shards, new], Before([*found, None], set()))


def _compile(texts: pa.Array) -> None:
    shards = [_shard(first, texts, signatures(texts)) for first in range(3)]
    resolve_incremental(shards, Before([*resolve(shards)[:2], None], set()))
    signals(texts)


def _shard(first: int, texts: pa.Array, signed: pa.Table) -> Shard:
    digests = b"".join(sha256(text.encode()).digest() for text in texts.to_pylist())
    return Shard(
        "web",
        np.frombuffer(digests, np.uint8).reshape(-1, 32),
        unpack(signed).keys,
        lambda rows: [f"d{first + i:08d}" for i in rows],
        lambda rows: unpack(signed).sketch[rows],
    )


def _texts(count: int, rng: random.Random, old: Sequence[str] = ()) -> pa.Array:
    """Random texts, and copies with an edited word of these or of old ones."""
    texts: list[str] = []
    for i in range(count):
        if i % _COPIES == _COPIES - 1:
            words = rng.choice(old or texts).split()
            words[rng.randrange(len(words))] = "edited"
        else:
            words = [f"{rng.randrange(10**6):x}" for _ in range(_WORDS)]
        texts.append(" ".join(words))
    return pa.array(texts, pa.large_string())


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


if __name__ == "__main__":
    main()
