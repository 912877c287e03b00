"""What a model's blocks run on: which devices are here, and plain torch or Triton kernels.

The one place that decides. The CPU is plain torch, always, also where Triton's interpreter could
run the kernels. A GPU runs them if Triton is installed and it is of the compute capability that
they are compiled for and verified on; another one runs plain torch, and a line of the log says so.
"""

from __future__ import annotations

import importlib.util
import logging

import torch

from nmoe_core.base.errors import ConfigError

CAPABILITY = 9
_log = logging.getLogger(__name__)


def known_device(name: str | torch.device) -> torch.device:
    """The device of that name, here or not.

    Raises:
        ConfigError: There is no such kind (E-CONFIG-DEVICE).
    """
    try:
        return torch.device(name)
    except (RuntimeError, TypeError):
        raise _no_device(repr(name), "cpu, cuda or cuda:N") from None


def num_devices(device: torch.device) -> int:
    """How many devices of its kind torch can use here."""
    try:
        return torch.get_device_module(device).device_count()
    except RuntimeError:
        return 0


def usable_device(name: str | torch.device) -> torch.device:
    """The device of that name.

    Raises:
        ConfigError: There is no such kind, or none of it here (E-CONFIG-DEVICE).
    """
    device = known_device(name)
    if device.type == "cpu":
        return device
    count = num_devices(device)
    if (device.index or 0) >= count:
        raise _no_device(str(device), f"one of {count} {device.type} devices that torch has here")
    return device


def has_kernels(device: torch.device | str) -> bool:
    """Whether a model on this device runs on kernels."""
    if torch.device(device).type != "cuda" or not torch.cuda.is_available():
        return False
    if importlib.util.find_spec("triton") is None:
        return False
    major, minor = torch.cuda.get_device_capability(device)
    if major != CAPABILITY:
        _log.warning(
            "%s has compute capability %d.%d: it runs plain torch, since the kernels are verified "
            "on %d.x alone",
            *(device, major, minor, CAPABILITY),
        )
    return major == CAPABILITY


def _no_device(found: str, expected: str) -> ConfigError:
    return ConfigError(
        "no such device",
        found=found,
        expected=expected,
        do="choose cpu, or run where the device and a torch built for it are",
        code="E-CONFIG-DEVICE",
    )
