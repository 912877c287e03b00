"""Passes items and results of forked workers through memory that they share with the parent.

A pipe copies a value four times, 64 KiB at a time. With a slot, the sender copies the value in and
the receiver copies it out. The result of an item uses the slot of the item. A slot is anonymous
memory: its pages are allocated at the first write and freed with the last process that maps them.
Only processes of this pool write the bytes that are unpickled here.
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
    """A value between two processes: its pickle, or the sizes of its pickle and arrays in a
    slot."""

    payload: bytes
    num_bytes: list[int]


class Slots:
    """The slots of one pool. A slot is free again once its item's worker can no longer write to
    it."""

    def __init__(self, num_slots: int) -> None:
        self._slots = [mmap.mmap(-1, SLOT_BYTES) for _ in range(num_slots)]
        self._free = deque(range(num_slots))

    def take(self) -> int | None:
        """A free slot, or None if all are in use."""
        return self._free.popleft() if self._free else None

    def release_after(self, number: int | None, future: "Future[Any]") -> None:
        """Free a slot when its item has ended or was cancelled."""
        if number is not None:
            future.add_done_callback(lambda _: self._free.append(number))

    def pack(self, number: int | None, value: Any) -> Parcel:
        """Put an item or a result into a slot, if it fits; the sender calls this."""
        buffers: list[pickle.PickleBuffer] = []
        payload = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        views = [memoryview(payload), *(buffer.raw() for buffer in buffers)]
        num_bytes = [view.nbytes for view in views]
        if number is None or sum(num_bytes) > SLOT_BYTES:
            return Parcel(pickle.dumps(value, protocol=5) if buffers else payload, [])
        for (start, stop), view in zip(_spans(num_bytes), views):
            self._slots[number][start:stop] = view
        return Parcel(b"", num_bytes)

    def unpack(self, number: int | None, parcel: Parcel) -> Any:
        """The value, with arrays that own their memory; the receiver calls this."""
        if number is None or not parcel.num_bytes:
            return pickle.loads(parcel.payload)
        with memoryview(self._slots[number]) as view:
            payload, *buffers = (bytearray(view[slice(*span)]) for span in _spans(parcel.num_bytes))
        return pickle.loads(payload, buffers=buffers)


def _spans(num_bytes: list[int]) -> Iterator[tuple[int, int]]:
    return pairwise(accumulate(num_bytes, initial=0))
