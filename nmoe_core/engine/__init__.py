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
    from nmoe_core.engine.checkpoint import checkpoint_digest, load_embedding_table
    from nmoe_core.engine.config import ModelConfig, tap_layers
    from nmoe_core.engine.generator import BatchedGenerator, Completion, Request
    from nmoe_core.engine.model import Transformer
    from nmoe_core.engine.sampling import Sampling
    from nmoe_core.engine.tiny import make_tiny_checkpoint

__all__ = [
    "BatchedGenerator",
    "Completion",
    "ModelConfig",
    "Request",
    "Sampling",
    "Transformer",
    "checkpoint_digest",
    "load_embedding_table",
    "make_tiny_checkpoint",
    "tap_layers",
]

_HOME = {
    "BatchedGenerator": "generator",
    "Completion": "generator",
    "ModelConfig": "config",
    "Request": "generator",
    "Sampling": "sampling",
    "Transformer": "model",
    "checkpoint_digest": "checkpoint",
    "load_embedding_table": "checkpoint",
    "make_tiny_checkpoint": "tiny",
    "tap_layers": "config",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
