"""The mixture of experts of one block on kernels: route, two grouped products, combine.

Five kinds of launch and no transfer to the host. Memory beyond the weights: k rows of intermediate
size and k float32 rows of hidden size for each token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nmoe_core.engine.kernels.expert_product import DECODE, PREFILL, grouped_product
from nmoe_core.engine.kernels.expert_weights import ExpertWeights
from nmoe_core.engine.kernels.mode import round_to, widen
from nmoe_core.engine.kernels.routing import route
from nmoe_core.engine.transfers import on_its_device

_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class FusedExperts:
    """Experts of one block; `gate_up` has all gates before all ups of each expert."""

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
        shape = DECODE if batch_invariant or num_rows <= 32 * num_experts else PREFILL
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
