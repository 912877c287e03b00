"""How processor time grows with the size of an input: of ratios, never of seconds."""

import time
from collections.abc import Callable
from typing import TypeVar

_Input = TypeVar("_Input")


def growth(work: Callable[[_Input], object], small: _Input, large: _Input) -> float:
    """Processor time of the work on the large input, in that on the small one; the least of
    three tries each."""
    return max(_least(work, large), 1e-4) / max(_least(work, small), 1e-4)


def _least(work: Callable[[_Input], object], value: _Input) -> float:
    times = []
    for _ in range(3):
        started = time.process_time()
        work(value)
        times.append(time.process_time() - started)
    return min(times)
