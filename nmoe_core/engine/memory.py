"""Refuses a model whose weights cannot fit, before any is read.

The estimate is of the weights alone; caches and activations come on top.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from nmoe_core.base.errors import ConfigError
from nmoe_core.engine.weights.config import GROUP_SIZE, ModelConfig
from nmoe_core.engine.weights.experts import ExpertForm
from nmoe_core.engine.weights.layout import EXPERT_PARTS, part_shapes

if TYPE_CHECKING:
    from nmoe_core.engine.weights.checkpoint import Checkpoint

GB = 10**9
_MEMINFO = Path("/proc/meminfo")
_GROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def weight_bytes(config: ModelConfig, dtype: torch.dtype, form: ExpertForm) -> int:
    """Bytes of the weights as they lie in memory; packed experts take 17 bytes for 32 weights."""
    shapes = part_shapes(config)
    experts = sum(math.prod(shapes[part]) for part in EXPERT_PARTS)
    others = sum(math.prod(shape) for shape in shapes.values()) - experts
    tables = 2 * config.vocab_size * config.hidden_size
    size = dtype.itemsize
    expert_bytes = experts * size if form == "decoded" else experts // GROUP_SIZE * 17
    return config.num_hidden_layers * (others * size + expert_bytes) + tables * size


def room_bytes(device: torch.device) -> int | None:
    """Memory of a GPU, or what is available of the machine's; None where that is not told."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if device.type != "cpu":
        return None
    limit = _GROUP_LIMIT.read_text().strip() if _GROUP_LIMIT.is_file() else "max"
    rooms = [int(limit)] if limit.isdigit() else []
    if _MEMINFO.is_file():
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        rooms.append(1024 * int(lines["MemAvailable"].split()[0]))
    else:
        rooms.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(rooms)


def check_fits(checkpoint: Checkpoint, dtype: torch.dtype, form: ExpertForm) -> None:
    """Refuse weights that are larger than their device's memory.

    Raises:
        ConfigError: They are; it names the settings that would fit (E-CONFIG-MEMORY).
    """
    device = torch.device(checkpoint.device)
    room, config = room_bytes(device), checkpoint.config
    needed = weight_bytes(config, dtype, form)
    if room is None or needed <= room:
        return
    forms: tuple[ExpertForm, ...] = ("decoded", "packed") if checkpoint.is_packed else ("decoded",)
    fitting = [
        f'experts = "{other}", dtype = "{_name(kind)}" ({size / GB:.3g} GB)'
        for kind in dict.fromkeys((dtype, torch.bfloat16))
        for other in forms
        if (size := weight_bytes(config, kind, other)) <= room
    ]
    raise ConfigError(
        f"the weights do not fit the memory of {device}",
        where=checkpoint.directory,
        found=f'{needed / GB:.3g} GB as experts = "{form}", dtype = "{_name(dtype)}"',
        expected=f"at most {room / GB:.3g} GB",
        do=f"set {' or '.join(fitting)}" if fitting else "take a larger device, or smaller weights",
        code="E-CONFIG-MEMORY",
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
