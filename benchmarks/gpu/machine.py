"""What the GPU at hand can do: the limits that every other figure is a fraction of."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch

COPY_BYTES = 2**31
MATRIX_SIZE = 8192


def seconds(run: Callable[[], object], rounds: int = 5, warm_up: int = 2) -> float:
    """Median time of a run on the device, after runs that are not counted."""
    for _ in range(warm_up):
        run()
    times: list[float] = []
    for _ in range(rounds):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return median(times)


def copy_bytes_per_s() -> float:
    """Bytes read and written a second by a copy of 2 GiB."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / seconds(lambda: target.copy_(source))


def matrix_flop_per_s() -> float:
    """Floating-point operations a second of a square bfloat16 product."""
    a, b = torch.randn(2, MATRIX_SIZE, MATRIX_SIZE, device="cuda", dtype=torch.bfloat16)
    return 2 * MATRIX_SIZE**3 / seconds(lambda: a @ b)


def facts() -> dict[str, object]:
    """Name and limits of the device, and the versions that made the figures."""
    import triton

    return {
        "device": torch.cuda.get_device_name(),
        "memory_gb": torch.cuda.get_device_properties(0).total_memory / 1e9,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "copy_tb_per_s": copy_bytes_per_s() / 1e12,
        "matrix_tflop_per_s": matrix_flop_per_s() / 1e12,
    }
