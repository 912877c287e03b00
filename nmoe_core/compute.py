"""Run one function over many items, in this process or in a pool: same results, same order.

Results come back in the order of the items whatever the number of workers, and at most
`2 * workers` items are in flight, so memory stays bounded however long the input is.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Literal, TypeVar

from nmoe_core.errors import NmoeError

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
        NmoeError: A worker was lost (E-WORKER-LOST).
        Whatever `fn` raises, at the place of its item.
    """
    if backend == "inline" or workers <= 1:
        if initializer is not None:
            initializer(*initargs)
        yield from map(fn, items)
        return
    # A fork of a process with threads (Dagster, torch) may deadlock; spawn starts clean.
    context = multiprocessing.get_context("spawn")
    start = (os.getpid(), initializer, initargs)
    with ProcessPoolExecutor(workers, context, _start_worker, start) as pool:
        pending: deque[Future[Result]] = deque()
        try:
            for item in items:
                pending.append(pool.submit(fn, item))
                if len(pending) >= 2 * workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BrokenProcessPool as error:
            raise NmoeError(
                "a worker process was lost",
                where=f"{workers} workers",
                do="it may have run out of memory: use fewer workers and run again",
                code="E-WORKER-LOST",
            ) from error
        finally:
            # A consumer that stops early (a reached token budget) must not wait for the rest.
            pool.shutdown(wait=False, cancel_futures=True)


def _start_worker(parent: int, initializer: Callable[..., None] | None, initargs: tuple) -> None:
    """Tie a worker's life to its parent's, then run the caller's own initializer."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interrupt means
    if sys.platform == "linux":
        set_parent_death_signal = 1
        libc: Any = ctypes.CDLL(None)
        libc.prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)
    if initializer is not None:
        initializer(*initargs)
