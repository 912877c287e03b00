"""What tests of the loader share: opening and reading one, and twins of its policies."""

import linecache
import multiprocessing
import sys
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from types import FrameType
from typing import Any

import numpy as np

import loader
from loader import DeterministicLoader, LoaderPlan


def open_loader(
    cfg: object,
    rank: int | None = None,
    world_size: int | None = None,
    split: Any = "train",
    **options: Any,
) -> DeterministicLoader:
    """A loader of numpy arrays, unless told otherwise."""
    chosen = {"backend": "numpy", **options}
    return loader.open_loader(cfg, split, rank=rank, world_size=world_size, **chosen)


def rows_of(batches: Iterable[tuple[Any, Any]]) -> np.ndarray:
    """Batches as rows of seq_len + 1."""
    return np.concatenate([np.concatenate([i, t[:, -1:]], axis=1) for i, t in batches])


def all_rows(loader: DeterministicLoader) -> np.ndarray:
    """What is left of a loader as rows of seq_len + 1."""
    if loader.step == loader.num_steps:
        return np.empty((0, loader.plan.seq_len + 1), np.int64)
    return rows_of(loader)


def turn(plan: LoaderPlan, step: int) -> int:
    """By how many rows a step is rotated, as the page of formats defines it."""
    stages = [(sum(s.num_sequences for s in plan.stages[:i]), s) for i, s in enumerate(plan.stages)]
    stage = [s for start, s in stages if start <= step * plan.batch_size][-1]
    if plan.format == "nmoe-loader-plan/1" or len(stage.sources) == 1:
        return 0
    golden, bits = 0x9E3779B97F4A7C15, 2**64
    return mixed((mixed(mixed(golden + plan.seed) + golden + 3) + (step + 1) * golden) % bits) % (
        plan.batch_size
    )


def mixed(x: int) -> int:
    """The finaliser of SplitMix64."""
    x %= 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


def rotated(rows: Sequence[Any], by: int) -> list[Any]:
    """The rows of a step, the row `by` first."""
    return [*rows[by:], *rows[:by]]


def remainders(n: int, weights: dict[str, int], owed: dict[str, Fraction]) -> dict[str, int]:
    """Sequences of each source: its share and what it is owed, by largest remainder. A source that
    is ahead by more than its share gets none, and takes no part."""
    names = list(weights)
    while True:
        rest, total = n - sum(owed[x] for x in names), sum(weights[x] for x in names)
        ideal = {x: rest * Fraction(weights[x], total) + owed[x] for x in names}
        if all(share >= 0 for share in ideal.values()):
            break
        names = [x for x in names if ideal[x] >= 0]
    shares = {x: int(ideal[x]) for x in names}
    by_rest = sorted(names, key=lambda x: shares[x] - ideal[x])
    for x in by_rest[: n - sum(shares.values())]:
        shares[x] += 1
    return {x: shares.get(x, 0) for x in weights}


def check_least_consumed(
    picks: Sequence[str], weights: dict[str, int], owed: dict[str, Fraction]
) -> None:
    """Each pick is of the source that has given least for its weight, of those that give more."""
    drawn = {name: -owed.get(name, Fraction(0)) for name in weights}
    left = {name: picks.count(name) for name in weights}
    for name in picks:
        level = {n: drawn[n] / weights[n] for n in weights if left[n]}
        assert level[name] <= min(level.values()) + Fraction(1, 10**6)
        drawn[name] += 1
        left[name] -= 1


def run_with(function: Callable[[], Any], at_line: Callable[[], object]) -> Any:
    """The value of a function, where another one runs before each of the loader's lines in it."""

    def trace(frame: FrameType, event: str, _argument: object) -> Any:
        if not frame.f_globals.get("__name__", "").startswith("loader."):
            return None
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip()
        # At the end of a `with`, where no interrupt can come, a lock would stay held.
        if event == "line" and not line.startswith("with "):
            sys.settrace(None)
            at_line()
            sys.settrace(trace)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        return function()
    finally:
        sys.settrace(before)


def is_interrupted(function: Callable[[], object], line: int) -> bool:
    """Whether an interrupt before the loader's `line`-th line in a function came before its end."""
    lines = iter(range(line + 1))

    def interrupt() -> None:
        if next(lines, 0) == line:
            raise KeyboardInterrupt

    try:
        run_with(function, interrupt)
    except KeyboardInterrupt:
        return True
    return False


def in_a_fork(function: Callable[[], Any]) -> Any:
    """The value of a function in a process that is forked here, and may not hang."""
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    child = context.Process(target=lambda: writer.send(function()), daemon=True)
    child.start()
    writer.close()
    try:
        assert reader.poll(60), "the forked process hangs"
        return reader.recv()
    finally:
        child.kill()
        child.join()
