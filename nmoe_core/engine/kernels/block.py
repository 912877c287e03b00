"""Blocks that run on kernels: the same weights, taps and caches, for a GPU.

Between kernels stand torch's matrix products (attention projections, router, unembedding). Results
differ from the plain path by rounding alone.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from nmoe_core.engine.block import Block, Runtime
from nmoe_core.engine.kernels.contexts import KernelDocuments, KernelStep
from nmoe_core.engine.kernels.expert_weights import DenseExperts, ExpertWeights, tile_experts
from nmoe_core.engine.kernels.graphs import DecodeGraphs, StaticStep
from nmoe_core.engine.kernels.mixture import FusedExperts
from nmoe_core.engine.kernels.rows import add_rms_norm
from nmoe_core.engine.weights.config import ModelConfig
from nmoe_core.engine.weights.mxfp4 import Experts, PackedExperts

Context = KernelDocuments | KernelStep | StaticStep


class KernelBlock(nn.Module):
    """One block, made of a plain one.

    Raises:
        CheckpointError: Packed experts have a scale the kernels do not take (E-CHECKPOINT-SCALE).
    """

    def __init__(self, config: ModelConfig, block: Block) -> None:
        super().__init__()
        self.attn = block.attn
        self.attn_norm, self.mlp_norm = block.attn_norm, block.mlp_norm
        self.router_weight, self.router_bias = block.mlp.router_weight, block.mlp.router_bias
        self.experts = FusedExperts(
            _expert_weights(block.mlp.gate_up, block.mlp.gate_up_bias),
            _expert_weights(block.mlp.down, block.mlp.down_bias),
            config.experts_per_token,
            config.swiglu_limit,
            config.swiglu_alpha,
        )

    def forward(self, x: Tensor, context: Context, rotation: Tensor) -> Tensor:
        """As `Block.forward`."""
        attn = self.attn
        _, normalised = add_rms_norm(x, None, self.attn_norm.weight, self.attn_norm.eps)
        qkv = F.linear(normalised, attn.qkv_weight, attn.qkv_bias)
        mixed = context.attend_rows(attn.layer, qkv, rotation, attn.sinks)
        delta = F.linear(mixed.flatten(1), attn.out_weight, attn.out_bias)
        x, normalised = add_rms_norm(x, delta, self.mlp_norm.weight, self.mlp_norm.eps)
        logits = F.linear(normalised.float(), self.router_weight, self.router_bias)
        return self.experts(normalised, logits, x, context.batch_invariant)


KERNELS = Runtime(KernelBlock, KernelDocuments, KernelStep, DecodeGraphs)


def _expert_weights(stack: Experts, bias: Tensor) -> ExpertWeights:
    if isinstance(stack, PackedExperts):
        return tile_experts(stack.blocks.data, stack.scales.data, bias)
    return DenseExperts(stack.weight.data, bias.float())
