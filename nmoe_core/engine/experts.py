"""The interface of MoE backends, which multiply rows by the weights of their experts, and the
backend in plain torch.

A backend has two functions: one prepares a block's weights, the other multiplies. The backend is
chosen by a setting, not by a measurement at run time, because results of two backends differ by
rounding.

In plain torch, rows are sorted by expert and each expert runs once over its rows. A token's k
results are added in the order of its logits, so the sum does not depend on the batch. Memory: k
rows of hidden size per token.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nmoe_core.engine.packing import frozen, linear_pieces
from nmoe_core.engine.weights.checkpoint import LayerTensors
from nmoe_core.engine.weights.config import ModelConfig
from nmoe_core.engine.weights.mxfp4 import Experts

# Experts with few rows are processed together, up to RUN_ROWS rows, so that the intermediate
# results fit into a core's cache.
RUN_ROWS = 128

Piece = tuple[int, int, int]


class Chosen(NamedTuple):
    """The k experts of each row, largest logit first."""

    weights: Tensor
    """float32 [N, k]."""
    experts: Tensor
    """int64 or int32 [N, k]."""


class Batching(Protocol):
    """Properties of the rows of a call, provided by a context."""

    @property
    def min_rows(self) -> int:
        """Number of rows to which a matrix product is padded (`packing.linear`)."""
        ...

    @property
    def batch_invariant(self) -> bool:
        """Whether the bits of a row's result must not depend on the number of other rows."""
        ...


@dataclass(frozen=True, slots=True)
class ExpertWay:
    """A MoE backend.

    prepare: Converts a block's weights to the form that `product` needs. product: Takes the
    prepared weights, normalised rows [N, hidden], their experts, the residual [N, hidden] and the
    batching; returns the residual plus the weighted sum of each row's experts. name: Name in
    fingerprints if `moe_backend` selects it; empty for the runtime's own backend.
    """

    prepare: Callable[[ModelConfig, LayerTensors], Any]
    product: Callable[[Any, Tensor, Chosen, Tensor, Batching], Tensor]
    name: str = ""


class ExpertStacks(nn.Module):
    """The experts of one block as stored in the checkpoint, for plain torch."""

    def __init__(self, config: ModelConfig, tensors: LayerTensors) -> None:
        super().__init__()
        self.num_experts = config.num_experts
        self.gate_up_size = 2 * config.intermediate_size
        self.swiglu = swiglu_of(config)
        self.gate_up = tensors.gate_up
        self.gate_up_bias = frozen(tensors.gate_up_bias)
        self.down = tensors.down
        self.down_bias = frozen(tensors.down_bias)

    def multiply(self, run: list[Piece], x: Tensor, results: Tensor, min_rows: int) -> None:
        """Multiply rows x [R, hidden], grouped by expert, by the experts of `run`; write results
        [R, hidden]."""
        experts = [piece[0] for piece in run]
        counts = [stop - start for _, start, stop in run]

        def product(rows: Tensor, stack: Experts, bias: Tensor | None, out: Tensor) -> Tensor:
            # Read matrices one by one: a packed stack decodes each matrix when it is read.
            weights = (stack.matrix(expert) for expert in experts)
            biases = (None if bias is None else bias[expert] for expert in experts)
            return linear_pieces(rows.split(counts), weights, biases, min_rows, out)

        gate_up = x.new_empty(len(x), self.gate_up_size)
        gate, up = product(x, self.gate_up, self.gate_up_bias, gate_up).chunk(2, dim=-1)
        product(self.swiglu(gate, up), self.down, self.down_bias, results)


def swiglu_of(config: ModelConfig) -> Callable[[Tensor, Tensor], Tensor]:
    """The activation function of a model, applied to gate and up."""
    if config.swiglu_limit is None:
        return plain_swiglu
    return functools.partial(swiglu, limit=config.swiglu_limit, alpha=config.swiglu_alpha)


def plain_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """up * gate * sigmoid(gate)."""
    return F.silu(gate).mul_(up)


def swiglu(gate: Tensor, up: Tensor, limit: float, alpha: float) -> Tensor:
    """(up + 1) * gate * sigmoid(alpha * gate); gate is clamped to at most `limit`, up to
    +-`limit`."""
    gate = gate.clamp(max=limit)
    up = up.clamp(-limit, limit)
    return up.add_(1).mul_(torch.mul(gate, alpha).sigmoid_().mul_(gate))


def alternate_halves(rows: Tensor) -> Tensor:
    """A copy of [E, 2 I, ...] whose rows alternate gate, up, gate, up instead of all gates
    first."""
    return rows.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)


def weighted_sum(results: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """float32 [N, hidden]: the sum of each row's k results, which are at `places` [N, k], in
    order."""
    total = results.index_select(0, places[:, 0]) * weights[:, :1]
    for i in range(1, places.shape[1]):
        total.addcmul_(results.index_select(0, places[:, i]), weights[:, i : i + 1])
    return total


def _product(
    kept: ExpertStacks, x: Tensor, chosen: Chosen, residual: Tensor, batching: Batching
) -> Tensor:
    weights, experts = chosen
    if len(x) == batching.min_rows == 1:
        return residual + _one_row(kept, x, weights, experts[0].tolist())
    order = experts.flatten().argsort(stable=True)
    tokens = order // experts.shape[1]
    counts = experts.flatten().bincount(minlength=kept.num_experts).tolist()
    results = torch.empty(len(order), x.shape[1], dtype=x.dtype, device=x.device)
    for run in _runs(counts):
        rows = slice(run[0][1], run[-1][2])
        kept.multiply(run, x.index_select(0, tokens[rows]), results[rows], batching.min_rows)
    places = order.argsort().view_as(experts)
    return residual + weighted_sum(results, places, weights).to(x.dtype)


def _one_row(kept: ExpertStacks, x: Tensor, weights: Tensor, experts: list[int]) -> Tensor:
    """The weighted sum for a single row, as in decoding one sequence; needs no sorting."""
    run = [(expert, i, i + 1) for i, expert in enumerate(experts)]
    results = x.new_empty(len(experts), x.shape[1])
    kept.multiply(run, x.expand(len(experts), -1), results, min_rows=1)
    return torch.mm(weights, results.float()).to(x.dtype)


def _runs(counts: list[int]) -> Iterator[list[Piece]]:
    """Experts that have rows, as (expert, first row, end row), grouped into runs of about RUN_ROWS
    rows."""
    run: list[Piece] = []
    start = 0
    for expert, count in enumerate(counts):
        if count:
            run.append((expert, start, start + count))
            start += count
            if start - run[0][1] >= RUN_ROWS:
                yield run
                run = []
    if run:
        yield run


PLAIN_EXPERTS = ExpertWay(ExpertStacks, _product)
