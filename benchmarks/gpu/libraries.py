"""Torch's own routes beside the kernels: grouped products over bfloat16 experts, FlexAttention.

One table of a block's mixture of experts at a prefill and two decoding sizes, one of its attention,
full and windowed. Each line has its distance from the first, so that no fast wrong answer is taken.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from benchmarks.gpu import machine
from benchmarks.gpu.experts import both_forms, by_setting
from benchmarks.gpu.figures import Figure, Sizes
from benchmarks.gpu.machine import Limits
from benchmarks.gpu.random_model import random_layer
from nmoe_core.engine.kernels.attention import prefill_attention, query_blocks
from nmoe_core.engine.weights.config import ModelConfig


def mixtures(
    config: ModelConfig, device: torch.device, limits: Limits, sizes: Sizes
) -> list[Figure]:
    """Every way of multiplying by experts, over one block's, packed and decoded."""
    rows = [sizes.documents * sizes.document_tokens, *reversed(sizes.batch_sizes)]
    layers = both_forms(random_layer(config, device))
    return by_setting(config, layers, limits, rows, sizes.rounds)


def attentions(
    config: ModelConfig, device: torch.device, limits: Limits, sizes: Sizes
) -> list[Figure]:
    """The prefill kernel and FlexAttention over one batch of documents."""
    count, length = sizes.documents, sizes.document_tokens
    heads, kv_heads, dim = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    q = torch.randn(count * length, heads, dim, device=device, dtype=torch.bfloat16)
    k, v = torch.randn(2, count * length, kv_heads, dim, device=device, dtype=torch.bfloat16)
    sinks = torch.randn(heads, device=device)
    starts = torch.arange(0, count * length + 1, length, device=device).int()
    blocks = query_blocks(starts, count * length)
    flex: Any = torch.compile(flex_attention) if device.type == "cuda" else flex_attention
    found: list[Figure] = []
    for window in (None, config.sliding_window):
        # A tensor: with a number, compiled for a GPU, the second window's result was wrong.
        reach = torch.tensor(window or length, device=device)

        def is_seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor, reach: Tensor = reach):
            return (i >= j) & (i - j < reach)

        mask = create_block_mask(is_seen, None, None, length, length, device=device)

        def flex_run(mask: Any = mask) -> Tensor:
            by_head = [x.unflatten(0, (count, length)).transpose(1, 2) for x in (q, k, v)]
            mixed, aux = flex(
                *by_head, block_mask=mask, enable_gqa=True, return_aux=AuxRequest(lse=True)
            )
            mixed = mixed * torch.sigmoid(aux.lse - sinks[:, None])[..., None].to(mixed.dtype)
            return mixed.transpose(1, 2).flatten(0, 1)

        runs: dict[str, machine.Run] = {
            "kernels": lambda window=window: prefill_attention(q, k, v, sinks, blocks, window),
            "FlexAttention": flex_run,
        }
        seen = min(window or length, length / 2)
        bounds = {"flop": 4 * count * length * heads * dim * seen}
        name = "attention" if window is None else f"attention, window {window}"
        found += machine.compared(name, runs, device, limits, sizes.rounds, bounds)
    return found
