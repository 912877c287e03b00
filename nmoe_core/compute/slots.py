"""Arrays in the results of forked workers, through memory that they share with their parent.

A pipe copies a result four times, 64 KiB at a time. Here a worker copies the arrays of a result
into a slot and the parent copies them out; the rest of the result goes through the pipe. A slot is
anonymous memory, taken up as it is written to, and ends with the last process that has it. Only
this pool's own workers write what is unpickled here.
"""

import mmap
import pickle
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

SLOT_BYTES = 8 * 2**20


class Parcel(NamedTuple):
    """A result under way: its pickle, and the sizes of the arrays that lie in its slot in turn."""

    payload: bytes
    num_bytes: list[int]


class Slots:
    """The slots of one pool. A slot is free again once its item's worker cannot write to it."""

    def __init__(self, num_slots: int) -> None:
        self._slots = [mmap.mmap(-1, SLOT_BYTES) for _ in range(num_slots)]
        self._free = deque(range(num_slots))

    def take(self) -> int | None:
        """A free slot, None if all are in use."""
        return self._free.popleft() if self._free else None

    def release_after(self, number: int | None, future: "Future[Any]") -> None:
        """Take a slot back as soon as its item has ended, or will not be run."""
        if number is not None:
            future.add_done_callback(lambda _: self._free.append(number))

    def pack(self, number: int | None, result: Any) -> Parcel:
        """Called by a worker: a result whose arrays lie in the slot, if they fit it."""
        buffers: list[pickle.PickleBuffer] = []
        payload = pickle.dumps(result, protocol=5, buffer_callback=buffers.append)
        views = [buffer.raw() for buffer in buffers]
        num_bytes = [view.nbytes for view in views]
        if number is None or sum(num_bytes) > SLOT_BYTES:
            return Parcel(pickle.dumps(result, protocol=5), [])
        for (start, stop), view in zip(_spans(num_bytes), views):
            self._slots[number][start:stop] = view
        return Parcel(payload, num_bytes)

    def unpack(self, number: int | None, parcel: Parcel) -> Any:
        """Called by the parent: the result, which owns its arrays."""
        if number is None or not parcel.num_bytes:
            return pickle.loads(parcel.payload)
        with memoryview(self._slots[number]) as view:
            buffers = [bytearray(view[start:stop]) for start, stop in _spans(parcel.num_bytes)]
        return pickle.loads(parcel.payload, buffers=buffers)


def _spans(num_bytes: list[int]) -> Iterator[tuple[int, int]]:
    return pairwise(accumulate(num_bytes, initial=0))
