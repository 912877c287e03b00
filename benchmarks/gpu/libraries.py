"""Torch's own routes beside the kernels: grouped products over bfloat16 experts, FlexAttention.

One table of a block's mixture of experts at a prefill and a decoding size, one of its attention,
full and windowed. Each line has its distance from the first, so that no fast wrong answer is taken.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from benchmarks.gpu import machine
from benchmarks.gpu.figures import Figure, Sizes
from benchmarks.gpu.machine import Limits
from benchmarks.gpu.random_model import SCALES
from nmoe_core.engine.block import swiglu
from nmoe_core.engine.kernels.attention import prefill_attention, query_blocks
from nmoe_core.engine.kernels.block import FusedExperts
from nmoe_core.engine.kernels.expert_product import DenseExperts, tile_experts
from nmoe_core.engine.weights import mxfp4
from nmoe_core.engine.weights.config import ModelConfig

Run = Callable[[], Tensor]


def mixtures(
    config: ModelConfig, device: torch.device, limits: Limits, sizes: Sizes
) -> list[Figure]:
    """Packed and dense kernels, and `F.grouped_mm`, over one block's experts."""
    hidden, inner, num_experts = config.hidden_size, config.intermediate_size, config.num_experts
    gate_up, down = (
        _random_mxfp4(num_experts, *size, device) for size in ((2 * inner, hidden), (hidden, inner))
    )
    biases = [torch.zeros(num_experts, n, device=device) for n in (2 * inner, hidden)]
    dense = [mxfp4.decode(*packed, torch.bfloat16) for packed in (gate_up, down)]
    k, limit, alpha = config.experts_per_token, config.swiglu_limit, config.swiglu_alpha
    packed = [tile_experts(*w, bias) for w, bias in zip((gate_up, down), biases, strict=True)]
    plain = [DenseExperts(w, bias) for w, bias in zip(dense, biases, strict=True)]
    kernels = {
        "kernels, MXFP4": FusedExperts(packed[0], packed[1], k, limit, alpha),
        "kernels, bfloat16": FusedExperts(plain[0], plain[1], k, limit, alpha),
    }

    def of(rows: int) -> list[Figure]:
        x, residual = torch.randn(2, rows, hidden, device=device, dtype=torch.bfloat16)
        logits = torch.randn(rows, num_experts, device=device)
        runs: dict[str, Run] = {
            name: lambda experts=experts: experts(x, logits, residual)
            for name, experts in kernels.items()
        }
        runs["F.grouped_mm"] = lambda: _grouped(x, logits, residual, dense, biases, config)
        flop = 2 * rows * config.experts_per_token * 3 * hidden * inner
        num_bytes = num_experts * 3 * hidden * inner * 4.25 / 8
        bounds = {"flop": flop, "num_bytes": num_bytes}
        return _timed(f"experts, {rows} rows", runs, device, limits, sizes, bounds)

    return of(sizes.documents * sizes.document_tokens) + of(sizes.batch_sizes[1])


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

        def is_seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor, reach: int = window or length):
            return (i >= j) & (i - j < reach)

        mask = create_block_mask(is_seen, None, None, length, length, device=device)

        def flex_run(mask: Any = mask) -> Tensor:
            by_head = [x.unflatten(0, (count, length)).transpose(1, 2) for x in (q, k, v)]
            mixed, aux = flex(
                *by_head, block_mask=mask, enable_gqa=True, return_aux=AuxRequest(lse=True)
            )
            mixed = mixed * torch.sigmoid(aux.lse - sinks[:, None])[..., None].to(mixed.dtype)
            return mixed.transpose(1, 2).flatten(0, 1)

        runs: dict[str, Run] = {
            "kernels": lambda window=window: prefill_attention(q, k, v, sinks, blocks, window),
            "FlexAttention": flex_run,
        }
        seen = min(window or length, length / 2)
        bounds = {"flop": 4 * count * length * heads * dim * seen}
        name = "attention" if window is None else f"attention, window {window}"
        found += _timed(name, runs, device, limits, sizes, bounds)
    return found


def _timed(
    name: str,
    runs: dict[str, Run],
    device: torch.device,
    limits: Limits,
    sizes: Sizes,
    bounds: dict[str, float],
) -> list[Figure]:
    expected = next(iter(runs.values()))().float()
    found: list[Figure] = []
    for route, run in runs.items():
        taken = machine.seconds(run, device, sizes.rounds)
        found.append(
            {
                "what": name,
                "route": route,
                "milliseconds": 1e3 * taken,
                "share_of_roofline": limits.share(taken, **bounds),
                "distance": float((run().float() - expected).norm() / expected.norm()),
            }
        )
    return found


def _grouped(
    x: Tensor,
    logits: Tensor,
    residual: Tensor,
    dense: list[Tensor],
    biases: list[Tensor],
    config: ModelConfig,
) -> Tensor:
    """The mixture with sorted copies of the rows and two grouped products of the library."""
    k = config.experts_per_token
    values, experts = logits.topk(k)
    order = experts.flatten().argsort(stable=True)
    sorted_experts = experts.flatten()[order]
    ends = sorted_experts.bincount(minlength=config.num_experts).cumsum(0).int()
    rows = F.grouped_mm(x[order // k], dense[0].mT, offs=ends)
    rows = rows + biases[0].to(rows.dtype)[sorted_experts]
    gate, up = rows[:, ::2], rows[:, 1::2]
    inner = swiglu(gate, up, config.swiglu_limit, config.swiglu_alpha)
    rows = F.grouped_mm(inner, dense[1].mT, offs=ends)
    rows = rows + biases[1].to(rows.dtype)[sorted_experts]
    in_order = torch.empty_like(rows)
    in_order[order] = rows
    weights = F.softmax(values, -1)[..., None].to(rows.dtype)
    return residual + (in_order.unflatten(0, (-1, k)) * weights).sum(1)


def _random_mxfp4(
    num_experts: int, rows: int, columns: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    shape = (num_experts, rows, columns // 32)
    blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, device=device)
    return blocks, torch.randint(*SCALES, shape, dtype=torch.uint8, device=device)
