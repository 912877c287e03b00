"""A pool of processes of this machine, with results in the order of the items.

If this process has one thread, it forks the workers, which share its loaded data. If it has more
threads (Dagster, torch), it starts fresh workers, since a fork would copy locks that no thread
frees. Workers never outlive the pool: on an error or an interrupt they get a signal to stop and
clean up, and are killed if they do not end. Their log records are handled in this process
(`base.compute.logs`). Items and results of forked workers go through shared memory
(`base.compute.slots`).
"""

import ctypes
import gc
import multiprocessing
import multiprocessing.context
import multiprocessing.process
import os
import pickle
import signal
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any, TypeVar

from loader.files.stores import clients
from loader.rows.children import safe_children
from nmoe_core.base.compute import logs as worker_logs
from nmoe_core.base.compute.slots import Parcel, Slots
from nmoe_core.base.errors import NmoeError, one_line

Item = TypeVar("Item")
Result = TypeVar("Result")

# Largest number of results that wait for an earlier result: waiting results take memory.
MAX_WAITING = 16
GRACE_SECONDS = 5.0
_EXIT_TERMINATED = 128 + signal.SIGTERM
Initializer = Callable[[], Any] | None


# `map_shards` over workers that stay open between calls.
Map = Callable[[Callable[..., Result], Iterable[Item]], Generator[Result, None, None]]


class Worker:
    """Runs items one after the other; the context is created before the first item."""

    def __init__(self, initializer: Initializer) -> None:
        self._initializer = initializer
        self._context: tuple[Any, ...] | None = None

    def run(self, fn: Callable[..., Result], item: Any) -> Result:
        """`fn(item)`, or `fn(context, item)` if there is an initializer."""
        if self._context is None:
            self._context = () if self._initializer is None else (self._initializer(),)
        return fn(*self._context, item)

    def map(
        self, fn: Callable[..., Result], items: Iterable[Item]
    ) -> Generator[Result, None, None]:
        for item in items:
            yield self.run(fn, item)


@contextmanager
def open_process_pool(workers: int, initializer: Initializer) -> Iterator[Map]:
    """A pool whose workers start immediately, so they do not inherit files and locks that are
    opened later."""
    context = _context()
    pipe: Any = context.Pipe(duplex=False)  # `Connection` is another type on Windows
    reader, writer = pipe
    logs = worker_logs.package_level()
    is_forked = context.get_start_method() == "fork"
    # One slot per item in flight. Only forked workers can share this memory, since it has no name.
    slots = Slots(_most(workers) if is_forked else 0)
    start = (os.getpid(), writer, logs, initializer, slots)
    # for fresh workers, the executor's queues start a Python process for cleanup
    with safe_children():
        executor = ProcessPoolExecutor(workers, context, _start_worker, start)
    with executor:
        with warnings.catch_warnings():
            # Python 3.12 warns if any thread exists; the threads of BLAS handle a fork.
            warnings.filterwarnings("ignore", ".*fork.*", DeprecationWarning)
            submit = executor.submit if is_forked else partial(_submit_clean, executor)
            for _ in range(workers):
                submit(_no_work)
        # the executor starts its thread after the forks
        with worker_logs.relayed(reader, writer) as wait_for_logs:
            try:
                yield partial(_map, submit, slots, workers, wait_for_logs)
            except BaseException:
                _stop(executor)
                raise
            finally:
                executor.shutdown(wait=True, cancel_futures=True)


def _most(workers: int) -> int:
    """Largest number of items in flight."""
    return workers + min(workers, MAX_WAITING)


