"""What a model's blocks run on: plain torch, or Triton kernels. The one place that decides.

The CPU is plain torch, always, also where Triton's interpreter could run the kernels. A GPU runs
them if Triton is installed and its multiprocessors have the shared memory that their tiles take
(227 KiB: compute capability 9 and 10); another one runs plain torch.
"""

from __future__ import annotations

import importlib.util

import torch

CAPABILITIES = (9, 10)


def has_kernels(device: torch.device | str) -> bool:
    """Whether a model on this device runs on kernels."""
    if torch.device(device).type != "cuda" or not torch.cuda.is_available():
        return False
    if importlib.util.find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device)[0] in CAPABILITIES
