"""Each kernel against plain torch on any device: a CPU interprets it, a GPU runs it compiled.

Shapes of heads are (query heads, key heads, head_dim); `like` has the device and the type.
"""

import math
from dataclasses import replace
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from nmoe_core.engine.kernels.attention import (
    Cached,
    decode_attention,
    prefill_attention,
    query_blocks,
)
from nmoe_core.engine.kernels.expert_product import (
    DenseExperts,
    ExpertWeights,
    TileShape,
    grouped_product,
    tile_experts,
)
from nmoe_core.engine.kernels.routing import choose_experts, sort_choices
from nmoe_core.engine.kernels.rows import add_rms_norm, rotate_and_store
from nmoe_core.engine.rotation import rotate
from nmoe_core.engine.weights import mxfp4

LIMIT, ALPHA = 7.0, 1.702
Heads = tuple[int, int, int]


def assert_near(found: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    """On a GPU by norm, since single values near zero have no relative error; else each value."""
    tolerance = 2e-2 if found.dtype == torch.bfloat16 else tolerance
    found, expected = found.float(), expected.float()
    if found.is_cuda:
        error = (found - expected).norm() / expected.norm()
        assert error < 0.01, float(error)
        assert found.isfinite().all()
    else:
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def assert_rounded(found: Tensor, expected: Tensor) -> None:
    """Each value, up to the rounding of its type."""
    is_compiled = {"rtol": 1e-2, "atol": 1e-2} if found.is_cuda else {}
    torch.testing.assert_close(found, expected, **is_compiled)


def swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up[..., ::2], gate_up[..., 1::2]
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return (up + 1) * gate * torch.sigmoid(ALPHA * gate)


def random_experts(
    num_experts: int, rows: int, columns: int, device: str = "cpu", dtype: torch.dtype | None = None
) -> tuple[ExpertWeights, Tensor]:
    """Weights, packed or dense of a type, and the bfloat16 [E, N, K] that they stand for."""
    middle = 127 - round(math.log2(3 * columns**0.5))  # so that a row of them has norm 1
    blocks = torch.randint(0, 256, (num_experts, rows, columns // 32, 16), dtype=torch.uint8)
    scales = torch.randint(middle - 3, middle + 2, blocks.shape[:-1], dtype=torch.uint8)
    blocks, scales = blocks.to(device), scales.to(device)
    bias = torch.randn(num_experts, rows, device=device)
    values = mxfp4.decode(blocks, scales, torch.bfloat16)
    if dtype is None:
        return tile_experts(blocks, scales, bias), values
    return DenseExperts(values.to(dtype), bias), values


def check_routing(logits: Tensor, top_k: int) -> None:
    weights, experts = choose_experts(logits, top_k)
    values, expected = logits.topk(top_k)
    assert torch.equal(experts.long(), expected)
    torch.testing.assert_close(weights, values.softmax(-1))
    check_sorted(experts, logits.shape[1], 16)


def check_sorted(experts: Tensor, num_experts: int, tile_rows: int) -> None:
    """Choices are sorted stably and cut into tiles of one expert."""
    weights = torch.ones_like(experts, dtype=torch.float32)
    plan = sort_choices(weights, experts, num_experts, tile_rows)
    assert torch.equal(plan.sorted_choices.long(), experts.flatten().argsort(stable=True))
    counts = experts.flatten().bincount(minlength=num_experts).tolist()
    starts = [0, *accumulate(counts)]
    assert plan.expert_starts.tolist() == starts
    expected = [
        (expert, starts[expert] + first)
        for expert, count in enumerate(counts)
        for first in range(0, count, tile_rows)
    ]
    tiles = list(zip(plan.tile_experts.tolist(), plan.tile_starts.tolist(), strict=True))
    assert tiles[: len(expected)] == expected
    assert all(expert == -1 for expert, _ in tiles[len(expected) :])


def check_products(
    x: Tensor,
    logits: Tensor,
    up: tuple[ExpertWeights, Tensor],
    down: tuple[ExpertWeights, Tensor],
    top_k: int,
    tile: TileShape,
    splits: int = 1,
) -> None:
    """Both projections, expert by expert; the second, in splits, of what the first gave."""
    plan = sort_choices(*choose_experts(logits, top_k), logits.shape[1], tile.rows)
    activated = grouped_product(x, up[0], plan, tile, (LIMIT, ALPHA))
    parts = grouped_product(activated, down[0], plan, tile, splits=splits)
    assert len(parts) == splits
    rows = parts.sum(0)
    for expert in plan.experts.unique().tolist():
        start, stop = plan.expert_starts[expert : expert + 2].tolist()
        choices, here = plan.sorted_choices[start:stop].long(), activated[start:stop]
        both = x[choices // top_k].float() @ up[1][expert].float().T + up[0].bias[expert]
        assert_near(here, swiglu(both), 1e-4)
        product = here.float() @ down[1][expert].float().T + down[0].bias[expert]
        assert_near(rows[choices], product * plan.weights.flatten()[choices, None], 1e-4)


def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, window: int | None) -> Tensor:
    """float32 attention of a document's last queries: q [T, heads, D], k, v [S, kv_heads, D]."""
    num_keys, group = len(k), q.shape[1] // k.shape[1]
    q, k, v = q.float(), *(x.float().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("thd,shd->hts", q, k) * q.shape[2] ** -0.5
    keys = torch.arange(num_keys, device=q.device)
    distance = keys[num_keys - len(q) :, None] - keys
    scores = scores.masked_fill((distance < 0) | (distance >= (window or num_keys)), -torch.inf)
    with_sink = torch.cat([scores, sinks[:, None, None].expand(-1, len(q), 1)], 2)
    return torch.einsum("hts,shd->thd", with_sink.softmax(2)[:, :, :-1], v)


def check_prefill(
    heads: Heads,
    lengths: list[int],
    window: int | None,
    like: Tensor,
    key_lengths: list[int] | None = None,
) -> None:
    """Packed documents attend to themselves alone, the last queries also to keys before them."""
    num_heads, kv_heads, dim = heads
    key_lengths = key_lengths or lengths
    starts, key_starts = (
        torch.tensor([0, *counts], device=like.device).cumsum(0).int()
        for counts in (lengths, key_lengths)
    )
    q = torch.randn(sum(lengths), num_heads, dim).to(like)
    k, v = torch.randn(2, sum(key_lengths), kv_heads, dim).to(like)
    sinks = torch.randn(num_heads, device=like.device)
    blocks = replace(query_blocks(starts, len(q)), key_starts=key_starts)
    found = prefill_attention(q, k, v, sinks, blocks, window).split(lengths)
    documents = zip(q.split(lengths), k.split(key_lengths), v.split(key_lengths), strict=True)
    for mixed, document in zip(found, documents, strict=True):
        if len(mixed):
            assert_near(mixed, attend(*document, sinks, window))


def paged(
    heads: Heads, lengths: list[int], width: int, page_size: int, like: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Queries, pages of keys and values, tables in a random order, lengths and sinks."""
    num_heads, kv_heads, dim = heads
    tables = torch.randperm(len(lengths) * width).view(-1, width).int()
    return (
        torch.randn(len(lengths), num_heads, dim).to(like),
        torch.randn(2, tables.numel(), page_size, kv_heads, dim).to(like),
        tables.to(like.device),
        torch.tensor(lengths, device=like.device).int(),
        torch.randn(num_heads, device=like.device),
    )


def check_decode(
    heads: Heads, lengths: list[int], width: int, window: int | None, page_size: int, like: Tensor
) -> None:
    """One query per sequence over the pages of the sequence; none gives zero."""
    q, pages, tables, sizes, sinks = paged(heads, lengths, width, page_size, like)
    cached = Cached(tables, sizes, max(lengths))
    found = decode_attention(q, *pages, cached, sinks, window)
    for i, length in enumerate(lengths):
        seen = torch.arange(max(0, length - (window or length)), length, device=q.device)
        page = tables[i, seen // page_size % width].long()
        k, v = pages[:, page, seen % page_size]
        if length:
            assert_near(found[i], attend(q[i : i + 1], k, v, sinks, None)[0])
        else:
            assert not found[i].any()


def check_rotation(heads: Heads, num_rows: int, like: Tensor) -> None:
    """Rotation is the plain path's; rows land in their slots, and those without one nowhere."""
    num_heads, kv_heads, dim = heads
    qkv = torch.randn(num_rows, (num_heads + 2 * kv_heads) * dim).to(like)
    angles = torch.randn(num_rows, dim // 2, device=like.device)
    table = torch.complex(angles.cos() * 1.3, angles.sin() * 1.3)
    slots = torch.randperm(4 * num_rows, device=like.device)[:num_rows]
    slots[2] = -1
    pages = qkv.new_zeros(2, num_rows, 4, kv_heads, dim)
    q = rotate_and_store(qkv, table, slots, pages[0], pages[1])
    plain = qkv.unflatten(1, (-1, dim))
    turned = rotate(plain[:, : num_heads + kv_heads], table)
    assert_rounded(q, turned[:, :num_heads])
    stored, is_stored = pages.flatten(1, 2), slots >= 0
    assert_rounded(stored[0, slots[is_stored]], turned[is_stored, num_heads:])
    assert torch.equal(stored[1, slots[is_stored]], plain[is_stored, num_heads + kv_heads :])
    stored[:, slots[is_stored]] = 0
    assert not stored.any()


def check_norm(x: Tensor, delta: Tensor | None) -> None:
    """Adding and normalising round as two operations do."""
    weight = torch.randn(x.shape[1], device=x.device)
    total, found = add_rms_norm(x, delta, weight, 1e-5)
    assert torch.equal(total, x if delta is None else x + delta)
    expected = F.rms_norm(total.float(), (x.shape[1],), weight, 1e-5)
    assert_rounded(found, expected.to(x.dtype))
