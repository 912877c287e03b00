"""Blocks that run on kernels: the same weights, taps and caches, for a GPU.

Between kernels stand torch's matrix products (attention projections, router, unembedding). Results
differ from the plain path by rounding alone. The experts are five kinds of launch and no transfer
to the host; they take k rows of intermediate size and k float32 rows of hidden size per token.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn

from nmoe_core.engine.block import Block, Runtime
from nmoe_core.engine.kernels.contexts import KernelDocuments, KernelStep
from nmoe_core.engine.kernels.expert_product import (
    DenseExperts,
    ExpertWeights,
    alternate_halves,
    grouped_product,
    tile_experts,
    tile_for,
)
from nmoe_core.engine.kernels.graphs import DecodeGraphs, StaticStep
from nmoe_core.engine.kernels.mode import round_to, widen
from nmoe_core.engine.kernels.routing import route
from nmoe_core.engine.kernels.rows import add_rms_norm
from nmoe_core.engine.transfers import on_its_device
from nmoe_core.engine.weights.config import ModelConfig
from nmoe_core.engine.weights.mxfp4 import Experts, PackedExperts

Context = KernelDocuments | KernelStep | StaticStep
_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class FusedExperts:
    """Experts of one block; the rows of `gate_up` are gate, up, gate, up of each expert."""

    gate_up: ExpertWeights
    down: ExpertWeights
    experts_per_token: int
    swiglu_limit: float
    swiglu_alpha: float

    def __call__(
        self, x: Tensor, logits: Tensor, residual: Tensor, batch_invariant: bool = False
    ) -> Tensor:
        """The residual [T, hidden] plus the weighted sum of the experts of each row of x.

        logits: float32 [T, E], the router's. batch_invariant: one tile shape for every batch, so
        that a token's bits do not depend on how many others there are; large batches are slower.
        """
        num_rows, num_experts = len(logits) * self.experts_per_token, logits.shape[1]
        shape = tile_for(0 if batch_invariant else num_rows, num_experts, x.dtype)
        routing = route(logits, self.experts_per_token, shape.rows)
        swiglu = self.swiglu_limit, self.swiglu_alpha
        inner = grouped_product(x, self.gate_up, routing, shape, swiglu)
        return combine(grouped_product(inner, self.down, routing, shape), residual)


@on_its_device
def combine(rows: Tensor, residual: Tensor) -> Tensor:
    """The residual [T, H] plus each token's rows.

    rows is float32 [T * k, H], row t * k + j the weighted result of the token's j-th expert. Rows
    are summed in float32 in the order of j and rounded once before the residual is added, as in the
    plain path.
    """
    num_tokens, width = residual.shape
    out = torch.empty_like(residual)
    if num_tokens:
        _combine_kernel[(num_tokens, triton.cdiv(width, _BLOCK))](
            rows, residual, out, width, TOP_K=len(rows) // num_tokens, BLOCK=_BLOCK
        )
    return out


@triton.jit
def _combine_kernel(
    rows_ptr, residual_ptr, out_ptr, width, TOP_K: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = columns < width
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for j in tl.static_range(TOP_K):
        row = rows_ptr + (token * TOP_K + j) * width
        total += tl.load(row + columns, mask=is_there, other=0.0)
    place = token * width + columns
    residual = tl.load(residual_ptr + place, mask=is_there, other=0.0)
    rounded = widen(round_to(total, residual.dtype))
    out = widen(residual) + rounded
    tl.store(out_ptr + place, round_to(out, residual.dtype), mask=is_there)


class KernelBlock(nn.Module):
    """One block, made of a plain one. Raises CheckpointError: packed experts have a scale the
    kernels do not take (E-CHECKPOINT-SCALE)."""

    def __init__(self, config: ModelConfig, block: Block) -> None:
        super().__init__()
        self.attn = block.attn
        self.attn_norm, self.mlp_norm = block.attn_norm, block.mlp_norm
        self.router_weight, self.router_bias = block.mlp.router_weight, block.mlp.router_bias
        self.experts = FusedExperts(
            _expert_weights(block.mlp.gate_up, block.mlp.gate_up_bias, alternate_halves),
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


def _expert_weights(
    stack: Experts, bias: Tensor, order: Callable[[Tensor], Tensor] = lambda rows: rows
) -> ExpertWeights:
    bias = order(bias)
    if isinstance(stack, PackedExperts):
        return tile_experts(order(stack.blocks.data), order(stack.scales.data), bias)
    return DenseExperts(order(stack.weight.data), bias.float())
