"""The devices of this machine, their memory, and the choice of a runtime for a model.

The runtime is chosen only here. On a CPU, a model runs in plain torch, even if Triton's interpreter
could run the kernels. On a GPU, a model runs on the kernels if Triton is installed and the kernels
are verified for the GPU's compute capability. On any other GPU, it runs in plain torch, and a log
line says so.
"""

import importlib.util
import logging
import math
import os
from dataclasses import replace
from pathlib import Path

import torch

from nmoe_core.base.compute.gpus import own_gpu
from nmoe_core.base.errors import ConfigError
from nmoe_core.base.settings import ExpertChoice
from nmoe_core.engine.block import PLAIN, Runtime
from nmoe_core.engine.grouped import GROUPED
from nmoe_core.engine.hub import CAPABILITIES, HUB, library
from nmoe_core.engine.int8 import INT8, int8_block
from nmoe_core.engine.weights.checkpoint import Checkpoint
from nmoe_core.engine.weights.config import GROUP_SIZE, ModelConfig
from nmoe_core.engine.weights.families import GPT_OSS
from nmoe_core.engine.weights.layout import EXPERT_PARTS, part_shapes
from nmoe_core.engine.weights.mxfp4 import ExpertForm

CAPABILITY = 9
GB = 10**9
_MEMINFO = Path("/proc/meminfo")
_GROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_log = logging.getLogger(__name__)


def known_device(name: str | torch.device) -> torch.device:
    """Parse the name of a device, which this machine need not have. Raises ConfigError if its kind
    is unknown (E-CONFIG-DEVICE)."""
    try:
        return torch.device(name)
    except (RuntimeError, TypeError):
        raise _no_device(repr(name), "cpu, cuda or cuda:N") from None


def num_devices(device: torch.device) -> int:
    """Number of devices of the same kind that torch can use on this machine."""
    try:
        return torch.get_device_module(device).device_count()
    except RuntimeError:
        return 0


def usable_device(name: str | torch.device) -> torch.device:
    """The device with this name. Raises ConfigError if this machine does not have it
    (E-CONFIG-DEVICE)."""
    device = known_device(name)
    if device.type == "cpu":
        return device
    count = num_devices(device)
    if (device.index or 0) >= count:
        raise _no_device(str(device), f"one of the {count} {device.type} devices of this machine")
    return device


def own_device(name: str) -> torch.device:
    """The device with this name; `cuda` without a number is the GPU that the fewest processes use.
    Raises as `usable_device`."""
    device = usable_device(name)
    if device.type == "cpu" or device.index is not None:
        return device
    return torch.device(device.type, own_gpu(num_devices(device)))


def has_kernels(device: torch.device | str) -> bool:
    """Whether a model on this device runs on kernels."""
    is_gpu = torch.device(device).type == "cuda" and torch.cuda.is_available()
    if not is_gpu or importlib.util.find_spec("triton") is None:
        return False
    major, minor = torch.cuda.get_device_capability(device)
    if major != CAPABILITY:
        text = "%s has compute capability %d.%d: the model runs in plain torch (kernels: only %d.x)"
        _log.warning(text, device, major, minor, CAPABILITY)
    return major == CAPABILITY


def choose_runtime(
    config: ModelConfig, device: torch.device, use_kernels: bool | None = None
) -> Runtime:
    """The kernels if the device supports them or they are requested, else plain torch.

    The kernels support only gpt-oss. Raises ConfigError if they are requested for another family
    (E-CONFIG-KERNELS).
    """
    if use_kernels is None:
        use_kernels = config.family is GPT_OSS and has_kernels(device)
    elif use_kernels and config.family is not GPT_OSS:
        raise ConfigError(
            "the kernels do not support this family",
            found=config.family.model_type,
            expected=GPT_OSS.model_type,
            do="load it with use_kernels=None or False",
            code="E-CONFIG-KERNELS",
        )
    if not use_kernels:
        return PLAIN
    from nmoe_core.engine.kernels.block import KERNELS

    return KERNELS


