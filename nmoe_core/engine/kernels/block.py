"""Transformer blocks on GPU kernels, with the same weights, taps and caches as the plain blocks.

Torch's matrix products (attention projections, router, unembedding) run between kernels. Results
differ from the plain path only by rounding. The experts need five kinds of kernel launches, and no
transfer to the host. Memory per token: k rows of intermediate size and k float32 rows of hidden
size, or a few times as much if the second product is split.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn

from nmoe_core.engine.attention import Attention
from nmoe_core.engine.block import RMSNorm, Runtime
from nmoe_core.engine.experts import Batching, Chosen, ExpertWay, alternate_halves
from nmoe_core.engine.kernels.contexts import KernelDocuments, KernelStep
from nmoe_core.engine.kernels.expert_product import (
    DenseExperts,
    ExpertWeights,
    grouped_product,
    splits_for,
    tile_experts,
    tile_for,
)
from nmoe_core.engine.kernels.graphs import DecodeGraphs, StaticStep
from nmoe_core.engine.kernels.mode import round_to, widen
from nmoe_core.engine.kernels.routing import choose_experts, sort_choices
from nmoe_core.engine.kernels.rows import add_rms_norm
from nmoe_core.engine.packing import frozen
from nmoe_core.engine.transfers import on_its_device
from nmoe_core.engine.weights.checkpoint import LayerTensors
from nmoe_core.engine.weights.config import ModelConfig
from nmoe_core.engine.weights.mxfp4 import Experts, PackedExperts

Context = KernelDocuments | KernelStep | StaticStep
_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class FusedExperts:
    """Experts of one block; the rows of `gate_up` are gate, up, gate, up of each expert."""

    gate_up: ExpertWeights
    down: ExpertWeights
    swiglu_limit: float
    swiglu_alpha: float

    def __call__(
        self, x: Tensor, chosen: Chosen, residual: Tensor, batch_invariant: bool = False
    ) -> Tensor:
        """The residual [T, hidden] plus the weighted sum of the experts of each row of x.

        batch_invariant: use one tile shape and no splits for every batch, so that the bits of a
        token's result do not depend on the number of other tokens. Large and very small batches are
        slower.
        """
        num_rows = chosen.experts.numel()
        num_experts = len(self.down.bias)
        shape = tile_for(0 if batch_invariant else num_rows, num_experts, x.dtype)
        routing = sort_choices(*chosen, num_experts, shape.rows)
        swiglu = self.swiglu_limit, self.swiglu_alpha
        inner = grouped_product(x, self.gate_up, routing, shape, swiglu)
        splits = 1 if batch_invariant else splits_for(routing, self.down, shape)
        rows = grouped_product(inner, self.down, routing, shape, splits=splits)
        return combine(rows, residual)


@on_its_device
def combine(rows: Tensor, residual: Tensor) -> Tensor:
    """The residual [T, H] plus the sum of each token's rows.

    rows is float32 [splits, T * k, H]; row t * k + j of a split is a part of the weighted result of
    the token's j-th expert. The splits are added in order, then the experts in the order of j, in
    float32; the total is rounded once before the residual is added, as in the plain path.
    """
    num_tokens, width = residual.shape
    out = torch.empty_like(residual)
    if num_tokens:
        splits, num_rows, _ = rows.shape
        _combine_kernel[(num_tokens, triton.cdiv(width, _BLOCK))](
            rows, residual, out, width, num_rows * width,
            TOP_K=num_rows // num_tokens, SPLITS=splits, BLOCK=_BLOCK,
        )  # fmt: skip
    return out


@triton.jit
def _combine_kernel(
    rows_ptr, residual_ptr, out_ptr, width, part_size,
    TOP_K: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = columns < width
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for j in tl.static_range(TOP_K):
        row = rows_ptr + (token * TOP_K + j) * width
        result = tl.load(row + columns, mask=is_there, other=0.0)
        for split in tl.static_range(1, SPLITS):
            part = row + split * part_size
            result += tl.load(part + columns, mask=is_there, other=0.0)
        total += result
    place = token * width + columns
    residual = tl.load(residual_ptr + place, mask=is_there, other=0.0)
    rounded = widen(round_to(total, residual.dtype))
    out = widen(residual) + rounded
    tl.store(out_ptr + place, round_to(out, residual.dtype), mask=is_there)


class KernelBlock(nn.Module):
    """`block.Block` on kernels. Raises CheckpointError if packed experts have a scale that the
    kernels do not support (E-CHECKPOINT-SCALE)."""

    def __init__(
        self, config: ModelConfig, layer: int, tensors: LayerTensors, way: ExpertWay
    ) -> None:
        super().__init__()
        self.attn = Attention(config, layer, tensors)
        self.attn_norm = RMSNorm(tensors.attn_norm, config.rms_norm_eps)
        self.mlp_norm = RMSNorm(tensors.mlp_norm, config.rms_norm_eps)
        self.experts_per_token = config.experts_per_token
        self.router_weight = frozen(_router_weight(tensors))
        self.router_bias = frozen(tensors.router_bias)
        self.experts = way.prepare(config, tensors)
        self._product = way.product

    def forward(self, x: Tensor, context: Context, rotation: Tensor) -> Tensor:
        """As `Block.forward`."""
        attn = self.attn
        _, normalised = add_rms_norm(x, None, self.attn_norm.weight, self.attn_norm.eps)
        qkv = F.linear(normalised, attn.qkv_weight, attn.qkv_bias)
        mixed = context.attend_rows(attn.layer, qkv, rotation, attn.sinks)
        delta = F.linear(mixed.flatten(1), attn.out_weight, attn.out_bias)
        x, normalised = add_rms_norm(x, delta, self.mlp_norm.weight, self.mlp_norm.eps)
        logits = self._router_logits(normalised)
        chosen = Chosen(*choose_experts(logits, self.experts_per_token))
        return self._product(self.experts, normalised, chosen, x, context)

    def _router_logits(self, x: Tensor) -> Tensor:
        weight = self.router_weight
        bias = self.router_bias
        if weight.dtype == torch.float32:
            return F.linear(x.float(), weight, bias)
        return torch.addmm(bias, x, weight.T, out_dtype=torch.float32)


def _router_weight(tensors: LayerTensors) -> Tensor:
    """The router's weight. On a GPU, it is converted to the activations' type if this type
    represents every value exactly, as in published models. Products of two bfloat16 numbers are
    exact in float32, and a float32 matrix product took five times as long in a decoding step."""
    weight = tensors.router_weight
    narrow = weight.to(tensors.qkv_weight.dtype)
    return narrow if weight.is_cuda and torch.equal(narrow.float(), weight) else weight


def _fused(config: ModelConfig, tensors: LayerTensors) -> FusedExperts:
    return FusedExperts(
        _expert_weights(tensors.gate_up, tensors.gate_up_bias, alternate_halves),
        _expert_weights(tensors.down, tensors.down_bias),
        config.swiglu_limit,
        config.swiglu_alpha,
    )


def _product(
    kept: FusedExperts, x: Tensor, chosen: Chosen, residual: Tensor, batching: Batching
) -> Tensor:
    return kept(x, chosen, residual, batching.batch_invariant)


def _expert_weights(
    stack: Experts, bias: Tensor, order: Callable[[Tensor], Tensor] = lambda rows: rows
) -> ExpertWeights:
    bias = order(bias)
    if isinstance(stack, PackedExperts):
        return tile_experts(order(stack.blocks.data), order(stack.scales.data), bias)
    return DenseExperts(order(stack.weight.data), bias.float())


KERNEL_EXPERTS = ExpertWay(_fused, _product)
KERNELS = Runtime(KernelBlock, KERNEL_EXPERTS, KernelDocuments, KernelStep, DecodeGraphs)
