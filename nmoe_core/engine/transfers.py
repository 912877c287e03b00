"""Small transfers between host and device that do not block, and the choice of the current GPU.

To wait for a copy is to wait for all earlier work of the device. With a wait in every pass, the
host could not prepare the next pass while the device is busy.
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
    """Copy an array to a device. For a small pageable array, CUDA has read it before this function
    returns."""
    return torch.from_numpy(np.ascontiguousarray(values)).to(device, non_blocking=True)


class Arriving:
    """Values of a tensor that are being copied to the host; `tolist` waits for the copy, but not
    for later work."""

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

    def tolist(self) -> list[Any]:
        """The values."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.tolist()
