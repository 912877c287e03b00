"""Grouped-query attention with sinks and a sliding window (gpt-oss model card, section 2).

Each head has a learned sink: a logit that joins its softmax and whose probability is dropped, so
that a head can attend to nothing. A window of w lets position i see i - w + 1 .. i. Queries are
taken a block at a time: memory for scores is B x heads x 32 x T float32, and a windowed block
costs 32 x (w + 31) scores whatever T is.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nmoe_core.engine.checkpoint import LayerTensors
from nmoe_core.engine.config import ModelConfig
from nmoe_core.engine.packing import Packing, linear
from nmoe_core.engine.rope import pair_halves, rotate

# Measured on one core at T = 256 .. 4096: from 64 on, a block's scores leave the cache and the
# softmax takes up to twice as long.
QUERY_BLOCK_SIZE = 32


class Attention(nn.Module):
    """Projections around `attend`, on packed rows."""

    def __init__(self, config: ModelConfig, layer: int, tensors: LayerTensors) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.num_kv_heads = config.num_key_value_heads
        self.qkv_sizes = config.qkv_sizes
        self.window = config.window(layer)
        weight, bias = tensors.qkv_weight.clone(), tensors.qkv_bias.clone()
        for rows in (weight, bias):
            turned = rows[: sum(self.qkv_sizes[:2])].unflatten(0, (-1, self.head_dim))
            turned.copy_(pair_halves(turned))
        self.qkv_weight = nn.Parameter(weight, requires_grad=False)
        self.qkv_bias = nn.Parameter(bias, requires_grad=False)
        self.sinks = nn.Parameter(tensors.sinks, requires_grad=False)
        self.out_weight = nn.Parameter(tensors.out_weight, requires_grad=False)
        self.out_bias = nn.Parameter(tensors.out_bias, requires_grad=False)

    def forward(self, x: Tensor, packing: Packing, rotation: Tensor) -> Tensor:
        """Mix each document's rows.

        Args:
            x: [N, hidden], normalised.
            packing: Where the rows lie.
            rotation: complex64 [N, head_dim / 2], of the rows' positions.

        Returns:
            [N, hidden].
        """
        fused = linear(x, self.qkv_weight, self.qkv_bias)
        q_size, k_size, _ = self.qkv_sizes
        turned = rotate(fused[:, : q_size + k_size].unflatten(1, (-1, self.head_dim)), rotation)
        q, k = turned.split((q_size // self.head_dim, self.num_kv_heads), dim=1)
        v = fused[:, q_size + k_size :].unflatten(1, (-1, self.head_dim))
        mixed = attend(
            packing.unpack(q).unflatten(2, (self.num_kv_heads, -1)).permute(0, 2, 3, 1, 4),
            packing.unpack(k).transpose(1, 2),
            packing.unpack(v).transpose(1, 2),
            self.sinks,
            self.window,
        )
        rows = packing.pack(mixed.permute(0, 3, 1, 2, 4).flatten(2))
        return linear(rows, self.out_weight, self.out_bias)


def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, window: int | None) -> Tensor:
    """Causal attention of T positions over themselves; scores and softmax in float32.

    Args:
        q: [B, kv_heads, group, T, head_dim], not yet scaled.
        k: [B, kv_heads, T, head_dim].
        v: [B, kv_heads, T, head_dim].
        sinks: float32 [kv_heads * group].
        window: Positions seen, the query's own included; None for all before it.

    Returns:
        [B, kv_heads, group, T, head_dim].
    """
    length = q.shape[3]
    sinks = sinks.view(1, q.shape[1], q.shape[2], 1, 1)
    # Whole blocks: a product of another shape would round a document's last rows otherwise.
    padding = (0, 0, 0, -length % QUERY_BLOCK_SIZE)
    q, k, v = (F.pad(x, padding).contiguous() for x in (q * q.shape[-1] ** -0.5, k, v))
    mixed = torch.empty_like(q)
    for start in range(0, length, QUERY_BLOCK_SIZE):
        stop = start + QUERY_BLOCK_SIZE
        first = 0 if window is None else max(0, start - window + 1)
        mask = _mask(start, stop, first, window, q.device)
        block, keys, values = q[:, :, :, start:stop], k[:, :, first:stop], v[:, :, first:stop]
        mixed[:, :, :, start:stop] = _attend_block(block, keys, values, sinks, mask)
    return mixed[:, :, :, :length]


def _attend_block(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, mask: Tensor) -> Tensor:
    """One block of queries: q [B, K, G, Q, D], k and v [B, K, S, D], mask [Q, S] added."""
    # The group's queries become rows of one matrix, so that a key head is multiplied once.
    scores = torch.matmul(q.flatten(2, 3), k.mT).unflatten(2, q.shape[2:4]).float().add_(mask)
    # The sink takes part in the softmax's maximum and sum, and has no value to add.
    largest = torch.maximum(scores.amax(-1, keepdim=True), sinks)
    weights = scores.sub_(largest).exp_()
    total = weights.sum(-1, keepdim=True) + (sinks - largest).exp()
    mixed = torch.matmul(weights.flatten(2, 3).to(v.dtype), v).unflatten(2, q.shape[2:4])
    return mixed / total


def _mask(start: int, stop: int, first: int, window: int | None, device: torch.device) -> Tensor:
    """float32 [stop - start, stop - first]: 0 where a query sees a key, else minus infinity."""
    distance = torch.arange(start, stop, device=device)[:, None]
    distance = distance - torch.arange(first, stop, device=device)
    hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
    return torch.zeros(hidden.shape, device=device).masked_fill_(hidden, -torch.inf)
