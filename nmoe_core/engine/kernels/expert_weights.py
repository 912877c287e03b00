"""Expert weights as the grouped product reads them: tiled along K, MXFP4 codes kept packed.

A tile is 64 inputs of all output rows, contiguous, so that a program's loads are whole lines:
`codes[expert, tile, row, j]` holds the code of input `64 * tile + j` in its low nibble and that of
input `64 * tile + 32 + j` in its high one. Each half of a tile is one MXFP4 group with one scale a
row: nothing is shuffled in registers. The checkpoint's order is turned into this once at load.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nmoe_core.base.errors import CheckpointError
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
    """Tile MXFP4 weights: blocks uint8 [E, N, K / 32, 16], scales uint8 [E, N, K / 32].

    Raises:
        CheckpointError: A scale stands for weights of 2^2 and more, or for NaN
            (E-CHECKPOINT-SCALE): keep such experts decoded.
    """
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
