"""Sum of each token's experts, added to the residual, in one fixed order.

Costs one read of the k rows of a token and of the residual, and one write.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nmoe_core.engine.kernels.mode import round_to, widen
from nmoe_core.engine.transfers import on_its_device

_BLOCK = 1024


@on_its_device
def combine(rows: Tensor, residual: Tensor) -> Tensor:
    """The residual plus each token's rows.

    Args:
        rows: float32 [T * k, H], row t * k + j the weighted result of the token's j-th expert.
        residual: [T, H].

    Returns:
        [T, H] of the residual's type: the experts are summed in float32 in the order of j and
        rounded once before the residual is added, as the plain path does.
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
