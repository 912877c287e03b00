"""The MoE backend that uses torch's grouped matmul (`moe_backend = "grouped"`).

MXFP4 experts are decoded once, at load. Two library calls multiply copies of the rows, sorted by
expert. No data are copied to the host, so decoding steps can be captured in CUDA graphs. The
library sums in another order than the other backends, and rounds a bfloat16 product before the bias
is added. So results differ from other backends by rounding.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from nmoe_core.engine.experts import (
    PLAIN_EXPERTS,
    Batching,
    Chosen,
    ExpertStacks,
    ExpertWay,
    weighted_sum,
)
from nmoe_core.engine.weights.mxfp4 import DecodedExperts, Experts


def _product(
    kept: ExpertStacks, x: Tensor, chosen: Chosen, residual: Tensor, batching: Batching
) -> Tensor:
    if batching.batch_invariant:  # the library's sums may depend on the number of rows
        return PLAIN_EXPERTS.product(kept, x, chosen, residual, batching)
    if not len(x):
        return residual
    by_row = chosen.experts.flatten()
    order = by_row.argsort(stable=True)
    by_row = by_row[order]
    numbers = torch.arange(kept.num_experts, device=x.device, dtype=by_row.dtype)
    ends = torch.searchsorted(by_row, numbers, right=True, out_int32=True)
    tokens = order // chosen.experts.shape[1]
    rows = _times(x[tokens], kept.gate_up, kept.gate_up_bias, by_row, ends)
    gate, up = rows.chunk(2, dim=-1)
    rows = _times(kept.swiglu(gate, up), kept.down, kept.down_bias, by_row, ends)
    places = order.argsort().view_as(chosen.experts)
    return residual + weighted_sum(rows, places, chosen.weights).to(x.dtype)


def _times(x: Tensor, stack: Experts, bias: Tensor | None, by_row: Tensor, ends: Tensor) -> Tensor:
    """Sorted rows times their experts' weights, plus biases."""
    assert isinstance(stack, DecodedExperts)
    result = F.grouped_mm(x, stack.weight.mT, offs=ends)
    return result if bias is None else result.add_(bias[by_row])


GROUPED = ExpertWay(ExpertStacks, _product, "grouped")
