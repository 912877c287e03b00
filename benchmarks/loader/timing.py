"""How fast a loader reads: tokens a cpu-second."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

Batches = Iterator[Any]


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
