"""Memory of batches: hot buffers that are used again once their batches are released.

A fresh array for each batch costs a page fault per 4 KiB when it is filled. `HeldBuffers` returns a
buffer again only when the caller has released the batch and every view of it, which the reference
count shows. Pinned memory comes from torch's own pool, which waits for copies under way.
"""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from loader.errors import ConfigError

# References that are always there: the list that holds the array, and getrefcount's argument.
_UNHELD = 2
MAX_BUFFERS = 16


class HeldBuffers:
    """Buffers of one shape and type, which `make` makes."""

    def __init__(self, make: Callable[[], np.ndarray]) -> None:
        self._make = make
        self._buffers: list[np.ndarray] = []

    def take(self) -> np.ndarray:
        """A buffer that is not held; its content is undefined."""
        buffers = self._buffers
        count = sys.getrefcount
        for i in range(len(buffers)):
            if count(buffers[i]) == _UNHELD:
                return buffers[i]
        made = self._make()
        # A caller that holds more buffers collects batches, and fresh buffers cost the same.
        if len(buffers) < MAX_BUFFERS and _COUNTS_ARE_EXACT:
            buffers.append(made)
        return made


def pinned_tensor(shape: tuple[int, ...], dtype: np.dtype) -> Any:
    """A page-locked tensor, for copies to a device that need not be waited for."""
    import torch

    return torch.empty(shape, dtype=getattr(torch, dtype.name), pin_memory=True)


def check_pinning() -> None:
    """Refuse page-locked memory if torch has no device to copy it to. Raises ConfigError."""
    try:
        pinned_tensor((1,), np.dtype(np.int64))
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            "memory cannot be pinned",
            where="pin_memory",
            found=str(error).splitlines()[0],
            do="set pin_memory to false on a machine without an accelerator",
        ) from None


def _is_counted() -> bool:
    """Whether reference counts tell if an array is in use: on CPython with its global lock."""
    if sys.implementation.name != "cpython" or not getattr(sys, "_is_gil_enabled", lambda: True)():
        return False
    probe = [np.empty(1)]
    view = probe[0][:0]
    held = sys.getrefcount(probe[0])
    del view
    return held == _UNHELD + 1 and sys.getrefcount(probe[0]) == _UNHELD


_COUNTS_ARE_EXACT = _is_counted()
