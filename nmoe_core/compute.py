"""Run one function over many items, in this process or in a pool: same results, same order.

Results come back in the order of the items whatever the number of workers, and at most
`2 * workers` items are in flight, so memory stays bounded however long the input is.
"""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Literal, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
Backend = Literal["inline", "pool"]


def map_shards(
    fn: Callable[[Item], Result],
    items: Iterable[Item],
    *,
    backend: Backend = "inline",
    workers: int = 1,
    initializer: Callable[..., None] | None = None,
    initargs: tuple = (),
) -> Generator[Result, None, None]:
    """Yield `fn(item)` for every item, in order.

    Args:
        fn: A module-level function; with `pool` it and the items are pickled.
        items: Consumed lazily, at most `2 * workers` ahead of the results.
        backend: `inline` runs here; `pool` runs `workers` processes on this machine.
        workers: Processes of the pool.
        initializer: Called once in each process that runs `fn`.
        initargs: Arguments of `initializer`.

    Raises:
        Whatever `fn` raises, at the place of its item.
    """
    if backend == "inline" or workers <= 1:
        if initializer is not None:
            initializer(*initargs)
        yield from map(fn, items)
        return
    # A fork of a process with threads (Dagster, torch) may deadlock; spawn starts clean.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, initializer, initargs) as pool:
        pending: deque[Future[Result]] = deque()
        try:
            for item in items:
                pending.append(pool.submit(fn, item))
                if len(pending) >= 2 * workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            # A consumer that stops early (a reached token budget) must not wait for the rest.
            pool.shutdown(wait=False, cancel_futures=True)
