"""Attention of one new query per sequence over its paged keys and values.

Keys are taken in splits of a fixed length, one program for a split of one key head of one sequence
with all query heads that share it; a second kernel merges the splits in order and adds the sink
once. Splits depend on a sequence's own length alone, so its result is the same bits in any batch.
A window layer's pages form a ring: position p lies in table column (p / page_size) mod width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nmoe_core.engine.kernels.mode import LOG2_E, attend_keys, round_to
from nmoe_core.engine.transfers import on_its_device

SPLIT_KEYS = 512
KEY_BLOCK = 64
_LEAST_ROWS = 16  # of a matrix product


@dataclass(frozen=True, slots=True)
class Cached:
    """Which pages hold the positions of a batch of sequences.

    tables: int32 [B, width]. lengths: int32 [B], the query's own position included; 0 for an empty
    place of the batch, whose result is zero. max_length: an upper bound, which decides how many
    splits there are, not the result.
    """

    tables: Tensor
    lengths: Tensor
    max_length: int


@on_its_device
def decode_attention(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, cached: Cached, sinks: Tensor, window: int | None
) -> Tensor:
    """One query of each sequence over the positions it sees: [B, heads, D].

    Args:
        q: [B, heads, D], rotated, not yet scaled.
        k_pages, v_pages: [num_pages, page_size, kv_heads, D].
        cached: Where the positions lie.
        sinks: float32 [heads].
        window: Positions seen, the query's own included; None for all.
    """
    batch, heads, head_dim = q.shape
    _, page_size, kv_heads, _ = k_pages.shape
    seen = min(window or cached.max_length, cached.max_length)
    num_splits = max(1, triton.cdiv(seen, SPLIT_KEYS))
    group = heads // kv_heads
    sums = torch.empty(batch, heads, num_splits, head_dim, device=q.device)
    maxima = torch.empty(batch, heads, num_splits, device=q.device)
    totals = torch.empty_like(maxima)
    out = torch.empty_like(q)
    _decode_kernel[(batch, kv_heads, num_splits)](
        *(q.contiguous(), k_pages, v_pages, cached.tables, cached.lengths, sums, maxima, totals),
        head_dim**-0.5 * LOG2_E.value,
        cached.tables.shape[1],
        window or cached.max_length,
        num_splits,
        KV_HEADS=kv_heads,
        GROUP=group,
        ROWS=max(_LEAST_ROWS, triton.next_power_of_2(group)),
        HEAD_DIM=head_dim,
        PAGE_SIZE=page_size,
        SPLIT=SPLIT_KEYS,
        BLOCK_K=KEY_BLOCK,
        num_warps=4,
        num_stages=3,
    )
    _merge_kernel[(batch, heads)](
        *(sums, maxima, totals, sinks, out, num_splits),
        HEAD_DIM=head_dim,
        SPLITS=triton.next_power_of_2(num_splits),
    )
    return out


@triton.jit
def _decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    tables_ptr,
    lengths_ptr,
    sums_ptr,
    maxima_ptr,
    totals_ptr,
    scale,
    table_width,
    window,
    num_splits,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    sequence = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(lengths_ptr + sequence)
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, HEAD_DIM)
    is_row = rows < GROUP
    heads = sequence.to(tl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP + rows
    q = tl.load(q_ptr + heads[:, None] * HEAD_DIM + dims[None, :], mask=is_row[:, None], other=0.0)
    largest = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    acc = tl.zeros((ROWS, HEAD_DIM), dtype=tl.float32)
    low = tl.maximum(length - window, 0) + split * SPLIT
    high = tl.minimum(low + SPLIT, length)
    for key in range(low, high, BLOCK_K):
        keys = key + tl.arange(0, BLOCK_K)
        is_key = keys < high
        column = (keys // PAGE_SIZE) % table_width
        pages = tl.load(tables_ptr + sequence * table_width + column, mask=is_key, other=0)
        slots = pages.to(tl.int64) * PAGE_SIZE + keys % PAGE_SIZE
        pointers = (slots * KV_HEADS + kv_head)[:, None] * HEAD_DIM + dims[None, :]
        k = tl.load(k_ptr + pointers, mask=is_key[:, None], other=0.0)
        v = tl.load(v_ptr + pointers, mask=is_key[:, None], other=0.0)
        largest, total, acc = attend_keys(q, k, v, is_key[None, :], scale, largest, total, acc)
    places = heads * num_splits + split
    tl.store(maxima_ptr + places, largest, mask=is_row)
    tl.store(totals_ptr + places, total, mask=is_row)
    tl.store(sums_ptr + places[:, None] * HEAD_DIM + dims[None, :], acc, mask=is_row[:, None])


@triton.jit
def _merge_kernel(
    sums_ptr,
    maxima_ptr,
    totals_ptr,
    sinks_ptr,
    out_ptr,
    num_splits,
    HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    splits = tl.arange(0, SPLITS)
    dims = tl.arange(0, HEAD_DIM)
    is_split = splits < num_splits
    places = head * num_splits + splits
    maxima = tl.load(maxima_ptr + places, mask=is_split, other=float("-inf"))
    totals = tl.load(totals_ptr + places, mask=is_split, other=0.0)
    pointers = sums_ptr + places[:, None] * HEAD_DIM + dims[None, :]
    sums = tl.load(pointers, mask=is_split[:, None], other=0.0)
    sink = tl.load(sinks_ptr + tl.program_id(1)) * LOG2_E
    largest = tl.maximum(tl.max(maxima, axis=0), sink)
    shares = tl.exp2(maxima - largest)
    total = tl.sum(totals * shares, axis=0) + tl.exp2(sink - largest)
    merged = tl.sum(sums * shares[:, None], axis=0) / total
    tl.store(out_ptr + head * HEAD_DIM + dims, round_to(merged, out_ptr.dtype.element_ty))
