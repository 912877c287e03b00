"""One block of the model in plain torch, and what a way of running blocks consists of.

The feed-forward is SwiGLU (clamped in gpt-oss: model card, section 2), of one expert or of the top
k of a mixture. There, rows are sorted by expert and each expert present runs once over its own; a
token's k results are added in the order of its logits, so the sum does not depend on the batch.
Costs k rows of hidden size per token.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nmoe_core.engine.attention import Attention, Context, PackedDocuments
from nmoe_core.engine.generation.cache import PagedCache
from nmoe_core.engine.generation.step import Chunk, StepBatch
from nmoe_core.engine.packing import MIN_ROWS, Packing, frozen, linear
from nmoe_core.engine.weights.checkpoint import LayerTensors
from nmoe_core.engine.weights.config import ModelConfig

# Experts with few rows share the steps between their two products, up to this many rows: then the
# intermediate results still fit a core's cache.
RUN_ROWS = 128

Piece = tuple[int, int, int]


class RMSNorm(nn.Module):
    """x / rms(x) * weight, in float32; the result has the dtype of x."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps).to(x.dtype)


class FeedForward(nn.Module):
    """The feed-forward of a dense block, on packed rows."""

    def __init__(self, config: ModelConfig, tensors: LayerTensors) -> None:
        super().__init__()
        self.swiglu = swiglu_of(config)
        self.gate_up, self.down = tensors.gate_up, tensors.down

    def forward(self, x: Tensor, min_rows: int = MIN_ROWS) -> Tensor:
        """Rows x [N, hidden], normalised, through both products."""
        gate, up = linear(x, self.gate_up.matrix(0), None, min_rows).chunk(2, dim=-1)
        return linear(self.swiglu(gate, up), self.down.matrix(0), None, min_rows)


class MixtureOfExperts(nn.Module):
    """Router and experts of one block, on packed rows."""

    def __init__(self, config: ModelConfig, tensors: LayerTensors) -> None:
        super().__init__()
        self.num_experts, self.experts_per_token = config.num_experts, config.experts_per_token
        self.norm_topk_prob = config.norm_topk_prob
        self.gate_up_size = 2 * config.intermediate_size
        self.swiglu = swiglu_of(config)
        assert tensors.router_weight is not None
        self.router_weight = frozen(tensors.router_weight)
        self.router_bias = frozen(tensors.router_bias)
        self.gate_up, self.gate_up_bias = tensors.gate_up, frozen(tensors.gate_up_bias)
        self.down, self.down_bias = tensors.down, frozen(tensors.down_bias)

    def forward(self, x: Tensor, min_rows: int = MIN_ROWS) -> Tensor:
        """Weighted sum of the experts of each row of x [N, hidden], normalised."""
        weights, experts = self._route(x, min_rows)
        if len(x) == min_rows == 1:
            return self._one_row(x, weights, experts[0].tolist())
        order = experts.flatten().argsort(stable=True)
        tokens = order // self.experts_per_token
        counts = experts.flatten().bincount(minlength=self.num_experts).tolist()
        results = torch.empty(len(order), x.shape[1], dtype=x.dtype, device=x.device)
        for run in _runs(counts):
            rows = slice(run[0][1], run[-1][2])
            self._run(run, x.index_select(0, tokens[rows]), results[rows], min_rows)
        places = order.argsort().view_as(experts)
        total = results.index_select(0, places[:, 0]) * weights[:, :1]
        for i in range(1, places.shape[1]):
            total.addcmul_(results.index_select(0, places[:, i]), weights[:, i : i + 1])
        return total.to(x.dtype)

    def _route(self, x: Tensor, min_rows: int) -> tuple[Tensor, Tensor]:
        """float32 weights and int64 ids [N, k] of each row's experts, largest first."""
        logits = linear(x.float(), self.router_weight, self.router_bias, min_rows)
        top, experts = logits.topk(self.experts_per_token, dim=-1)
        if self.norm_topk_prob:
            return torch.softmax(top, dim=-1), experts
        return (top - logits.logsumexp(-1, keepdim=True)).exp_(), experts

    def _one_row(self, x: Tensor, weights: Tensor, experts: list[int]) -> Tensor:
        """`forward` of a single row, the case of decoding one sequence: there is nothing to
        sort."""
        run = [(expert, i, i + 1) for i, expert in enumerate(experts)]
        results = x.new_empty(len(experts), x.shape[1])
        self._run(run, x.expand(len(experts), -1), results, min_rows=1)
        return torch.mm(weights, results.float()).to(x.dtype)

    def _run(self, run: list[Piece], x: Tensor, results: Tensor, min_rows: int) -> None:
        """Rows [R, hidden] of some experts, each expert's together, into results [R, hidden]."""
        first = run[0][1]
        pieces = [(expert, slice(start - first, stop - first)) for expert, start, stop in run]
        gate_up = x.new_empty(len(x), self.gate_up_size)
        for expert, rows in pieces:
            bias = None if self.gate_up_bias is None else self.gate_up_bias[expert]
            linear(x[rows], self.gate_up.matrix(expert), bias, min_rows, gate_up[rows])
        gate, up = gate_up.chunk(2, dim=-1)
        inner = self.swiglu(gate, up)
        for expert, rows in pieces:
            bias = None if self.down_bias is None else self.down_bias[expert]
            linear(inner[rows], self.down.matrix(expert), bias, min_rows, results[rows])


