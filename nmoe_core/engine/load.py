"""Loads the parts of a model from a checkpoint, and chooses what its blocks run on.

The CPU and unverified GPUs run plain torch, others the Triton kernels of `nmoe_core.engine.kernels`
(`backend.has_kernels`). With kernels each block is taken over as it is read, so that the plain
form of two blocks is never in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from nmoe_core.base.errors import ConfigError
from nmoe_core.base.settings import ExpertChoice
from nmoe_core.engine import backend, memory
from nmoe_core.engine.block import PLAIN, Block, Runtime
from nmoe_core.engine.weights.checkpoint import checkpoint_digest, open_checkpoint
from nmoe_core.engine.weights.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Parts:
    """What a `Transformer` consists of: blocks of `runtime`, and the tables around them.

    embedding and unembedding are [vocab, hidden], final_norm is float32 [hidden]; digest names the
    weights.
    """

    config: ModelConfig
    runtime: Runtime
    blocks: Sequence[nn.Module]
    embedding: Tensor
    final_norm: Tensor
    unembedding: Tensor
    digest: str


def choose_runtime(device: torch.device, use_kernels: bool | None = None) -> Runtime:
    """Kernels where the device has them or where they are asked for, else plain torch."""
    if use_kernels is None:
        use_kernels = backend.has_kernels(device)
    if not use_kernels:
        return PLAIN
    from nmoe_core.engine.kernels.block import KERNELS

    return KERNELS


def load_parts(
    path: str | Path,
    config: ModelConfig | None,
    device: str | torch.device,
    dtype: torch.dtype,
    experts: ExpertChoice,
    use_kernels: bool | None,
) -> Parts:
    """Read a checkpoint; arguments and errors as `Transformer.from_checkpoint`."""
    if dtype not in (torch.float32, torch.bfloat16):
        raise ConfigError(
            "the engine does not compute in this dtype",
            found=dtype,
            expected="torch.float32 or torch.bfloat16",
            code="E-CONFIG-DTYPE",
        )
    device = backend.usable_device(device)
    with open_checkpoint(path, config, device) as checkpoint:
        config, form = checkpoint.config, checkpoint.expert_form(experts)
        memory.check_fits(checkpoint, dtype, form)
        runtime = choose_runtime(device, use_kernels)
        # The tables first: what is read of a mapping counts, and they are the largest tensors.
        embedding, unembedding = checkpoint.embedding(dtype), checkpoint.unembedding(dtype)
        blocks = [
            runtime.block(config, Block(config, layer, checkpoint.layer(layer, dtype, form)))
            for layer in range(config.num_hidden_layers)
        ]
        final_norm = checkpoint.final_norm()
    digest = checkpoint_digest(path)
    return Parts(config, runtime, blocks, embedding, final_norm, unembedding, digest)
