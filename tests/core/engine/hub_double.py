"""What the engine calls of triton_kernels, in plain torch and float64, from its source.

Not the library: no tiles, no launches. It refuses what the library's contract does not allow, and
keeps weights in an order of its own, so that only weights that it converted are multiplied rightly.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

FP4 = object()
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
FILLED_UP = 3  # bytes that the layout of values adds along the inputs


@dataclass
class Wrapped:
    """A tensor with the type of its elements; packed along its only axis of stride 1."""

    data: Tensor
    dtype: object
    shape: Any
    layout: object = "strided"


def wrap_torch_tensor(data: Tensor, dtype: object = None) -> Wrapped:
    return Wrapped(data, dtype, None)


def convert_layout(wrapped: Wrapped, layout: object, **options: int) -> Wrapped:
    if layout == "strided":
        return wrapped
    assert (layout, options, wrapped.dtype) == ("values", {"mx_axis": 1}, FP4)
    assert wrapped.data.stride(1) == 1, "packed along another axis than the inputs"
    filled = torch.nn.functional.pad(wrapped.data.flip(1), (0, 0, 0, FILLED_UP))
    return Wrapped(filled, FP4, None, "values")


@dataclass
class FnSpecs:
    name: str
    fn: Callable[..., Tensor]
    fn_arg_names: tuple[str, ...]


@dataclass
class FusedActivation:
    specs: FnSpecs
    fn_args: tuple[float, ...]
    reduction_n: int


@dataclass
class InFlexData:
    scale: Tensor | None = None


@dataclass
class FlexCtx:
    rhs_data: InFlexData


@dataclass
class PrecisionConfig:
    weight_scale: Wrapped
    flex_ctx: FlexCtx


@dataclass
class RoutingData:
    gate_scal: Tensor
    expt_hist: Tensor
    n_expts_tot: int
    n_expts_act: int
    expt_data: tuple[list[int], int] = field(default=([], 0))


@dataclass
class Indices:
    """`dst_indx[src_indx] = arange(0, N)`."""

    src_indx: Tensor
    dst_indx: Tensor

    def __post_init__(self) -> None:
        assert self.src_indx.dtype == self.dst_indx.dtype == torch.int32
        everything = torch.arange(len(self.src_indx), dtype=torch.int32)
        assert torch.equal(self.dst_indx[self.src_indx.long()], everything)


def compute_expt_data(hist: Tensor, n_expts_tot: int, n_gates: int) -> tuple[list[int], int]:
    assert (hist.dtype, len(hist), int(hist.sum())) == (torch.int32, n_expts_tot, n_gates)
    assert n_gates, "launches of no programs"
    return hist.tolist(), n_gates


def swiglu_fn(rows: Tensor, alpha: float, limit: float) -> Tensor:
    gate, up = rows[..., 0::2].clamp(max=limit), rows[..., 1::2].clamp(-limit, limit)
    return gate / (1 + torch.exp(-alpha * gate)) * (up + 1)


def matmul_ogs(
    x: Tensor,
    w: Wrapped,
    bias: Tensor,
    routing_data: RoutingData,
    gather_indx: Indices | None = None,
    scatter_indx: Indices | None = None,
    precision_config: PrecisionConfig | None = None,
    gammas: Tensor | None = None,
    fused_activation: FusedActivation | None = None,
) -> Tensor:
    """Rows of each expert, gathered, times its weights; bias, gammas, activation; then each token's
    rows together."""
    assert precision_config is not None
    weights, k = _decoded(w, precision_config.weight_scale), routing_data.n_expts_act
    assert (len(weights), weights.shape[1]) == (routing_data.n_expts_tot, x.shape[1])
    assert (bias.dtype, bias.shape) == (torch.float32, weights[:, 0].shape)
    counts = routing_data.expt_hist.tolist()
    assert routing_data.expt_data == (counts, sum(counts))
    sources = torch.arange(sum(counts)) if gather_indx is None else gather_indx.src_indx.long() // k
    results, start = [], 0
    for expert, count in enumerate(counts):
        rows = x[sources[start : start + count]].double() @ weights[expert] + bias[expert].double()
        results.append(rows if gammas is None else rows * gammas[start : start + count, None])
        start += count
    result = torch.cat(results)
    if fused_activation is not None:
        names, arguments = fused_activation.specs.fn_arg_names, fused_activation.fn_args
        result = fused_activation.specs.fn(result, **dict(zip(names, arguments, strict=True)))
        assert result.shape[1] * fused_activation.reduction_n == weights.shape[2]
    if scatter_indx is not None:
        result = result[scatter_indx.src_indx.long()].unflatten(0, (-1, k)).sum(1)
    return result.to(x.dtype)


def _decoded(weight: Wrapped, scale: Wrapped) -> Tensor:
    """float64 [E, inputs, outputs]."""
    assert weight.layout == "values", "weights in another layout"
    assert scale.layout == "strided"
    num_experts, inputs, outputs = weight.shape
    codes = weight.data[:, :-FILLED_UP].flip(1)
    assert codes.shape == (num_experts, inputs // 2, outputs)
    assert scale.data.shape == (num_experts, inputs // 32, outputs)
    values = torch.stack([codes & 15, codes >> 4], 2).flatten(1, 2).long()
    powers = torch.exp2(scale.data.double() - 127).repeat_interleave(32, 1)
    return torch.cat([E2M1, -E2M1])[values] * powers


def _layout(mx_axis: int) -> tuple[str, dict[str, int]]:
    return "values", {"mx_axis": mx_axis}


LIBRARY = SimpleNamespace(
    matmul_ogs=SimpleNamespace(
        **{each.__name__: each for each in (FnSpecs, FusedActivation, InFlexData, FlexCtx)},
        PrecisionConfig=PrecisionConfig,
        matmul_ogs=matmul_ogs,
    ),
    routing=SimpleNamespace(
        RoutingData=RoutingData,
        GatherIndx=Indices,
        ScatterIndx=Indices,
        compute_expt_data=compute_expt_data,
    ),
    swiglu=SimpleNamespace(swiglu_fn=swiglu_fn),
    tensor=SimpleNamespace(
        FP4=FP4, wrap_torch_tensor=wrap_torch_tensor, convert_layout=convert_layout
    ),
    tensor_details=SimpleNamespace(
        layout=SimpleNamespace(StridedLayout="strided", make_default_matmul_mxfp4_w_layout=_layout)
    ),
)
