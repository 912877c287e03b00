"""Prep from JSON lines to committed shards, against one core that only parses and tokenises.

`python -m benchmarks.prep` prints everything; `benchmarks/__main__.py` takes the rows against raw.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.prep.corpus import write_corpus
from benchmarks.prep.measure import ours, raw

Row = tuple[str, str, Callable[[], float], Callable[[], float]]
ENGINES = ("reference", "quicktok", "gigatoken")
SMALL_BYTES = 24_000_000


def rows(directory: Path) -> Iterator[Row]:
    """Two workers with the engines that are always there; rates in bytes a second."""
    path = directory / "prep" / "input.jsonl"
    size_bytes = write_corpus(path, SMALL_BYTES, None)
    for engine in ENGINES[:2]:
        yield (
            f"prep, 2 workers, {engine}",
            "raw tiktoken on one core",
            lambda engine=engine: size_bytes / ours(path, engine).wall_s,
            lambda: size_bytes / raw(path).wall_s,
        )
