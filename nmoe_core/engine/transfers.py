"""Small transfers between host and device without waiting on either side, and the current GPU.

Waiting for a copy means waiting for all earlier work of the device: a wait in every pass would keep
the host from preparing the next pass while the device is busy.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

Result = TypeVar("Result")


def current(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current device, for kernels, streams, graphs and events."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def on_its_device(launch: Callable[..., Result]) -> Callable[..., Result]:
    """Decorator for a function that launches kernels: makes the device of its first tensor
    current."""

    @functools.wraps(launch)
    def launch_there(first: Tensor, *args: Any, **kwargs: Any) -> Result:
        with current(first.device):
            return launch(first, *args, **kwargs)

    return launch_there


def on_device(values: np.ndarray, device: torch.device) -> Tensor:
    """Copy an array to a device. CUDA has read a small pageable array before this returns."""
    return torch.from_numpy(np.ascontiguousarray(values)).to(device, non_blocking=True)


class Arriving:
    """A tensor's values in transfer to the host; `tolist` waits for them, but not for later
    work."""

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self._host = values
        self._event = None
        if values.is_cuda:
            self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            with current(values.device):
                self._event = torch.cuda.Event()
                self._event.record()

    def tolist(self) -> list[int]:
        """The values."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.tolist()
