"""Memory of batches: buffers that are reused after their batches are released.

Filling a new array costs one page fault per 4 KiB. `HeldBuffers` reuses a buffer only after the
caller has released the batch and all its views, which the reference count shows. Pinned memory is
from torch's pool, which waits for pending copies.
"""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from loader.errors import ConfigError

# References of an unused buffer: the list of buffers, and the argument of getrefcount.
_UNHELD = 2
MAX_BUFFERS = 16


class HeldBuffers:
    """Buffers of one shape and type; `make` creates one."""

    def __init__(self, make: Callable[[], np.ndarray]) -> None:
        self._make = make
        self._buffers: list[np.ndarray] = []

    def take(self) -> np.ndarray:
        """An unused buffer; its content is undefined."""
        buffers = self._buffers
        count = sys.getrefcount
        for i in range(len(buffers)):
            if count(buffers[i]) == _UNHELD:
                return buffers[i]
        made = self._make()
        # If the caller keeps more batches than this number, buffers cannot be reused, and new
        # arrays are as fast.
        if len(buffers) < MAX_BUFFERS and _COUNTS_ARE_EXACT:
            buffers.append(made)
        return made


def pinned_tensor(shape: tuple[int, ...], dtype: np.dtype) -> Any:
    """A page-locked tensor, for asynchronous copies to a device."""
    import torch

    return torch.empty(shape, dtype=getattr(torch, dtype.name), pin_memory=True)


def check_pinning() -> None:
    """Raise ConfigError if torch has no device to which page-locked memory could be copied."""
    try:
        pinned_tensor((1,), np.dtype(np.int64))
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            "memory cannot be pinned",
            where="pin_memory",
            found=str(error).splitlines()[0],
            do="set pin_memory to false on a machine without an accelerator",
        ) from None


def check_device(device: str) -> None:
    """Raise ConfigError if torch cannot put a tensor on this device."""
    try:
        import torch

        torch.empty(0, device=device)
    except (ImportError, AssertionError, RuntimeError, TypeError) as error:
        raise ConfigError(
            "this process has no such device",
            where="device",
            found=f"{device!r}: {str(error).splitlines()[0][:120]}",
            do='set device = "cpu", or omit it',
        ) from None


def _is_counted() -> bool:
    """Whether reference counts are exact: on CPython with the GIL."""
    if sys.implementation.name != "cpython" or not getattr(sys, "_is_gil_enabled", lambda: True)():
        return False
    probe = [np.empty(1)]
    view = probe[0][:0]
    held = sys.getrefcount(probe[0])
    del view
    return held == _UNHELD + 1 and sys.getrefcount(probe[0]) == _UNHELD


_COUNTS_ARE_EXACT = _is_counted()
