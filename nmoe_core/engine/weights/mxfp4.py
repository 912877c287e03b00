"""MXFP4: 32 four-bit floats that share one power-of-two scale (OCP Microscaling Formats 1.0).

A group of 32 values along the input dimension has 16 bytes and one scale byte. A byte has two E2M1
codes, with the even index in the low nibble; a scale byte s means 2^(s - 127), and 255 means NaN.
Decoding is exact in float32 and in bfloat16, except that 2^128 and above overflow to infinity.
Expert stacks are decoded once, when they are loaded, or at each use; the results are the same.
"""

import functools
from typing import Literal

import torch
from torch import Tensor, nn

from nmoe_core.engine.weights.config import GROUP_SIZE

ExpertForm = Literal["decoded", "packed", "int8"]
SCALE_BIAS = 127
NAN_SCALE = 255
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_PIECE_BYTES = 1 << 15


class DecodedExperts(nn.Module):
    """weight: [E, outputs, inputs] in the model's dtype."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def matrix(self, expert: int) -> Tensor:
        """[outputs, inputs], a view."""
        return self.weight[expert]


class PackedExperts(nn.Module):
    """blocks: uint8 [E, outputs, groups, 16]; scales: uint8 [E, outputs, groups].

    Decoding takes about two nanoseconds per byte on one core, once for all rows of a batch.
    """

    def __init__(self, blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.blocks = nn.Parameter(blocks, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)

    def matrix(self, expert: int) -> Tensor:
        """[outputs, inputs], decoded at each call."""
        return decode(self.blocks[expert], self.scales[expert], self.dtype)


Experts = DecodedExperts | PackedExperts


def decode(blocks: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values [..., rows, groups * 32] from blocks uint8 [..., rows, groups, 16] and their scales.
    Raises ValueError if the two shapes do not match, or the dtype is neither torch.float32 nor
    torch.bfloat16."""
    *rows, groups = scales.shape
    values = torch.empty(*rows, groups * GROUP_SIZE, dtype=dtype, device=blocks.device)
    decode_into(values, blocks, scales)
    return values


def decode_into(values: Tensor, blocks: Tensor, scales: Tensor) -> None:
    """Decode as `decode` does, into the contiguous tensor `values`, in the dtype of `values`.

    The two values of a byte are looked up as one integer of twice the dtype's width; rows are
    decoded in pieces that fit into the cache.
    """
    if blocks.shape != (*scales.shape, GROUP_SIZE // 2):
        raise ValueError(f"{tuple(blocks.shape)=} does not match {tuple(scales.shape)=}")
    pairs, powers = _tables(values.dtype, values.device)
    groups = scales.shape[-1]
    all_blocks = blocks.flatten(0, -3)
    all_scales = scales.flatten(0, -2)
    all_values = values.view(-1, groups, GROUP_SIZE)
    is_cpu = values.device.type == "cpu"
    num_rows = max(1, _PIECE_BYTES // (groups * GROUP_SIZE // 2)) if is_cpu else len(all_values)
    for start in range(0, len(all_values), num_rows):
        piece = slice(start, start + num_rows)
        codes = all_blocks[piece].int().flatten()
        exponents = all_scales[piece].int()
        decoded = pairs.index_select(0, codes).view(values.dtype).view(*exponents.shape, -1)
        power = powers.index_select(0, exponents.flatten()).view(*exponents.shape, 1)
        torch.mul(decoded, power, out=all_values[piece])


def encode(values: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks uint8 [..., rows, columns / 32, 16] and scales nearest to values [..., rows, columns].

    The scale is the power of two that puts a group's largest magnitude in [4, 8); values above 6
    then become 6, as the format's specification prescribes. A value midway between two codes gets
    the even code. Raises ValueError if the columns are not complete groups of 32.
    """
    if values.shape[-1] % GROUP_SIZE:
        raise ValueError(f"{values.shape[-1]} columns are not complete groups of {GROUP_SIZE}")
    groups = values.float().unflatten(-1, (-1, GROUP_SIZE))
    largest = groups.abs().amax(-1)
    # frexp gives largest = m * 2^e with m in [0.5, 1): exact, while a floating log2 may round up.
    exponents = (torch.frexp(largest).exponent - 3).clamp(-SCALE_BIAS, SCALE_BIAS)
    exponents = torch.where(largest > 0, exponents, -SCALE_BIAS)
    # Divide in two steps, because the reciprocal of 2^-127 is too large for float32.
    halves = exponents // 2
    scaled = torch.ldexp(torch.ldexp(groups, -halves[..., None]), (halves - exponents)[..., None])
    # A value midway between two codes gets the even code. If the lower code is odd, the boundary is
    # the next smaller float, so that the midpoint gets the upper code.
    magnitudes = torch.tensor(_MAGNITUDES, device=values.device)
    middles = (magnitudes[1:] + magnitudes[:-1]) / 2
    middles[1::2] = torch.nextafter(middles[1::2], torch.zeros_like(middles[1::2]))
    codes = torch.bucketize(scaled.abs(), middles).to(torch.uint8)
    codes |= torch.signbit(groups).to(torch.uint8) << 3
    blocks = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return blocks, (exponents + SCALE_BIAS).to(torch.uint8)


@functools.cache
@torch.inference_mode(False)
def _tables(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Two tables [256]: for each byte, its two decoded values packed into one integer; and for each
    scale byte, its power of two."""
    integers = {torch.float32: torch.int64, torch.bfloat16: torch.int32}
    if dtype not in integers:
        raise ValueError(f"{dtype} is neither torch.float32 nor torch.bfloat16")
    positive = torch.tensor(_MAGNITUDES)
    byte = torch.arange(256)
    codes = torch.cat([positive, -positive])
    pairs = torch.stack([codes[byte & 15], codes[byte >> 4]], dim=-1).to(dtype)
    powers = torch.exp2(byte.double() - SCALE_BIAS).float().to(dtype)
    powers[NAN_SCALE] = torch.nan
    return pairs.view(integers[dtype]).flatten().to(device), powers.to(device)