def _map(
    submit: Callable[..., Future[Any]],
    slots: Slots,
    workers: int,
    wait_for_logs: Callable[[], None],
    fn: Callable[..., Result],
    items: Iterable[Item],
) -> Generator[Result, None, None]:
    pending: deque[tuple[Future[Parcel], int | None]] = deque()

    def next_result() -> Result:
        future, slot = pending.popleft()
        try:
            return slots.unpack(slot, future.result())
        finally:
            slots.release_after(slot, future)

    try:
        for item in items:
            slot = slots.take()
            pending.append((submit(_run, fn, slots.pack(slot, item), slot), slot))
            if len(pending) >= _most(workers):
                yield next_result()
        while pending:
            yield next_result()
        wait_for_logs()
    except BrokenProcessPool as error:
        raise NmoeError(
            "a worker process was lost",
            where=f"{workers} workers",
            do="it may have run out of memory: use fewer workers and run again",
            code="E-WORKER-LOST",
        ) from error
    finally:
        for future, slot in pending:
            slots.release_after(slot, future)
            future.cancel()


def _context() -> multiprocessing.context.BaseContext:
    is_single = threading.active_count() == 1 and "torch" not in sys.modules
    is_single = is_single and not clients.is_used()  # a store's client has threads of its own
    return multiprocessing.get_context("fork" if is_single and sys.platform == "linux" else "spawn")


def _submit_clean(executor: ProcessPoolExecutor, *call: Any) -> Future:
    """Submit a call, which may start a worker. A fresh worker would run the caller's script again,
    which may lack a `__main__` guard. Workers run only functions of modules, so the script is
    hidden from them."""
    script = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        with safe_children():
            return executor.submit(*call)
    finally:
        sys.modules["__main__"] = script


def _stop(executor: ProcessPoolExecutor) -> None:
    """Tell the workers to remove unfinished files and end; kill the workers that do not end."""
    workers: list[multiprocessing.process.BaseProcess] = list((executor._processes or {}).values())
    executor.shutdown(wait=False, cancel_futures=True)
    for worker in workers:
        worker.terminate()
    deadline = time.monotonic() + GRACE_SECONDS
    for worker in workers:
        worker.join(max(0.0, deadline - time.monotonic()))
        worker.kill()


class _Terminated(BaseException):
    """This worker got the signal to stop while it ran an item."""


_is_busy = False
_worker: Worker
_slots: Slots


def _run(fn: Callable[..., Any], parcel: Parcel, slot: int | None) -> Parcel:
    global _is_busy
    try:
        _is_busy = True
        return _slots.pack(slot, _worker.run(fn, _slots.unpack(slot, parcel)))
    except _Terminated:  # `fn` has cleaned up before the exception arrives here
        os._exit(_EXIT_TERMINATED)
    except Exception as error:  # noqa: BLE001 - any error is sent to the parent
        raise sendable(error) from error.__cause__
    finally:
        _is_busy = False


def sendable(error: Exception) -> Exception:
    """An error that another process can unpickle: the error itself, else an error with the same
    text. An error that cannot be unpickled would look like a lost worker."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception as reason:  # noqa: BLE001 - pickling can raise any error
        text = f"{type(error).__name__}: {error} ({one_line(reason)})"
        return RuntimeError(text).with_traceback(error.__traceback__)
    return error


def _terminate(signum: int, frame: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second signal must not end the cleanup
    if _is_busy:
        raise _Terminated
    os._exit(_EXIT_TERMINATED)


def _no_work() -> None:
    """A task without work: submitting it makes the executor start a process."""


def _start_worker(
    parent: int, writer: Connection, log_level: int, initializer: Initializer, slots: Slots
) -> None:
    """Set up a worker that ends when its parent ends."""
    global _worker, _slots
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles an interrupt
    signal.signal(signal.SIGTERM, _terminate)
    signal.set_wakeup_fd(-1)  # a signal in a forked worker must not wake its parent
    if sys.platform == "linux":
        set_parent_death_signal = 1
        libc: Any = ctypes.CDLL(None)
        libc.prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the call above
        os._exit(1)
    worker_logs.send_all(partial(worker_logs.write_to, writer), log_level)
    gc.freeze()  # a garbage collection would copy pages that are shared with the parent
    _worker = Worker(initializer)
    _slots = slots