def swiglu_of(config: ModelConfig) -> Callable[[Tensor, Tensor], Tensor]:
    """The activation of a model, of gate and up."""
    if config.swiglu_limit is None:
        return plain_swiglu
    return functools.partial(swiglu, limit=config.swiglu_limit, alpha=config.swiglu_alpha)


def plain_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """up * gate * sigmoid(gate)."""
    return F.silu(gate).mul_(up)


def swiglu(gate: Tensor, up: Tensor, limit: float, alpha: float) -> Tensor:
    """(up + 1) * gate * sigmoid(alpha * gate), gate clamped above and up on both sides."""
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return up.add_(1).mul_(torch.mul(gate, alpha).sigmoid_().mul_(gate))


def _runs(counts: list[int]) -> Iterator[list[Piece]]:
    """Experts that have rows, as (expert, first row, end row), in runs of about RUN_ROWS rows."""
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


class Block(nn.Module):
    """One block: attention and feed-forward, each on the normalised residual and added to it."""

    def __init__(self, config: ModelConfig, layer: int, tensors: LayerTensors) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(tensors.attn_norm, config.rms_norm_eps)
        self.attn = Attention(config, layer, tensors)
        self.mlp_norm = RMSNorm(tensors.mlp_norm, config.rms_norm_eps)
        kind = MixtureOfExperts if config.family.has_router else FeedForward
        self.mlp = kind(config, tensors)

    def forward(self, x: Tensor, context: Context, rotation: Tensor) -> Tensor:
        """Residual [N, hidden] before the block to the one after it.

        rotation: complex64 [N, head_dim / 2], of the rows' positions.
        """
        x = x + self.attn(self.attn_norm(x), context, rotation)
        return x + self.mlp(self.mlp_norm(x), min_rows=context.min_rows)


# Ids [N], context and rotation to float32 logits [N, vocab].
Forward = Callable[[Tensor, Any, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Runtime:
    """A way of running blocks.

    block: Makes its block of a plain one. documents, step: Contexts of whole documents and of new
    tokens over a cache. record: Makes a recorder of decoding steps (`kernels.graphs`), given the
    forward pass, the rotations of all positions and the cache.
    """

    block: Callable[[ModelConfig, Block], nn.Module]
    documents: Callable[[ModelConfig, Packing], Context]
    step: Callable[[PagedCache, Sequence[Chunk], bool], StepBatch]
    record: Callable[[Forward, Tensor, PagedCache], Any] | None = None


PLAIN = Runtime(lambda config, block: block, PackedDocuments, StepBatch)
