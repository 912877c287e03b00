"""The grouped product: sorted rows times the weights of their experts, in one launch.

Weights are tiled along K once, at load, MXFP4 codes kept packed. A tile is 64 inputs of all output
rows, contiguous, so that a program's loads are whole lines: `codes[expert, tile, row, j]` holds the
code of input `64 * tile + j` in its low nibble and that of input `64 * tile + 32 + j` in its high
one. Each half of a tile is one MXFP4 group with one scale per row, so registers need no shuffle.

A program computes one tile of rows of one expert by one block of output columns. The prologue
gathers activations by sorted choice; the epilogue adds the bias and either applies SwiGLU (the
first projection) or weighs the rows and puts them back in token order (the second). MXFP4 codes are
shifted into bfloat16 bits and multiplied by their group's scale, which is exact. Sums are float32.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nmoe_core.base.errors import CheckpointError
from nmoe_core.engine.kernels.mode import dot, round_to, widen
from nmoe_core.engine.kernels.routing import Routing
from nmoe_core.engine.transfers import on_its_device
from nmoe_core.engine.weights.config import GROUP_SIZE

TILE_K = 2 * GROUP_SIZE
# 2^(s - 1), which undoes the bias of a code read as bfloat16 bits, must itself be a bfloat16.
LARGEST_SCALE = 128


@dataclass(frozen=True, slots=True)
class TiledExperts:
    """MXFP4 weights of one projection of all experts.

    codes: uint8 [E, K / 64, N, 32]. scales: uint8 [E, K / 32, N]; K is rounded up to whole tiles
    with zero codes. in_features: K before rounding. bias: float32 [E, N].
    """

    codes: Tensor
    scales: Tensor
    bias: Tensor
    in_features: int


@dataclass(frozen=True, slots=True)
class DenseExperts:
    """Weights of one projection of all experts in the activations' type.

    weight: [E, N, K], K contiguous. bias: float32 [E, N].
    """

    weight: Tensor
    bias: Tensor

    @property
    def in_features(self) -> int:
        """K."""
        return self.weight.shape[2]


ExpertWeights = TiledExperts | DenseExperts


def tile_experts(blocks: Tensor, scales: Tensor, bias: Tensor) -> TiledExperts:
    """Tile MXFP4 weights: blocks uint8 [E, N, K / 32, 16], scales uint8 [E, N, K / 32]. Raises
    CheckpointError: a scale stands for weights of 2^2 and more, or for NaN (E-CHECKPOINT-SCALE):
    keep such experts decoded."""
    largest = int(scales.max())
    if largest > LARGEST_SCALE:
        raise CheckpointError(
            "an MXFP4 scale is beyond what the packed kernels take",
            found=f"scale byte {largest}",
            expected=f"at most {LARGEST_SCALE}",
            do="load the experts decoded",
            code="E-CHECKPOINT-SCALE",
        )
    num_experts, rows, groups, _ = blocks.shape
    padding = groups % 2
    codes = blocks.new_zeros(num_experts, (groups + padding) // 2, rows, GROUP_SIZE)
    turned = scales.new_zeros(num_experts, groups + padding, rows)
    # One expert at a time: the unpacked nibbles of all of them would be twice the weights.
    for expert in range(num_experts):
        nibbles = torch.stack([blocks[expert] & 15, blocks[expert] >> 4], -1).flatten(-2)
        if padding:
            nibbles = torch.cat([nibbles, nibbles.new_zeros(rows, 1, GROUP_SIZE)], 1)
        low, high = nibbles.view(rows, -1, 2, GROUP_SIZE).unbind(2)
        codes[expert] = (low | (high << 4)).transpose(0, 1)
        turned[expert, :groups] = scales[expert].T
    return TiledExperts(codes, turned, bias.float().contiguous(), groups * GROUP_SIZE)


@dataclass(frozen=True, slots=True)
class TileShape:
    """Rows and columns of a program's tile, and how the compiler is to run it.

    The first projection takes half the columns of gates and as many of ups: two sums per program.
    """

    rows: int
    columns: int
    num_warps: int
    num_stages: int


# Many rows per expert; or a few, where reading the weights is all that costs.
PREFILL = TileShape(rows=128, columns=128, num_warps=8, num_stages=3)
DECODE = TileShape(rows=16, columns=128, num_warps=4, num_stages=4)


@on_its_device
def grouped_product(
    x: Tensor,
    weights: ExpertWeights,
    routing: Routing,
    shape: TileShape,
    swiglu: tuple[float, float] | None = None,
) -> Tensor:
    """First projection with SwiGLU; or the second, each row times its routing weight.

    Args:
        x: [T, K]; [T * k, K] in sorted order for the second projection.
        weights: N outputs; for the first projection all gates before all ups.
        routing: Where the rows go, in tiles of `shape.rows`.
        shape: Of a program's tile.
        swiglu: Of the first projection: the limit of gates and ups, and the factor inside the
            gate's sigmoid. None for the second.

    Returns:
        First projection: [T * k, N / 2] of x's type, in sorted order. Second: float32 [T * k, N] in
        token order, row t * k + j of the token's j-th expert.
    """
    if x.shape[1] != weights.in_features or shape.rows != routing.tile_rows:
        raise ValueError(f"{x.shape[1]=} and {shape.rows=} do not fit the weights and the routing")
    is_packed, halves = isinstance(weights, TiledExperts), 1 if swiglu is None else 2
    num_outputs = weights.bias.shape[1]
    columns, block_columns = num_outputs // halves, shape.columns // halves
    num_tiles = len(routing.tile_experts)
    out = x.new_empty(
        routing.experts.numel(), columns, dtype=torch.float32 if swiglu is None else x.dtype
    )
    if not num_tiles:
        return out
    _product_kernel[(num_tiles * triton.cdiv(columns, block_columns),)](
        x.contiguous(),
        *((weights.codes, weights.scales) if is_packed else (weights.weight, weights.weight)),
        weights.bias, out, routing.weights, routing.sorted_choices, routing.expert_starts,
        routing.tile_experts, routing.tile_starts,
        num_tiles, weights.in_features, columns, num_outputs, *(swiglu or (0.0, 0.0)),
        TOP_K=routing.experts.shape[1], IS_PACKED=is_packed, IS_SWIGLU=swiglu is not None,
        BLOCK_M=shape.rows, BLOCK_N=block_columns, BLOCK_K=TILE_K,
        num_warps=shape.num_warps, num_stages=shape.num_stages,
    )  # fmt: skip
    return out


@triton.jit
def _product_kernel(
    x_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr, routing_ptr, sorted_ptr, expert_starts_ptr,
    tile_experts_ptr, tile_starts_ptr,
    num_tiles, num_inputs, num_columns, num_outputs, limit, alpha,
    TOP_K: tl.constexpr, IS_PACKED: tl.constexpr, IS_SWIGLU: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # Tiles of one expert are neighbours in the grid, so they share its weights in the cache.
    tile = tl.program_id(0) % num_tiles
    column_block = tl.program_id(0) // num_tiles
    expert = tl.load(tile_experts_ptr + tile)
    if expert < 0:
        return
    places = tl.load(tile_starts_ptr + tile) + tl.arange(0, BLOCK_M)
    is_row = places < tl.load(expert_starts_ptr + expert + 1)
    choices = tl.load(sorted_ptr + places, mask=is_row, other=0)
    columns = column_block * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = columns < num_columns
    expert = expert.to(tl.int64)
    rows = choices // TOP_K if IS_SWIGLU else places
    x_rows = x_ptr + rows.to(tl.int64)[:, None] * num_inputs
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    other = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k_tile in range(tl.cdiv(num_inputs, BLOCK_K)):
        if IS_PACKED:
            stored = expert * tl.cdiv(num_inputs, BLOCK_K) + k_tile
            codes = _codes(weight_ptr, stored, columns, is_column, num_outputs, BLOCK_K)
            if IS_SWIGLU:
                up_columns = columns + num_columns
                up_codes = _codes(weight_ptr, stored, up_columns, is_column, num_outputs, BLOCK_K)
            for half in tl.static_range(2):
                ks = k_tile * BLOCK_K + half * (BLOCK_K // 2) + tl.arange(0, BLOCK_K // 2)
                is_there = is_row[:, None] & (ks < num_inputs)[None, :]
                x = tl.load(x_rows + ks[None, :], mask=is_there, other=0.0)
                scales = scale_ptr + (stored * 2 + half) * num_outputs
                w = _decoded(codes >> (4 * half), scales + columns, is_column, x.dtype)
                acc = dot(x, tl.trans(w), acc)
                if IS_SWIGLU:
                    w = _decoded(up_codes >> (4 * half), scales + up_columns, is_column, x.dtype)
                    other = dot(x, tl.trans(w), other)
        else:
            ks = k_tile * BLOCK_K + tl.arange(0, BLOCK_K)
            is_input = (ks < num_inputs)[None, :]
            x = tl.load(x_rows + ks[None, :], mask=is_row[:, None] & is_input, other=0.0)
            pointers = (expert * num_outputs + columns)[:, None] * num_inputs + ks[None, :]
            is_there = is_column[:, None] & is_input
            w = tl.load(weight_ptr + pointers, mask=is_there, other=0.0)
            acc = dot(x, tl.trans(w), acc)
            if IS_SWIGLU:
                up = weight_ptr + num_columns * num_inputs
                w = tl.load(up + pointers, mask=is_there, other=0.0)
                other = dot(x, tl.trans(w), other)
    bias_row = bias_ptr + expert * num_outputs
    acc += tl.load(bias_row + columns, mask=is_column, other=0.0)[None, :]
    if IS_SWIGLU:
        other += tl.load(bias_row + num_columns + columns, mask=is_column, other=0.0)[None, :]
        gate = tl.minimum(acc, limit)
        up = tl.minimum(tl.maximum(other, -limit), limit)
        acc = (up + 1.0) * (gate / (1.0 + tl.exp(-alpha * gate)))
        out_rows = places
    else:
        acc *= tl.load(routing_ptr + choices, mask=is_row, other=0.0)[:, None]
        out_rows = choices
    out = out_ptr + out_rows.to(tl.int64)[:, None] * num_columns + columns[None, :]
    acc = round_to(acc, out_ptr.dtype.element_ty)
    tl.store(out, acc, mask=is_row[:, None] & is_column[None, :])


@triton.jit
def _codes(codes_ptr, tile, columns, is_column, num_outputs, BLOCK_K: tl.constexpr):
    """Code bytes of a tile, uint16 [columns, BLOCK_K / 2], one contiguous run."""
    bytes_of_row: tl.constexpr = BLOCK_K // 2
    places = (tile * num_outputs + columns)[:, None] * bytes_of_row
    places += tl.arange(0, bytes_of_row)[None, :]
    return tl.load(codes_ptr + places, mask=is_column[:, None], other=0).to(tl.uint16)


@triton.jit
def _decoded(codes, scale_pointers, is_column, dtype: tl.constexpr):
    """Weights of the low nibbles of `codes` [columns, inputs], whose rows have one scale each."""
    scales = tl.load(scale_pointers, mask=is_column, other=1).to(tl.uint16)
    # The sign in bit 15, exponent and mantissa bits at 6..8: the value times 2^-126.
    values = (((codes & 7) << 6) | ((codes & 8) << 12)).to(tl.bfloat16, bitcast=True)
    # 2^(scale - 127 + 126), exact in bfloat16 for every scale that packing lets through.
    powers = ((scales + 126) << 7).to(tl.bfloat16, bitcast=True)
    return round_to(widen(values) * widen(powers)[:, None], dtype)
