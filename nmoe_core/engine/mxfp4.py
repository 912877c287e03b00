"""MXFP4: 32 four-bit floats that share one power-of-two scale (OCP Microscaling Formats 1.0).

A group of 32 values along the input dimension is 16 bytes and one scale byte. A byte holds two
E2M1 codes, the low nibble the one of even index; a scale byte s stands for 2^(s - 127), and 255
for NaN. Decoding is exact in float32 and in bfloat16, except that 2^128 and above overflow to
infinity, as the product does. Encoding rounds to nearest, ties to the even code.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nmoe_core.engine.config import GROUP_SIZE

SCALE_BIAS = 127
NAN_SCALE = 255
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def decode(blocks: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of packed weights.

    Works one leading slice (an expert) at a time, so that no more than one is held in float32.

    Args:
        blocks: uint8 [..., rows, groups, 16].
        scales: uint8 [..., rows, groups].
        dtype: Of the result.

    Returns:
        [..., rows, groups * 32].

    Raises:
        ValueError: The two shapes do not belong together.
    """
    if blocks.shape != (*scales.shape, GROUP_SIZE // 2):
        raise ValueError(f"{tuple(blocks.shape)=} does not match {tuple(scales.shape)=}")
    *leading, rows, groups = scales.shape
    values = torch.empty(*leading, rows, groups * GROUP_SIZE, dtype=dtype, device=blocks.device)
    slices = zip(
        values.view(-1, rows, groups * GROUP_SIZE),
        blocks.reshape(-1, rows, groups, GROUP_SIZE // 2),
        scales.reshape(-1, rows, groups),
        strict=True,
    )
    pairs, powers = _byte_pairs(blocks.device), _powers_of_two(blocks.device)
    for out, block, scale in slices:
        decoded = pairs[block.int()] * powers[scale.int()][..., None, None]
        out.copy_(decoded.view(rows, groups * GROUP_SIZE))
    return values


def encode(values: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks and scales nearest to `values` [..., rows, columns], columns a multiple of 32.

    The scale is the power of two that puts a group's largest magnitude in [4, 8); what is above 6
    then becomes 6, as the format's specification prescribes.

    Returns:
        uint8 [..., rows, columns / 32, 16] and uint8 [..., rows, columns / 32].

    Raises:
        ValueError: The columns are not whole groups.
    """
    if values.shape[-1] % GROUP_SIZE:
        raise ValueError(f"{values.shape[-1]} columns are not whole groups of {GROUP_SIZE}")
    groups = values.float().unflatten(-1, (-1, GROUP_SIZE))
    largest = groups.abs().amax(-1)
    # frexp gives largest = m * 2^e with m in [0.5, 1): exact where a floating log2 may round up.
    exponents = (torch.frexp(largest).exponent - 3).clamp(-SCALE_BIAS, SCALE_BIAS)
    exponents = torch.where(largest > 0, exponents, -SCALE_BIAS)
    # Two steps: the reciprocal of 2^-127 is beyond float32.
    halves = exponents // 2
    scaled = torch.ldexp(torch.ldexp(groups, -halves[..., None]), (halves - exponents)[..., None])
    codes = torch.bucketize(scaled.abs(), _boundaries(values.device)).to(torch.uint8)
    codes |= torch.signbit(groups).to(torch.uint8) << 3
    blocks = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return blocks, (exponents + SCALE_BIAS).to(torch.uint8)


def _byte_pairs(device: torch.device) -> Tensor:
    """float32 [256, 2]: the values of a byte's low and high nibble."""
    positive = torch.tensor(_MAGNITUDES, device=device)
    codes = torch.cat([positive, -positive])
    byte = torch.arange(256, device=device)
    return torch.stack([codes[byte & 15], codes[byte >> 4]], dim=-1)


def _powers_of_two(device: torch.device) -> Tensor:
    """float32 [256]: what each scale byte stands for."""
    exponents = torch.arange(256, device=device, dtype=torch.float64) - SCALE_BIAS
    powers = torch.exp2(exponents).float()
    powers[NAN_SCALE] = torch.nan
    return powers


def _boundaries(device: torch.device) -> Tensor:
    """float32 [7]: magnitudes above boundary i take code i + 1 or more.

    A tie goes to the even code: the midpoint between an odd code and the next even one belongs to
    the latter, so the boundary there is the float just below it.
    """
    magnitudes = torch.tensor(_MAGNITUDES, device=device)
    middles = (magnitudes[1:] + magnitudes[:-1]) / 2
    middles[1::2] = torch.nextafter(middles[1::2], torch.zeros_like(middles[1::2]))
    return middles
