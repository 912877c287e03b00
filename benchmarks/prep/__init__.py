"""Prep from JSON lines to committed shards, beside raw tiktoken and floors; growth beside both.

`python -m benchmarks.prep` prints everything; `benchmarks/__main__.py` takes these rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from benchmarks.prep.corpus import write_corpus
from benchmarks.prep.measure import Measured, floor, grown, growth_floor, ours, raw

Row = tuple[str, str, Callable[[], float], Callable[[], float]]
ENGINES = ("reference", "quicktok", "gigatoken")
SMALL_BYTES, PART_BYTES = 24_000_000, 60_000_000


def rows(directory: Path) -> Iterator[Row]:
    """Two workers with the engines that are always there, beside raw tiktoken by wall time; then
    the floors and growth by cpu time, with gigatoken, as shares of a fresh run."""
    path = directory / "prep" / "input.jsonl"
    size_bytes = write_corpus(path, SMALL_BYTES, None)
    for engine in ENGINES[:2]:
        yield (
            f"prep, 2 workers, {engine}",
            "raw tiktoken on one core",
            lambda engine=engine: size_bytes / ours(path, engine).wall_s,
            lambda: size_bytes / raw(path).wall_s,
        )
    for part in ("short", "long"):
        path = directory / "prep" / part / "input.jsonl"
        write_corpus(path, PART_BYTES, None, part)
        sides = {
            "floor: parse, tokenise, hash, write": partial(floor, path, "gigatoken"),
            "prep after 1 % of the documents changed": partial(grown, path, "gigatoken"),
            "floor of that: read, hash, write, hash": partial(growth_floor, path),
        }
        fresh = partial(_cpu_s, partial(ours, path, "gigatoken"))
        for name, side in sides.items():
            yield f"{name}; {part} documents", "prep, by cpu", partial(_cpu_s, side), fresh


def _cpu_s(run: Callable[[], Measured]) -> float:
    return run().cpu_s
