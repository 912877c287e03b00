"""One block of the model in plain torch, and the interface of a runtime.

The feed-forward is SwiGLU (clamped in gpt-oss: model card, section 2), with one expert or the top k
of a mixture (`experts.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nmoe_core.engine.attention import Attention, Context, PackedDocuments
from nmoe_core.engine.experts import PLAIN_EXPERTS, Batching, Chosen, ExpertWay, swiglu_of
from nmoe_core.engine.generation.cache import PagedCache
from nmoe_core.engine.generation.step import Chunk, StepBatch
from nmoe_core.engine.packing import Packing, frozen, linear
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


class FeedForward(nn.Module):
    """The feed-forward of a dense block, on packed rows."""

    def __init__(self, config: ModelConfig, tensors: LayerTensors) -> None:
        super().__init__()
        self.swiglu = swiglu_of(config)
        self.gate_up = tensors.gate_up
        self.down = tensors.down

    def forward(self, x: Tensor, residual: Tensor, batching: Batching) -> Tensor:
        """The residual plus the feed-forward of normalised rows x [N, hidden]."""
        min_rows = batching.min_rows
        gate, up = linear(x, self.gate_up.matrix(0), None, min_rows).chunk(2, dim=-1)
        return residual + linear(self.swiglu(gate, up), self.down.matrix(0), None, min_rows)


class MixtureOfExperts(nn.Module):
    """Router and experts of one block, on packed rows."""

    def __init__(self, config: ModelConfig, tensors: LayerTensors, way: ExpertWay) -> None:
        super().__init__()
        self.experts_per_token = config.experts_per_token
        self.norm_topk_prob = config.norm_topk_prob
        assert tensors.router_weight is not None
        self.router_weight = frozen(tensors.router_weight)
        self.router_bias = frozen(tensors.router_bias)
        self.experts = way.prepare(config, tensors)
        self._product = way.product

    def forward(self, x: Tensor, residual: Tensor, batching: Batching) -> Tensor:
        """The residual plus the weighted sum of each row's experts; x [N, hidden] are the
        normalised rows."""
        chosen = self._route(x, batching.min_rows)
        return self._product(self.experts, x, chosen, residual, batching)

    def _route(self, x: Tensor, min_rows: int) -> Chosen:
        logits = linear(x.float(), self.router_weight, self.router_bias, min_rows)
        top, experts = logits.topk(self.experts_per_token, dim=-1)
        if self.norm_topk_prob:
            return Chosen(torch.softmax(top, dim=-1), experts)
        return Chosen((top - logits.logsumexp(-1, keepdim=True)).exp_(), experts)


class Block(nn.Module):
    """One block: attention and feed-forward, each applied to the normalised residual and added to
    it."""

    def __init__(
        self, config: ModelConfig, layer: int, tensors: LayerTensors, way: ExpertWay
    ) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(tensors.attn_norm, config.rms_norm_eps)
        self.attn = Attention(config, layer, tensors)
        self.mlp_norm = RMSNorm(tensors.mlp_norm, config.rms_norm_eps)
        is_mixture = config.family.has_router
        self.mlp = (
            MixtureOfExperts(config, tensors, way) if is_mixture else FeedForward(config, tensors)
        )

    def forward(self, x: Tensor, context: Context, rotation: Tensor) -> Tensor:
        """Map the residual [N, hidden] before the block to the residual after the block.

        rotation: complex64 [N, head_dim / 2], of the rows' positions.
        """
        x = x + self.attn(self.attn_norm(x), context, rotation)
        return self.mlp(self.mlp_norm(x), x, context)


# A forward pass: (ids [N], context, rotation) -> float32 logits [N, vocab].
Forward = Callable[[Tensor, Any, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Runtime:
    """A way of running blocks: plain torch or kernels.

    block: Makes a block from the configuration, the block's index, its weights and a MoE backend.
    experts: The MoE backend. documents: The context for whole documents. step: The context for new
    tokens over a cache. record: Makes the object that captures decoding steps as CUDA graphs
    (`kernels.graphs`), from the forward pass, the rotations of all positions and the cache.
    """

    block: Callable[[ModelConfig, int, LayerTensors, ExpertWay], nn.Module]
    experts: ExpertWay
    documents: Callable[[ModelConfig, Packing], Context]
    step: Callable[[PagedCache, Sequence[Chunk], bool], StepBatch]
    record: Callable[[Forward, Tensor, PagedCache], Any] | None = None


PLAIN = Runtime(Block, PLAIN_EXPERTS, PackedDocuments, StepBatch)
