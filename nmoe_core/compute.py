"""Run one function over many items, in this process or in a pool: same results, same order.

Results come back in the order of the items whatever the number of workers, and a bounded number of
items is in flight, so memory stays bounded however long the input is and however many the workers.
A process of one thread forks its workers, which share what it has loaded; one with more threads
(Dagster, torch) starts them clean, since a fork would copy locks that nobody frees.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import multiprocessing.context
import os
import signal
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

from nmoe_core.errors import NmoeError

Item = TypeVar("Item")
Result = TypeVar("Result")
Backend = Literal["inline", "pool"]


# Results that wait for an earlier one are memory: beyond this many, more workers do not add any.
_MAX_WAITING = 16


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
        items: Consumed lazily, a bounded number ahead of the results.
        backend: `inline` runs here; `pool` runs `workers` processes on this machine.
        workers: Processes of the pool.
        initializer: Called once in each process that runs `fn`.
        initargs: Arguments of `initializer`.

    Raises:
        NmoeError: A worker was lost (E-WORKER-LOST).
        Whatever `fn` raises, at the place of its item.
    """
    with open_pool(backend, workers, initializer, initargs) as pool:
        yield from pool.map(fn, items)


@contextmanager
def open_pool(
    backend: Backend = "inline",
    workers: int = 1,
    initializer: Callable[..., None] | None = None,
    initargs: tuple = (),
) -> Iterator[Pool]:
    """Worker processes that several maps use one after the other.

    They are started at once: files and locks that are opened later are not theirs too.
    """
    if backend == "inline" or workers <= 1:
        if initializer is not None:
            initializer(*initargs)
        yield Pool(None, 1)
        return
    start = (os.getpid(), initializer, initargs)
    with ProcessPoolExecutor(workers, _context(), _start_worker, start) as executor:
        try:
            with warnings.catch_warnings():
                # Newer Pythons warn of any thread; those of BLAS take care of a fork themselves.
                warnings.filterwarnings("ignore", ".*fork.*", DeprecationWarning)
                for _ in range(workers):
                    executor.submit(_no_work)
            yield Pool(executor, workers)
        finally:
            # A consumer that stops early (a reached token budget) must not wait for the rest.
            executor.shutdown(wait=False, cancel_futures=True)


class Pool:
    """Runs maps; made by `open_pool`.

    Args:
        executor: Where to run; None runs in this process.
        workers: Processes of the executor.
    """

    def __init__(self, executor: ProcessPoolExecutor | None, workers: int) -> None:
        self._executor = executor
        self._workers = workers
        self._max_in_flight = workers + min(workers, _MAX_WAITING)

    def map(
        self, fn: Callable[[Item], Result], items: Iterable[Item]
    ) -> Generator[Result, None, None]:
        """Yield `fn(item)` for every item, in order; raises as `map_shards` does."""
        if self._executor is None:
            yield from map(fn, items)
            return
        pending: deque[Future[Result]] = deque()
        try:
            for item in items:
                pending.append(self._executor.submit(fn, item))
                if len(pending) >= self._max_in_flight:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BrokenProcessPool as error:
            raise NmoeError(
                "a worker process was lost",
                where=f"{self._workers} workers",
                do="it may have run out of memory: use fewer workers and run again",
                code="E-WORKER-LOST",
            ) from error
        finally:
            for future in pending:
                future.cancel()


def _context() -> multiprocessing.context.BaseContext:
    is_single = threading.active_count() == 1 and "torch" not in sys.modules
    return multiprocessing.get_context("fork" if is_single and sys.platform == "linux" else "spawn")


def _no_work() -> None:
    """Makes the executor start a process."""


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