def with_experts(
    runtime: Runtime,
    choice: ExpertChoice,
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    is_packed: bool,
) -> Runtime:
    """The runtime with the requested MoE backend: the runtime's own backend, or the backend of a
    library (`grouped.py`, `hub.py`). `is_packed` means that the files have all experts as MXFP4.
    Raises ConfigError if the backend does not support this model on this device (E-CONFIG-EXPERTS),
    or is not installed (E-CONFIG-EXTRA)."""
    if choice not in ("grouped", "hub", "int8"):
        return runtime
    is_gpu = device.type == "cuda" and torch.cuda.is_available()
    capability = torch.cuda.get_device_capability(device)[0] if is_gpu else 0
    if choice == "int8":
        expected = "a family without experts, torch.float32 on cpu"
        is_taken = not config.family.has_router and dtype == torch.float32 and device.type == "cpu"
    elif choice == "grouped":
        expected = "a family with experts; on a GPU torch.bfloat16"
        is_taken = config.family.has_router and (device.type != "cuda" or dtype == torch.bfloat16)
    else:
        expected = "gpt_oss, MXFP4, torch.bfloat16 on cuda (8.x or 9.x)"
        is_taken = config.family is GPT_OSS and is_packed and dtype == torch.bfloat16
        is_taken &= capability in CAPABILITIES
    if not is_taken:
        form = "MXFP4" if is_packed else "not MXFP4"
        raise ConfigError(
            f'moe_backend = "{choice}" does not support this model on this device',
            found=f"{config.family.model_type}, {form}, {dtype} on {device.type} ({capability}.x)",
            expected=expected,
            do='set moe_backend = "auto"',
            code="E-CONFIG-EXPERTS",
        )
    if choice == "int8":
        return replace(runtime, block=int8_block, experts=INT8)
    if choice == "hub":
        library()
    return replace(runtime, experts=HUB if choice == "hub" else GROUPED)


def weight_bytes(config: ModelConfig, dtype: torch.dtype, form: ExpertForm) -> int:
    """Memory of the weights in bytes; packed experts take 17 bytes per 32 weights."""
    shapes = part_shapes(config)
    experts = sum(math.prod(shapes[part]) for part in EXPERT_PARTS)
    others = sum(math.prod(shape) for shape in shapes.values()) - experts
    num_tables = 1 if config.tie_word_embeddings else 2
    tables = num_tables * config.vocab_size * config.hidden_size
    size = dtype.itemsize
    if form == "int8":
        return config.num_hidden_layers * (others + experts) + tables * size
    expert_bytes = experts * size if form == "decoded" else experts // GROUP_SIZE * 17
    return config.num_hidden_layers * (others * size + expert_bytes) + tables * size


def room_bytes(device: torch.device) -> int | None:
    """Memory of a GPU in bytes, or the available memory of the machine for a CPU; None for other
    devices."""
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
    """Raise ConfigError if the weights are larger than the device's memory; the error suggests
    settings that fit (E-CONFIG-MEMORY).

    Only weights are counted; caches and activations need memory too.
    """
    device = torch.device(checkpoint.device)
    room = room_bytes(device)
    config = checkpoint.config
    needed = weight_bytes(config, dtype, form)
    if room is None or needed <= room:
        return
    forms: tuple[ExpertForm, ...] = ("decoded", "packed") if checkpoint.is_packed else ("decoded",)
    fitting = []
    for kind in dict.fromkeys((dtype, torch.bfloat16)):
        for other in forms:
            size = weight_bytes(config, kind, other)
            if size <= room:
                setting = f'moe_backend = "{other}", dtype = "{_name(kind)}"'
                fitting.append(f"{setting} ({size / GB:.3g} GB)")
    raise ConfigError(
        f"the weights do not fit into the memory of {device}",
        where=checkpoint.directory,
        found=f'{needed / GB:.3g} GB as moe_backend = "{form}", dtype = "{_name(dtype)}"',
        expected=f"at most {room / GB:.3g} GB",
        do=f"set {' or '.join(fitting)}" if fitting else "use a larger device, or a smaller model",
        code="E-CONFIG-MEMORY",
    )


def _no_device(found: str, expected: str) -> ConfigError:
    return ConfigError(
        "no such device",
        found=found,
        expected=expected,
        do="choose cpu, or use a machine with this device and a torch build for it",
        code="E-CONFIG-DEVICE",
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
