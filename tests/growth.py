"""How processor time grows with the size of an input: of ratios, never of seconds."""

import time
from collections.abc import Callable
from typing import TypeVar

_Input = TypeVar("_Input")


def growth(
    work: Callable[[_Input], object], small: _Input, large: _Input, least_s: float = 1e-4
) -> float:
    """Processor time of the work on the large input, in that on the small one; the least of
    three tries each. Less than `least_s` counts as `least_s`, because a clock is not exact."""
    for_large = processor_s(work, large)
    if for_large < 8 * least_s:
        return 1.0
    return min(for_large, _least(work, large)) / max(_least(work, small), least_s)


def _least(work: Callable[[_Input], object], value: _Input) -> float:
    return min(processor_s(work, value) for _ in range(3))


def processor_s(work: Callable[[_Input], object], value: _Input) -> float:
    started = time.process_time()
    work(value)
    return time.process_time() - started
