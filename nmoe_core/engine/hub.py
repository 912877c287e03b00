"""The MoE backend that uses OpenAI's triton_kernels on MXFP4 experts (`moe_backend = "hub"`).

The library reads packed weights in a layout of its own, to which weights are converted at load,
block by block. Gates and ups alternate, as in the files. The library sums in another order than
other backends, so results differ by rounding. Tests check the calls against the library's
interface; docs/kernels.md names the tested build.
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
from nmoe_core.engine.weights.mxfp4 import PackedExperts

REPOSITORY = "kernels-community/gpt-oss-triton-kernels"
VERSION = 1
CAPABILITIES = (8, 9)  # of GPUs; for 10 and above, the library needs another layout of scales


class HubExperts(NamedTuple):
    """The experts of one block in the library's form. For each projection: the weight [E, inputs,
    outputs] in the library's layout, the bias float32 [E, outputs], and the scales."""

    num_experts: int
    gate_up: tuple[Any, Tensor, Any]
    down: tuple[Any, Tensor, Any]
    activation: Any


@functools.cache
def library() -> Any:
    """The library, downloaded from the hub or read from the hub's cache. Raises ConfigError if the
    library is not available, or the package that loads it is not installed (E-CONFIG-EXTRA)."""
    try:
        return importlib.import_module("kernels").get_kernel(REPOSITORY, version=VERSION)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        raise ConfigError(
            "triton_kernels cannot be loaded",
            where='moe_backend = "hub"',
            found=error,
            do="pip install kernels, which downloads it from the hub or uses the cache",
            code="E-CONFIG-EXTRA",
        ) from error


def _prepare(config: ModelConfig, tensors: LayerTensors) -> HubExperts:
    gate_up = tensors.gate_up
    down = tensors.down
    assert isinstance(gate_up, PackedExperts) and isinstance(down, PackedExperts)  # noqa: PT018
    assert tensors.gate_up_bias is not None and tensors.down_bias is not None  # noqa: PT018
    rows = (gate_up.blocks.data, gate_up.scales.data, tensors.gate_up_bias)
    ogs = library().matmul_ogs
    swiglu = library().swiglu.swiglu_fn
    limits = config.swiglu_alpha, config.swiglu_limit
    with current(down.blocks.device):
        return HubExperts(
            config.num_experts,
            _projection(*map(alternate_halves, rows)),
            _projection(down.blocks.data, down.scales.data, tensors.down_bias),
            ogs.FusedActivation(ogs.FnSpecs("swiglu", swiglu, ("alpha", "limit")), limits, 2),
        )


def _projection(blocks: Tensor, scales: Tensor, bias: Tensor) -> tuple[Any, Tensor, Any]:
    ogs = library().matmul_ogs
    tensor = library().tensor
    layouts = library().tensor_details.layout
    codes = blocks.flatten(-2)
    layout, options = layouts.make_default_matmul_mxfp4_w_layout(mx_axis=1)
    wrapped = tensor.wrap_torch_tensor(codes.mT, dtype=tensor.FP4)
    weight = tensor.convert_layout(wrapped, layout, **options)
    # The library's layout may pad its storage, so set the shape of the weights.
    weight.shape = torch.Size((len(codes), 2 * codes.shape[2], codes.shape[1]))
    scale = tensor.convert_layout(tensor.wrap_torch_tensor(scales.mT), layouts.StridedLayout)
    flex = ogs.FlexCtx(rhs_data=ogs.InFlexData())
    return weight, bias.float(), ogs.PrecisionConfig(weight_scale=scale, flex_ctx=flex)


def _product(
    kept: HubExperts, x: Tensor, chosen: Chosen, residual: Tensor, batching: Batching
) -> Tensor:
    if batching.batch_invariant:
        raise ConfigError(
            "results of triton_kernels may depend on the number of rows",
            found='moe_backend = "hub" and batch_invariant',
            do='set moe_backend = "auto", or do not set batch_invariant',
            code="E-CONFIG-EXPERTS",
        )
    if not len(x):
        return residual
    with current(x.device):
        data, gather, scatter = _routing(chosen, kept.num_experts)

        def times(rows: Tensor, projection: tuple[Any, Tensor, Any], **options: Any) -> Tensor:
            *weights, scales = projection
            multiply = library().matmul_ogs.matmul_ogs
            return multiply(rows, *weights, data, precision_config=scales, **options)

        inner = times(x, kept.gate_up, gather_indx=gather, fused_activation=kept.activation)
        rows = times(inner, kept.down, scatter_indx=scatter, gammas=data.gate_scal)
    return residual + rows.to(residual.dtype)


def _routing(chosen: Chosen, num_experts: int) -> tuple[Any, Any, Any]:
    """The choices in the library's form: weights and counts by expert, sources and destinations of
    rows. Choice t * k + j is the j-th expert of row t. Copies nothing to the host, so that decoding
    steps can be captured in CUDA graphs."""
    routing = library().routing
    by_choice = chosen.experts.flatten().long()
    order = by_choice.argsort(stable=True)
    sources = order.int()
    places = order.argsort().int()
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
