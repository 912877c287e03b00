"""Residual addition and RMSNorm in one pass over a row (Zhang and Sennrich, arXiv 1910.07467).

The sum is rounded to the residual's type before it is normalised, as two separate operations would
leave it; mean and scaling are float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nmoe_core.engine.kernels.mode import round_to, widen
from nmoe_core.engine.transfers import on_its_device


@on_its_device
def add_rms_norm(
    residual: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """`residual + delta` and its RMSNorm.

    Args:
        residual: [T, H].
        delta: [T, H], or None to normalise the residual as it is.
        weight: float32 [H].
        epsilon: Added to the mean square.

    Returns:
        The sum (the residual itself without a delta) and the normalised rows, [T, H] each.
    """
    num_tokens, width = residual.shape
    total = residual if delta is None else torch.empty_like(residual)
    normalised = torch.empty_like(residual)
    if num_tokens:
        _add_rms_norm_kernel[(num_tokens,)](
            *(residual, residual if delta is None else delta, weight),
            *(total, normalised, width, epsilon),
            HAS_DELTA=delta is not None,
            BLOCK=triton.next_power_of_2(width),
            num_warps=8,
        )
    return total, normalised


@triton.jit
def _add_rms_norm_kernel(
    residual_ptr,
    delta_ptr,
    weight_ptr,
    total_ptr,
    normalised_ptr,
    width,
    epsilon,
    HAS_DELTA: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * width
    columns = tl.arange(0, BLOCK)
    is_there = columns < width
    x = tl.load(residual_ptr + row + columns, mask=is_there, other=0.0)
    if HAS_DELTA:
        delta = tl.load(delta_ptr + row + columns, mask=is_there, other=0.0)
        x = round_to(widen(x) + widen(delta), x.dtype)
        tl.store(total_ptr + row + columns, x, mask=is_there)
    values = widen(x)
    scale = tl.rsqrt(tl.sum(values * values, axis=0) / width + epsilon)
    weight = tl.load(weight_ptr + columns, mask=is_there, other=0.0)
    out = round_to(values * scale * weight, x.dtype)
    tl.store(normalised_ptr + row + columns, out, mask=is_there)
