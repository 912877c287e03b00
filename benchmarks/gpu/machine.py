"""What the device at hand can do: the limits that every other figure is a fraction of."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

import torch

Run = Callable[[], torch.Tensor]
GPU_COPY_BYTES, CPU_COPY_BYTES = 2**31, 2**16
GPU_MATRIX_SIZE, CPU_MATRIX_SIZE = 8192, 64


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes read and written a second by a copy; bfloat16 operations a second of a product."""

    copy_bytes_per_s: float
    matrix_flop_per_s: float

    def share(self, taken_s: float, *, flop: float = 0.0, num_bytes: float = 0.0) -> float:
        """The time that the larger of two bounds asks for, over the time taken."""
        bound = max(flop / self.matrix_flop_per_s, num_bytes / self.copy_bytes_per_s)
        return bound / taken_s


def seconds(
    run: Callable[[], object], device: torch.device, rounds: int = 5, warm_up: int = 2
) -> float:
    """Median time of a run, after runs that are not counted."""
    for _ in range(warm_up):
        run()
    times: list[float] = []
    for _ in range(rounds):
        synchronize(device)
        started = time.perf_counter()
        run()
        synchronize(device)
        times.append(time.perf_counter() - started)
    return median(times)


def synchronize(device: torch.device) -> None:
    """Wait for what the device has been given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def limits(device: torch.device) -> Limits:
    """Measured by a copy of 2 GiB and a square product of 8,192 (less on a CPU)."""
    is_gpu = device.type == "cuda"
    copy_bytes = GPU_COPY_BYTES if is_gpu else CPU_COPY_BYTES
    size = GPU_MATRIX_SIZE if is_gpu else CPU_MATRIX_SIZE
    source = torch.zeros(copy_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copied = 2 * copy_bytes / seconds(lambda: target.copy_(source), device)
    a, b = torch.randn(2, size, size, device=device, dtype=torch.bfloat16)
    return Limits(copied, 2 * size**3 / seconds(lambda: a @ b, device))


def facts(device: torch.device, found: Limits) -> dict[str, object]:
    """Name and limits of the device, and the versions that made the figures."""
    import triton

    is_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if is_gpu else "cpu",
        "memory_gb": torch.cuda.get_device_properties(device).total_memory / 1e9 if is_gpu else 0,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "copy_tb_per_s": found.copy_bytes_per_s / 1e12,
        "matrix_tflop_per_s": found.matrix_flop_per_s / 1e12,
    }


def compared(
    name: str,
    runs: Mapping[str, Run],
    device: torch.device,
    limits: Limits,
    rounds: int,
    bounds: Mapping[str, float],
) -> list[dict[str, float | int | str]]:
    """One line for each way to one result: its time, and its distance from the first."""
    expected = next(iter(runs.values()))().float()
    found: list[dict[str, float | int | str]] = []
    for route, run in runs.items():
        taken = seconds(run, device, rounds)
        found.append(
            {
                "what": name,
                "route": route,
                "milliseconds": 1e3 * taken,
                "share_of_roofline": limits.share(taken, **bounds),
                "distance": float((run().float() - expected).norm() / expected.norm()),
            }
        )
    return found
