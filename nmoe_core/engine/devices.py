"""Data parallelism: one process for each device, every n-th item for each process.

`--shard i/n` (i from 0) names the part of one process: items i, i + n, i + 2n, ... and device i of
the machine. `map_devices` starts the n processes itself and returns results in the items' order,
the same whatever n is. Nothing is shared between the processes; each loads the model.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from nmoe_core.base.errors import ConfigError, NmoeError
from nmoe_core.base.settings import ExpertChoice
from nmoe_core.engine import backend
from nmoe_core.engine.model import Transformer

Item = TypeVar("Item")
Result = TypeVar("Result")
Work = Callable[[Transformer, Sequence[Item]], Sequence[Result]]


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
        """Read `i/n`; refuses other text and an i not below n (E-CONFIG-SHARD)."""
        if not re.fullmatch(r"\d+/\d+", text):
            raise _bad_shard(text)
        index, count = text.split("/")
        return cls(int(index), int(count))

    def of(self, items: Sequence[Item]) -> Sequence[Item]:
        """This part's items, in their order."""
        return items[self.index :: self.count]

    def device(self, kind: str) -> torch.device:
        """The CPU, or one of the accelerators this process sees: number `index`, counted round."""
        device = backend.known_device(kind)
        if device.type == "cpu" or device.index is not None:
            return device
        return torch.device(device.type, self.index % max(1, backend.num_devices(device)))


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Arguments of `Transformer.from_checkpoint` for a process that loads the model.

    `device` is "cpu" or a kind of accelerator such as "cuda", of which each shard takes its own.
    """

    path: str
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    experts: ExpertChoice = "auto"

    def load(self, shard: Shard) -> Transformer:
        """The model on the shard's device."""
        device = shard.device(self.device)
        return Transformer.from_checkpoint(self.path, None, device, self.dtype, self.experts)


def map_devices(
    work: Work[Item, Result], items: Sequence[Item], source: ModelSource, num_shards: int
) -> list[Result]:
    """Results of `work` for all items, in their order, from one process for each shard.

    `work` is a module-level function of a model and one shard's items, which returns one result for
    each item (else E-WORKER-RESULTS); it, the items and the results are pickled.
    """
    # Here, since starting processes needs more than a model does.
    from nmoe_core.compute.api import map_shards
    from nmoe_core.config.tables import ComputeTable

    shards = [Shard(index, num_shards) for index in range(num_shards)]
    results: list[Any] = [None] * len(items)
    run = functools.partial(_run_part, work, source)
    parts = [(shard, shard.of(items)) for shard in shards]
    found = map_shards(run, parts, ComputeTable(workers=num_shards))
    for shard, found_part in zip(shards, found, strict=True):
        results[shard.index :: shard.count] = found_part
    return results


def _run_part(
    work: Work[Any, Any], source: ModelSource, part: tuple[Shard, Sequence[Any]]
) -> Sequence[Any]:
    """Load the model and do one share; processes on CPUs divide the cores among them."""
    shard, items = part
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, min(before, (os.cpu_count() or 1) // shard.count)))
    try:
        results = work(source.load(shard), items) if items else []
    finally:
        torch.set_num_threads(before)
    if len(results) != len(items):
        raise NmoeError(
            "the work on a shard did not give one result for each item",
            where=f"shard {shard.index}/{shard.count}",
            found=len(results),
            expected=len(items),
            code="E-WORKER-RESULTS",
        )
    return results


def _bad_shard(found: str) -> ConfigError:
    return ConfigError(
        "not a shard",
        found=found,
        expected="i/n with i from 0 to n - 1, such as 0/8",
        code="E-CONFIG-SHARD",
    )
