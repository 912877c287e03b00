"""Mixture of experts: top-k routing, clamped SwiGLU experts (gpt-oss model card, section 2).

The router picks k experts by logit and softmaxes over those k alone. Tokens are sorted by expert
and each expert present runs once over its rows; a token's k results are added in the order of its
logits, so the sum does not depend on the batch. Costs k rows of hidden size per token.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nmoe_core.engine.checkpoint import LayerTensors
from nmoe_core.engine.config import ModelConfig
from nmoe_core.engine.packing import linear


class MixtureOfExperts(nn.Module):
    """Router and experts of one block, on packed rows."""

    def __init__(self, config: ModelConfig, tensors: LayerTensors) -> None:
        super().__init__()
        self.experts_per_token = config.experts_per_token
        self.swiglu_limit = config.swiglu_limit
        self.swiglu_alpha = config.swiglu_alpha
        self.router_weight = nn.Parameter(tensors.router_weight, requires_grad=False)
        self.router_bias = nn.Parameter(tensors.router_bias, requires_grad=False)
        # Gate rows first, then up rows: the two halves are then contiguous in every result row.
        gate_up = torch.cat([tensors.gate_up_weight[:, 0::2], tensors.gate_up_weight[:, 1::2]], 1)
        bias = torch.cat([tensors.gate_up_bias[:, 0::2], tensors.gate_up_bias[:, 1::2]], 1)
        self.gate_up_weight = nn.Parameter(gate_up, requires_grad=False)
        self.gate_up_bias = nn.Parameter(bias, requires_grad=False)
        self.down_weight = nn.Parameter(tensors.down_weight, requires_grad=False)
        self.down_bias = nn.Parameter(tensors.down_bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Weighted sum of each row's experts; x is [N, hidden], normalised."""
        logits, experts = self._route(x)
        order = experts.flatten().argsort(stable=True)
        counts = experts.flatten().bincount(minlength=len(self.router_bias)).tolist()
        weights = torch.softmax(logits, dim=-1).view(-1, 1)
        results = torch.empty(experts.numel(), x.shape[1], device=x.device)
        for expert, chosen in enumerate(order.split(counts)):
            if len(chosen):
                rows = self._expert(expert, x.index_select(0, chosen // self.experts_per_token))
                results.index_copy_(0, chosen, rows * weights.index_select(0, chosen))
        return results.view(*experts.shape, x.shape[1]).sum(1).to(x.dtype)

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """float32 logits and int64 ids [N, k] of each row's experts, largest first."""
        logits = linear(x.float(), self.router_weight, self.router_bias)
        return logits.topk(self.experts_per_token, dim=-1)

    def _expert(self, expert: int, x: Tensor) -> Tensor:
        gate_up = linear(x, self.gate_up_weight[expert], self.gate_up_bias[expert])
        gate, up = gate_up.chunk(2, dim=-1)
        inner = swiglu(gate, up, self.swiglu_limit, self.swiglu_alpha)
        return linear(inner, self.down_weight[expert], self.down_bias[expert])


def swiglu(gate: Tensor, up: Tensor, limit: float, alpha: float) -> Tensor:
    """(up + 1) * gate * sigmoid(alpha * gate), gate clamped above and up on both sides."""
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(alpha * gate))
