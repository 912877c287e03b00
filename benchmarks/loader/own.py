"""This package under test, and the floor that no loader can avoid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.loader.data import NUM_TOKENS, SOURCES, plan_config, token_files
from benchmarks.loader.timing import Batches


def ours(directory: Path, seq_len: int, batch_size: int, **options: Any) -> Batches:
    """This package, torch tensors where torch is there."""
    from loader import build_loader

    config = plan_config(directory, seq_len, batch_size)
    loader, _ = build_loader(config, **options)
    steps = NUM_TOKENS // seq_len // batch_size
    while True:
        # Over the same tokens again and again, so that all of them come from the page cache.
        loader.seek(0)
        for _ in range(steps):
            yield loader.next()


def strided(directory: Path, seq_len: int, batch_size: int) -> Batches:
    """This package with inputs and targets as two views of the same rows."""
    return ours(directory, seq_len, batch_size, contiguous=False)


def floor(directory: Path, seq_len: int, batch_size: int) -> Batches:
    """What no loader can avoid: rows copied from the page cache and widened to int64 in a hot
    buffer, at offsets known beforehand."""
    files = [
        np.asarray(np.load(path, mmap_mode="r"))
        for source in SOURCES
        for path in token_files(directory, source)
    ]
    places = [
        (tokens, at) for tokens in files for at in range(0, len(tokens) - seq_len - 1, seq_len)
    ]
    places = places[: len(places) // batch_size * batch_size]
    out, width = np.empty((batch_size, seq_len + 1), np.int64), seq_len + 1
    while True:
        for first in range(0, len(places), batch_size):
            for row, (tokens, at) in enumerate(places[first : first + batch_size]):
                out[row] = tokens[at : at + width]
            yield out
