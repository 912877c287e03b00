"""Decoders in plain torch or on kernels, their checkpoints, and generation.

Importing this package is cheap: torch is loaded with the first name that needs it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nmoe_core.engine.generation.generator import BatchedGenerator
    from nmoe_core.engine.generation.requests import Completion, GeneratorOptions, Request
    from nmoe_core.engine.generation.sampling import Sampling
    from nmoe_core.engine.model import Transformer
    from nmoe_core.engine.packing import Residual
    from nmoe_core.engine.weights.config import ModelConfig, tap_layers
    from nmoe_core.engine.weights.tiny import make_tiny_checkpoint
    from nmoe_core.engine.weights.weight_files import checkpoint_digest

# fmt: off
__all__ = [
    "BatchedGenerator", "Completion", "GeneratorOptions", "ModelConfig", "Request", "Residual",
    "Sampling", "Transformer", "checkpoint_digest", "make_tiny_checkpoint", "tap_layers",
]
# fmt: on
_HOMES = {
    "generation.generator": ("BatchedGenerator",),
    "generation.requests": ("Completion", "GeneratorOptions", "Request"),
    "generation.sampling": ("Sampling",),
    "model": ("Transformer",),
    "packing": ("Residual",),
    "weights.config": ("ModelConfig", "tap_layers"),
    "weights.tiny": ("make_tiny_checkpoint",),
    "weights.weight_files": ("checkpoint_digest",),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
