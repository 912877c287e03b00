"""This package under test, the floor that no loader can avoid, and how fast a loader reads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.loader.data import NUM_TOKENS, SOURCES, plan_config, token_files

Batches = Iterator[Any]


def ours(directory: Path, seq_len: int, batch_size: int, **options: Any) -> Batches:
    """This package, torch tensors where torch is there."""
    from loader import open_loader

    config = plan_config(directory, seq_len, batch_size)
    loader = open_loader(config, **options)
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


def measure(batches: Batches, seconds: float = 1.0) -> Callable[[], float]:
    """A side of a ratio: tokens a cpu-second over some seconds of cpu."""
    next(batches)

    def run() -> float:
        tokens, cpu_s, _ = timed(batches, seconds)
        return tokens / cpu_s

    return run


def timed(batches: Batches, seconds: float) -> tuple[int, float, float]:
    """Read for some seconds of cpu: predicted tokens, cpu and wall seconds."""
    tokens, wall, cpu = 0, time.perf_counter(), time.process_time()
    while (used := time.process_time() - cpu) < seconds:
        for _ in range(20):
            tokens += num_tokens(next(batches))
    return tokens, used, time.perf_counter() - wall


def num_tokens(batch: Any) -> int:
    """Predicted tokens of a batch: rows of `seq_len + 1`, or inputs beside targets."""
    if isinstance(batch, tuple):
        return batch[0].shape[0] * batch[0].shape[1]
    return batch.shape[0] * (batch.shape[1] - 1)
