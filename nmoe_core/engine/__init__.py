"""A gpt-oss forward pass in plain torch, and the checkpoint formats it reads.

`Transformer` runs the published mixture-of-experts architecture exactly, in float32 or bfloat16,
and hands out hidden states for quality heads; `BatchedGenerator` generates with it. Importing this
package costs nothing: torch is loaded with the first name that needs it. Weights are read from
safetensors only.
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
    from nmoe_core.engine.weights.checkpoint import checkpoint_digest, load_embedding_table
    from nmoe_core.engine.weights.config import ModelConfig, tap_layers
    from nmoe_core.engine.weights.tiny import make_tiny_checkpoint

__all__ = [
    "BatchedGenerator",
    "Completion",
    "GeneratorOptions",
    "ModelConfig",
    "Request",
    "Residual",
    "Sampling",
    "Transformer",
    "checkpoint_digest",
    "load_embedding_table",
    "make_tiny_checkpoint",
    "tap_layers",
]

_HOME = {
    "BatchedGenerator": "generation.generator",
    "Completion": "generation.requests",
    "GeneratorOptions": "generation.requests",
    "ModelConfig": "weights.config",
    "Request": "generation.requests",
    "Residual": "packing",
    "Sampling": "generation.sampling",
    "Transformer": "model",
    "checkpoint_digest": "weights.checkpoint",
    "load_embedding_table": "weights.checkpoint",
    "make_tiny_checkpoint": "weights.tiny",
    "tap_layers": "weights.config",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
