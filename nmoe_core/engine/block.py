"""One block of the model in plain torch, and what a way of running blocks consists of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from nmoe_core.engine.attention import Attention, Context, PackedDocuments
from nmoe_core.engine.generation.cache import PagedCache
from nmoe_core.engine.generation.step import Chunk, StepBatch
from nmoe_core.engine.moe import MixtureOfExperts
from nmoe_core.engine.packing import Packing
from nmoe_core.engine.weights.checkpoint import LayerTensors
from nmoe_core.engine.weights.config import ModelConfig


class RMSNorm(nn.Module):
    """x / rms(x) * weight, in float32; the result has the dtype of x."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps).to(x.dtype)


class Block(nn.Module):
    """One block: attention and experts, each on the normalised residual and added to it."""

    def __init__(self, config: ModelConfig, layer: int, tensors: LayerTensors) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(tensors.attn_norm, config.rms_norm_eps)
        self.attn = Attention(config, layer, tensors)
        self.mlp_norm = RMSNorm(tensors.mlp_norm, config.rms_norm_eps)
        self.mlp = MixtureOfExperts(config, tensors)

    def forward(self, x: Tensor, context: Context, rotation: Tensor) -> Tensor:
        """Residual [N, hidden] before the block to the one after it.

        rotation: complex64 [N, head_dim / 2], of the rows' positions.
        """
        x = x + self.attn(self.attn_norm(x), context, rotation)
        return x + self.mlp(self.mlp_norm(x), min_rows=context.min_rows)


# Ids [N], context and rotation to float32 logits [N, vocab].
Forward = Callable[[Tensor, Any, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Runtime:
    """A way of running blocks.

    block: Makes its block of a plain one. documents, step: Contexts of whole documents and of new
    tokens over a cache. record: Makes a recorder of decoding steps (`kernels.graphs`), given the
    forward pass, the rotations of all positions and the cache.
    """

    block: Callable[[ModelConfig, Block], nn.Module]
    documents: Callable[[ModelConfig, Packing], Context]
    step: Callable[[PagedCache, Sequence[Chunk], bool], StepBatch]
    record: Callable[[Forward, Tensor, PagedCache], Any] | None = None


PLAIN = Runtime(lambda config, block: block, PackedDocuments, StepBatch)
