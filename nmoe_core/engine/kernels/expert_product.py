"""The grouped product: multiplies sorted rows by the weights of their experts in one launch.

Weights are tiled along K once, when they are loaded; MXFP4 codes stay packed. A tile holds 64
inputs of all output rows, contiguously, so that a program loads complete cache lines. The codes of
a row are in 16 words (see `mxfp4_words.py`), which are decoded in the registers into which they
were loaded.

A program computes one tile of rows of one expert by one block of output columns. The prologue
gathers activations by sorted choice; the epilogue adds the bias. For the first projection, the
epilogue then applies SwiGLU; gates and ups alternate, so one product computes both. For the second
projection, it multiplies the rows by their routing weights and writes them in token order. Decoding
is exact. Sums are float32.

If the second projection has too few programs for all multiprocessors, its inputs are split: each
split is a separate sum, and `block.combine`, which adds the rows of a token anyway, adds the splits
in order. The number of splits depends only on shapes, not on the device.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from nmoe_core.base.errors import CheckpointError
from nmoe_core.engine.kernels.mode import INTERPRETED, dot, round_to
from nmoe_core.engine.kernels.mxfp4_words import CODES, decoded, words_of
from nmoe_core.engine.kernels.routing import Routing
from nmoe_core.engine.transfers import on_its_device
from nmoe_core.engine.weights.config import GROUP_SIZE

TILE_K = 2 * GROUP_SIZE
WORDS = TILE_K // CODES
# Unpacked codes have a factor of 2^-126. The factor 2^(s - 1) that cancels it must be a bfloat16
# number, with exponent s + 126.
LARGEST_SCALE = 128
EXPONENT_OFFSET = 126


@dataclass(frozen=True, slots=True)
class TiledExperts:
    """MXFP4 weights of one projection of all experts.

    codes: int16 [E, K / 64, N, 16], words of four codes. scales: int16 [E, K / 64, N], two
    exponents each; K is padded with zeros to complete tiles. in_features: K before it was padded.
    bias: float32 [E, N].
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
    CheckpointError if a scale byte is above `LARGEST_SCALE` (large weights, or NaN;
    E-CHECKPOINT-SCALE); such experts must be decoded."""
    largest = int(scales.max())
    if largest > LARGEST_SCALE:
        raise CheckpointError(
            "an MXFP4 scale is too large for the packed kernels",
            found=f"scale byte {largest}",
            expected=f"at most {LARGEST_SCALE}",
            do='set moe_backend = "decoded"',
            code="E-CHECKPOINT-SCALE",
        )
    num_experts, rows, groups, _ = blocks.shape
    padding = groups % 2
    tiles = (groups + padding) // 2
    codes = torch.empty(num_experts, tiles, rows, WORDS, dtype=torch.int16, device=blocks.device)
    exponents = codes.new_empty(num_experts, tiles, rows)
    # One expert at a time, since the unpacked nibbles of all experts would need twice the memory of
    # the weights.
    for expert in range(num_experts):
        nibbles = torch.stack([blocks[expert] & 15, blocks[expert] >> 4], -1).flatten(-2)
        nibbles = F.pad(nibbles, (0, 0, 0, padding)).view(rows, tiles, CODES, WORDS)
        codes[expert] = words_of(nibbles.permute(2, 1, 0, 3))
        both = F.pad(scales[expert].short() + EXPONENT_OFFSET, (0, padding)).view(rows, tiles, 2)
        exponents[expert] = (both[..., 0] | (both[..., 1] << 8)).T
    return TiledExperts(codes, exponents, bias.float().contiguous(), groups * GROUP_SIZE)


@dataclass(frozen=True, slots=True)
class TileShape:
    """Rows and columns of a program's tile, and the compiler's options."""

    rows: int
    columns: int
    num_warps: int
    num_stages: int


# Tiles from few to many rows per expert. With few rows, most time goes to reading and decoding
# weights. From 4 rows on, these were the fastest of about forty shapes on an H100
# (docs/kernels.md).
TILES = tuple(TileShape(rows, columns=256, num_warps=4, num_stages=3) for rows in (16, 32, 64))
DECODE = TILES[0]
PREFILL = TILES[-1]
# On an H100, splits saved a quarter to a half of the time of products of up to 408 programs (eight
# tokens), and cost a few per cent from 432 programs on. Smaller splits were not measured.
MOST_SPLIT_PROGRAMS = 420
LEAST_K_TILES = 8
# float32 is multiplied by scalar instructions, with the inputs of a tile in registers. With a
# larger tile, registers would spill.
FLOAT32 = TileShape(rows=16, columns=64, num_warps=8, num_stages=2)


def tile_for(num_rows: int, num_experts: int, dtype: torch.dtype) -> TileShape:
    """The smallest tile with more rows than an expert has on average, or the largest tile if none
    has. On a GPU, float32 has a separate tile."""
    if dtype == torch.float32 and not INTERPRETED.value:
        return FLOAT32
    return next((tile for tile in TILES if num_rows < tile.rows * num_experts), PREFILL)


def splits_for(routing: Routing, weights: ExpertWeights, shape: TileShape) -> int:
    """Number of splits of a product's inputs: above one only for the smallest tile, in batches with
    few programs."""
    num_tiles = len(routing.tile_experts)
    num_outputs = weights.bias.shape[1]
    programs = num_tiles * triton.cdiv(num_outputs, shape.columns)
    if shape.rows > DECODE.rows or programs > MOST_SPLIT_PROGRAMS:
        return 1
    return max(1, triton.cdiv(weights.in_features, TILE_K) // LEAST_K_TILES)


@on_its_device
def grouped_product(
    x: Tensor,
    weights: ExpertWeights,
    routing: Routing,
    shape: TileShape,
    swiglu: tuple[float, float] | None = None,
    splits: int = 1,
) -> Tensor:
    """The first projection with SwiGLU, or the second projection times the routing weights.

    Args:
        x: [T, K]; for the second projection [T * k, K], in sorted order.
        weights: With N outputs; for the first projection in the order gate, up, gate, up.
        routing: The sorted rows, in tiles of `shape.rows` rows.
        shape: Shape of a program's tile.
        swiglu: For the first projection: the limit of gates and ups, and the factor inside the
            gate's sigmoid. None for the second.
        splits: Number of parts into which the inputs of the second projection are split.

    Returns:
        First projection: [T * k, N / 2] of x's type, in sorted order. Second: float32
        [splits, T * k, N] in token order, row t * k + j a part of the token's j-th expert.
    """
    if x.shape[1] != weights.in_features or shape.rows != routing.tile_rows:
        raise ValueError(f"{x.shape[1]=} and {shape.rows=} do not fit the weights and the routing")
    is_packed = isinstance(weights, TiledExperts)
    is_first = swiglu is not None
    num_outputs = weights.bias.shape[1]
    num_tiles = len(routing.tile_experts)
    num_rows = routing.experts.numel()
    num_k_tiles = triton.cdiv(x.shape[1], TILE_K)
    if is_first:
        out = x.new_empty(num_rows, num_outputs // 2)
    else:
        out = x.new_empty(splits, num_rows, num_outputs, dtype=torch.float32)
    if not num_tiles:
        return out
    _product_kernel[(num_tiles * triton.cdiv(num_outputs, shape.columns), splits)](
        x.contiguous(),
        *((weights.codes, weights.scales) if is_packed else (weights.weight, weights.weight)),
        weights.bias, out, routing.weights, routing.sorted_choices, routing.expert_starts,
        routing.tile_experts, routing.tile_starts,
        num_tiles, weights.in_features, num_outputs, *(swiglu or (0.0, 0.0)),
        triton.cdiv(num_k_tiles, splits), num_rows * num_outputs,
        TOP_K=routing.experts.shape[1], IS_PACKED=is_packed, IS_SWIGLU=is_first,
        IS_SPLIT=splits > 1,
        BLOCK_M=shape.rows, BLOCK_N=shape.columns, BLOCK_K=TILE_K, WORDS=WORDS,
        num_warps=shape.num_warps, num_stages=shape.num_stages,
    )  # fmt: skip
    return out


@triton.jit
def _product_kernel(
    x_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr, routing_ptr, sorted_ptr, expert_starts_ptr,
    tile_experts_ptr, tile_starts_ptr,
    num_tiles, num_inputs, num_outputs, limit, alpha, split_tiles, part_size,
    TOP_K: tl.constexpr, IS_PACKED: tl.constexpr, IS_SWIGLU: tl.constexpr, IS_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    # Tiles of an expert are neighbours in the grid, so they share its weights in the cache.
    tile = tl.program_id(0) % num_tiles
    column_block = tl.program_id(0) // num_tiles
    expert = tl.load(tile_experts_ptr + tile)
    if expert < 0:
        return
    places = tl.load(tile_starts_ptr + tile) + tl.arange(0, BLOCK_M)
    is_row = places < tl.load(expert_starts_ptr + expert + 1)
    choices = tl.load(sorted_ptr + places, mask=is_row, other=0)
    columns = column_block * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = columns < num_outputs
    expert = expert.to(tl.int64)
    rows = choices // TOP_K if IS_SWIGLU else places
    x_rows = x_ptr + rows.to(tl.int64)[:, None] * num_inputs
    num_k_tiles = tl.cdiv(num_inputs, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    first_tile = 0
    end_tile = num_k_tiles
    if IS_SPLIT:
        first_tile = tl.program_id(1) * split_tiles
        end_tile = tl.minimum(first_tile + split_tiles, num_k_tiles)
    for k_tile in range(first_tile, end_tile):
        ks = k_tile * BLOCK_K + tl.arange(0, BLOCK_K)
        is_input = (ks < num_inputs)[None, :]
        x = tl.load(x_rows + ks[None, :], mask=is_row[:, None] & is_input, other=0.0)
        if IS_PACKED:
            stored = (expert * num_k_tiles + k_tile) * num_outputs + columns
            pointers = weight_ptr + stored[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
            words = tl.load(pointers, mask=is_column[:, None], other=0)
            scales = tl.load(scale_ptr + stored, mask=is_column, other=0)
            w = decoded(words, scales, x.dtype)
        else:
            pointers = (expert * num_outputs + columns)[:, None] * num_inputs + ks[None, :]
            w = tl.load(weight_ptr + pointers, mask=is_column[:, None] & is_input, other=0.0)
        acc = dot(x, tl.trans(w), acc)
    bias = tl.load(bias_ptr + expert * num_outputs + columns, mask=is_column, other=0.0)
    if IS_SPLIT:
        bias = tl.where(tl.program_id(1) == 0, bias, 0.0)
    acc += bias[None, :]
    if IS_SWIGLU:
        gate, up = tl.split(tl.reshape(acc, (BLOCK_M, BLOCK_N // 2, 2)))
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        result = (up + 1.0) * (gate / (1.0 + tl.exp(-alpha * gate)))
        num_columns = num_outputs // 2
        out_columns = column_block * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        out_rows = places
    else:
        result = acc * tl.load(routing_ptr + choices, mask=is_row, other=0.0)[:, None]
        num_columns = num_outputs
        out_columns = columns
        out_rows = choices
        out_ptr += tl.program_id(1).to(tl.int64) * part_size
    out = out_ptr + out_rows.to(tl.int64)[:, None] * num_columns + out_columns[None, :]
    result = round_to(result, out_ptr.dtype.element_ty)
    tl.store(out, result, mask=is_row[:, None] & (out_columns < num_columns)[None, :])
