"""Loader speed: ours against the floor and against other loaders, on the same token files.

`python -m benchmarks.loader` runs everything; `benchmarks/__main__.py` takes the floor's row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.loader.contenders import CONTENDERS
from benchmarks.loader.data import write_tokens
from benchmarks.loader.own import measure

Row = tuple[str, str, Callable[[], float], Callable[[], float]]


def rows(directory: Path) -> Iterator[Row]:
    """Ours against the floor in this process, at both shapes; rates in tokens a cpu-second."""
    write_tokens(directory, 1)
    for seq_len, batch_size in ((2048, 32), (8192, 8)):
        sides = [
            measure(CONTENDERS[name](directory, seq_len, batch_size)) for name in ("ours", "floor")
        ]
        yield f"loader, L={seq_len} B={batch_size}", "row copies widened to int64", *sides
