"""MXFP4 experts multiplied by OpenAI's triton_kernels (`experts = "hub"`).

The library reads packed weights in a layout of its own, made once at load, a block at a time; gates
and ups alternate in it, as they do in the files. Sums are the library's: results differ from those
of the other ways by rounding. Never run on a GPU: tests hold it to the library's contract.
"""

import functools
import importlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nmoe_core.base.errors import ConfigError
from nmoe_core.engine.experts import Batching, Chosen, ExpertWay, alternate_halves
from nmoe_core.engine.transfers import current
from nmoe_core.engine.weights.checkpoint import LayerTensors
from nmoe_core.engine.weights.config import ModelConfig
from nmoe_core.engine.weights.families import GPT_OSS
from nmoe_core.engine.weights.mxfp4 import PackedExperts

PACKAGE = "triton_kernels"
REPOSITORY, VERSION = "kernels-community/gpt-oss-triton-kernels", 1
CAPABILITIES = (8, 9)  # from 10 on the library needs scales in another layout
_PARTS = ("matmul_ogs", "routing", "swiglu", "tensor", "tensor_details.layout")


class Projection(NamedTuple):
    """One projection of all experts: weight [E, inputs, outputs] in the library's layout, bias
    float32 [E, outputs], and the scales."""

    weight: Any
    bias: Tensor
    precision: Any


class HubExperts(NamedTuple):
    """Experts of one block as the library reads them."""

    num_experts: int
    gate_up: Projection
    down: Projection
    activation: Any


def hub_experts(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, is_packed: bool
) -> ExpertWay:
    """The library's way. Raises ConfigError: it does not compute such a model there
    (E-CONFIG-EXPERTS), or it cannot be loaded (E-CONFIG-EXTRA)."""
    is_gpu = device.type == "cuda" and torch.cuda.is_available()
    capability = torch.cuda.get_device_capability(device)[0] if is_gpu else 0
    is_taken = config.family is GPT_OSS and is_packed and dtype == torch.bfloat16
    if not is_taken or capability not in CAPABILITIES:
        form = "MXFP4" if is_packed else "not MXFP4"
        raise ConfigError(
            "triton_kernels does not compute this model here",
            found=f"{config.family.model_type}, {form}, {dtype} on {device.type} ({capability}.x)",
            expected="gpt_oss, MXFP4, torch.bfloat16 on cuda (8.x or 9.x)",
            do='set experts = "auto"',
            code="E-CONFIG-EXPERTS",
        )
    library()
    return HUB


@functools.cache
def library() -> Any:
    """The library: an installed package with the parts that are called here, else the hub's. Raises
    ConfigError: there is neither (E-CONFIG-EXTRA)."""
    try:
        for part in _PARTS:
            importlib.import_module(f"{PACKAGE}.{part}")
        return importlib.import_module(PACKAGE)
    except ImportError:  # not installed, or newer than these parts
        pass
    try:
        return importlib.import_module("kernels").get_kernel(REPOSITORY, version=VERSION)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        raise ConfigError(
            "triton_kernels cannot be loaded",
            where='experts = "hub"',
            found=error,
            do="pip install kernels, which takes it from the hub or its cache",
            code="E-CONFIG-EXTRA",
        ) from error


def _prepare(config: ModelConfig, tensors: LayerTensors) -> HubExperts:
    gate_up, down = tensors.gate_up, tensors.down
    assert isinstance(gate_up, PackedExperts)
    assert isinstance(down, PackedExperts)
    assert tensors.gate_up_bias is not None
    assert tensors.down_bias is not None
    rows = (gate_up.blocks.data, gate_up.scales.data, tensors.gate_up_bias)
    ogs, swiglu = library().matmul_ogs, library().swiglu.swiglu_fn
    limits = config.swiglu_alpha, config.swiglu_limit
    with current(down.blocks.device):
        return HubExperts(
            config.num_experts,
            _projection(*map(alternate_halves, rows)),
            _projection(down.blocks.data, down.scales.data, tensors.down_bias),
            ogs.FusedActivation(ogs.FnSpecs("swiglu", swiglu, ("alpha", "limit")), limits, 2),
        )


def _projection(blocks: Tensor, scales: Tensor, bias: Tensor) -> Projection:
    ogs, tensor, layouts = library().matmul_ogs, library().tensor, library().tensor_details.layout
    codes = blocks.flatten(-2)
    layout, options = layouts.make_default_matmul_mxfp4_w_layout(mx_axis=1)
    wrapped = tensor.wrap_torch_tensor(codes.mT, dtype=tensor.FP4)
    weight = tensor.convert_layout(wrapped, layout, **options)
    # A layout may fill up its storage: the shape that counts is that of the weights.
    weight.shape = torch.Size((len(codes), 2 * codes.shape[2], codes.shape[1]))
    scale = tensor.convert_layout(tensor.wrap_torch_tensor(scales.mT), layouts.StridedLayout)
    flex = ogs.FlexCtx(rhs_data=ogs.InFlexData())
    return Projection(weight, bias.float(), ogs.PrecisionConfig(weight_scale=scale, flex_ctx=flex))


def _product(
    kept: HubExperts, x: Tensor, chosen: Chosen, residual: Tensor, batching: Batching
) -> Tensor:
    if batching.batch_invariant:
        raise ConfigError(
            "sums of triton_kernels may depend on the number of rows",
            found='experts = "hub" and batch_invariant',
            do='set experts = "auto", or leave out batch_invariant',
            code="E-CONFIG-EXPERTS",
        )
    if not len(x):
        return residual
    multiply = library().matmul_ogs.matmul_ogs
    (gate_up, gate_up_bias, gate_up_scales), (down, down_bias, down_scales) = kept[1:3]
    with current(x.device):
        data, gather, scatter = _routing(chosen, kept.num_experts)
        inner = multiply(
            *(x, gate_up, gate_up_bias, data),
            gather_indx=gather,
            precision_config=gate_up_scales,
            fused_activation=kept.activation,
        )
        rows = multiply(
            *(inner, down, down_bias, data),
            scatter_indx=scatter,
            precision_config=down_scales,
            gammas=data.gate_scal,
        )
    return residual + rows.to(residual.dtype)


def _routing(chosen: Chosen, num_experts: int) -> tuple[Any, Any, Any]:
    """What the library asks about choices: weights and counts by expert, where rows come from and
    where they go. Choice t * k + j is the j-th of row t. Nothing is sent to the host, so that
    decoding steps can be recorded."""
    routing = library().routing
    by_choice = chosen.experts.flatten().long()
    order = by_choice.argsort(stable=True)
    sources, places = order.int(), order.argsort().int()
    counts = torch.zeros(num_experts, dtype=torch.int32, device=order.device)
    counts.scatter_add_(0, by_choice, torch.ones_like(places))
    data = routing.RoutingData(
        gate_scal=chosen.weights.flatten()[order],
        expt_hist=counts,
        n_expts_tot=num_experts,
        n_expts_act=chosen.experts.shape[1],
        expt_data=routing.compute_expt_data(counts, num_experts, len(order)),
    )
    gather = routing.GatherIndx(src_indx=sources, dst_indx=places)
    return data, gather, routing.ScatterIndx(src_indx=places, dst_indx=sources)


HUB = ExpertWay(_prepare, _product, "hub")
