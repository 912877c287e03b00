"""The one way these benchmarks time: sides take turns in rounds, and figures are medians of rounds.

A machine whose speed drifts disturbs all sides of a round alike, so that a ratio of one round is
worth more than a ratio of two medians.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

ROUNDS = 5
Result = TypeVar("Result")


def seconds(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of one run by a clock."""
    started = clock()
    work()
    return clock() - started


def cpu_seconds(work: Callable[[], object]) -> float:
    """Processor seconds of one run."""
    return seconds(work, time.process_time)


def alternate(
    sides: Mapping[str, Callable[[], Result]], rounds: int = ROUNDS, *, show: bool = False
) -> dict[str, list[Result]]:
    """What each side returns, round by round; each round begins with another side."""
    names = list(sides)
    found: dict[str, list[Result]] = {name: [] for name in names}
    for i in range(rounds):
        first = i % len(names)
        for name in names[first:] + names[:first]:
            found[name].append(sides[name]())
            if show:
                print(f"  {i} {name}: {found[name][-1]}", flush=True)
    return found


def ratios(over: Iterable[float], under: Iterable[float]) -> list[float]:
    """One ratio per round."""
    return [a / b for a, b in zip(over, under, strict=True)]


def spread(values: Sequence[float], form: str = ".2f") -> str:
    """Median, least and largest."""
    low, high = format(min(values), form), format(max(values), form)
    return f"{statistics.median(values):{form}} ({low} to {high})"
