"""Data parallelism: one process per device, and every n-th item per process.

`--shard i/n` (i from 0) selects the part of one process: items i, i + n, i + 2n, ... and device i
of the machine. The processes are independent; each loads the model.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from nmoe_core.base.errors import ConfigError
from nmoe_core.engine import backend

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Shard:
    """Part `index` of `count` equal parts of the items."""

    index: int
    count: int

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise _bad_shard(f"{self.index}/{self.count}")

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Parse `i/n`. Raises ConfigError for other text, or if i is not below n
        (E-CONFIG-SHARD)."""
        if not re.fullmatch(r"\d+/\d+", text):
            raise _bad_shard(text)
        index, count = text.split("/")
        return cls(int(index), int(count))

    def of(self, items: Sequence[Item]) -> Sequence[Item]:
        """The items of this part, in order."""
        return items[self.index :: self.count]

    def device(self, kind: str) -> torch.device:
        """The CPU, or the accelerator with number `index` modulo the number of accelerators that
        this process sees."""
        device = backend.known_device(kind)
        if device.type == "cpu" or device.index is not None:
            return device
        return torch.device(device.type, self.index % max(1, backend.num_devices(device)))


def _bad_shard(found: str) -> ConfigError:
    return ConfigError(
        "invalid shard",
        found=found,
        expected="i/n with i from 0 to n - 1, such as 0/8",
        code="E-CONFIG-SHARD",
    )
