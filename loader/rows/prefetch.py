"""Reads ahead in a thread. The position is that of the consumer: items that wait in the queue do
not count.

Items are numbered, so items that were read ahead but not taken are read again after a resume. An
error is raised when the consumer requests the item that failed. The thread ends if the reader is
closed, moved or garbage-collected. A forked process starts a new thread, since threads do not
survive a fork.
"""

import os
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")
_Result = tuple[Any, BaseException | None]


class Prefetcher(Generic[Item]):
    """Calls `read(n)`, `read(n + 1)`, ... ahead of the consumer, from one thread at a time; at most
    `depth` items wait."""

    def __init__(self, read: Callable[[int], Item], depth: int) -> None:
        self._read = read
        self._depth = depth
        self._next = -1
        self._process = 0
        self._end: Callable[[], object] | None = None
        self._thread: threading.Thread | None = None
        self._queue: queue.Queue[_Result] = queue.Queue(depth)

    def get(self, n: int) -> Item:
        """Item `n`; consecutive items are already being read. Raises the errors of `read(n)`; after
        an error the next call starts a new thread."""
        if n != self._next or self._process != os.getpid():
            self.close()
            self._start(n)
        self._next = -1  # an interrupt at this place would lose an item
        value, error = self._queue.get()
        if error is not None:
            self.close()
            raise error
        self._next = n + 1
        return value

    def close(self) -> None:
        """End the thread and drop the items read ahead. May be called again."""
        self._next = -1
        if self._thread is not None and self._end is not None:
            self._end()
            # The producer may be waiting for a free slot, so the queue is emptied until the
            # producer sees the stop signal.
            while self._thread.is_alive():
                while not self._queue.empty():
                    self._queue.get_nowait()
                self._thread.join(0.005)
        self._thread = self._end = None

    def _start(self, n: int) -> None:
        self._process = os.getpid()
        stop = threading.Event()
        self._queue = queue.Queue(self._depth)
        arguments = (self._read, n, self._queue, stop)
        # The thread also ends if the reader is garbage-collected without `close`: the thread has no
        # reference to the reader or the loader.
        self._end = weakref.finalize(self, stop.set)
        self._thread = threading.Thread(target=_produce, args=arguments, daemon=True)
        self._thread.start()


def weak_method(method: Callable[[int], Item]) -> Callable[[int], Item]:
    """A bound method that does not keep its object alive."""
    reference = weakref.WeakMethod(method)

    def call(n: int) -> Item:
        bound = reference()
        if bound is None:
            raise ReferenceError("the object is gone")
        return bound(n)

    return call


def _produce(
    read: Callable[[int], object], n: int, results: queue.Queue[_Result], stop: threading.Event
) -> None:
    while not stop.is_set():
        result: _Result
        try:
            result = read(n), None
        except BaseException as error:  # noqa: BLE001 - raised again in `get`
            result = None, error
        while not stop.is_set():
            try:
                results.put(result, timeout=0.05)
                break
            except queue.Full:
                continue
        if result[1] is not None:
            return
        n += 1
        del result  # drop the reference: only the queue may keep waiting items alive
