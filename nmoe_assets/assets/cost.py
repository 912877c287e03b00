"""Cost of a step: wall time, CPU time, and money if a price is set."""

import os
import time
from dataclasses import dataclass

from nmoe_assets.resources import Machine


@dataclass(frozen=True)
class Cost:
    """Cost of a step or a partition.

    Attributes:
        seconds: Wall time.
        cpu_seconds: CPU time of this process and of its child processes that have ended.
        machine_share: Share of the machine that this step gets if other steps run at the same time.
    """

    seconds: float
    cpu_seconds: float
    machine_share: float = 1.0

    def facts(self, machine: Machine) -> dict[str, float]:
        """The cost as metadata."""
        return {
            "seconds": round(self.seconds, 3),
            "cpu_seconds": round(self.cpu_seconds, 3),
            **machine.cost_usd(self.seconds * self.machine_share),
        }

    def __str__(self) -> str:
        return f"{self.seconds:.1f} s, {self.cpu_seconds:.1f} s of CPU time"


class Stopwatch:
    """Measures the cost since its creation."""

    def __init__(self) -> None:
        self._started = _clocks()

    def read(self) -> Cost:
        """The cost so far."""
        seconds, cpu_seconds = _clocks()
        return Cost(seconds - self._started[0], cpu_seconds - self._started[1])


def _clocks() -> tuple[float, float]:
    used = os.times()
    return time.perf_counter(), sum(used[:4])
