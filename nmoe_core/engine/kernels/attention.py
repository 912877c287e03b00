"""Attention kernels with sinks and sliding windows, over packed documents and over pages.

In prefill, one program computes a block of queries of one head, and iterates over the visible keys
with a running softmax (FlashAttention, arXiv 2205.14135). A head's sink is a logit whose
probability is dropped: the running maximum starts at the sink, and the running sum at one. Blocks
never span documents. Only blocks of keys at the two ends of the visible range are masked.

In decoding, the keys of a sequence are divided into splits of fixed length. One program computes
one split of one key head, for all query heads that share the key head. A second kernel merges the
splits in order and adds the sink once. Splits depend only on the length of the sequence, so its
result has the same bits in any batch. A window layer's pages form a ring: position p is in table
column (p / page_size) mod width.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nmoe_core.engine.kernels.mode import LOG2_E, attend_keys, round_to
from nmoe_core.engine.transfers import on_its_device

QUERY_BLOCK = 128
KEY_BLOCK = 64
SPLIT_KEYS = 512
_LEAST_ROWS = 16  # minimum number of rows of a matrix product


@dataclass(frozen=True, slots=True)
class QueryBlocks:
    """Blocks of queries of a packed batch; all layers use the same blocks.

    documents, firsts: int32 [max_blocks], document of each block, and first row of the block within
    the document; unused blocks have document -1. starts, key_starts: int32 [B + 1], first row and
    first key of each document. If a document has more keys than queries, the queries are at its
    last positions, and early keys outside every window may be missing.
    """

    documents: Tensor
    firsts: Tensor
    starts: Tensor
    key_starts: Tensor


def query_blocks(starts: Tensor, num_rows: int) -> QueryBlocks:
    """Split documents with equal numbers of keys and queries into blocks.

    `starts` is int32 [B + 1] on the device, and `num_rows` its last value.
    """
    block = QUERY_BLOCK
    lengths = starts[1:] - starts[:-1]
    counts = (lengths + block - 1) // block
    ends = counts.cumsum(0)
    num_documents = len(lengths)
    ids = torch.arange(triton.cdiv(num_rows, block) + num_documents, device=starts.device)
    documents = torch.searchsorted(ends, ids, right=True)
    inside = documents.clamp(max=max(0, num_documents - 1))
    firsts = (ids - (ends - counts)[inside]) * block
    documents = torch.where(documents < num_documents, documents, -1)
    return QueryBlocks(documents.int(), firsts.int(), starts, key_starts=starts)


@on_its_device
def prefill_attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, blocks: QueryBlocks, window: int | None
) -> Tensor:
    """Causal attention within each document: [N, heads, D].

    Args:
        q: [N, heads, D], rotated, not yet scaled; D is a power of two of at least 16.
        k, v: [M, kv_heads, D], keys rotated.
        sinks: float32 [heads].
        blocks: Positions of the documents' queries and keys.
        window: Number of visible positions, including the query's; None for all earlier positions.
    """
    num_rows, heads, head_dim = q.shape
    out = torch.empty_like(q)
    if num_rows:
        _prefill_kernel[(len(blocks.documents), heads)](
            q.contiguous(), k.contiguous(), v.contiguous(), sinks, out,
            blocks.documents, blocks.firsts, blocks.starts, blocks.key_starts,
            head_dim**-0.5 * LOG2_E.value, heads, k.shape[1], window or len(k),
            HEAD_DIM=head_dim, BLOCK_Q=QUERY_BLOCK, BLOCK_K=KEY_BLOCK, num_warps=8, num_stages=3,
        )  # fmt: skip
    return out


@triton.jit
def _prefill_kernel(
    q_ptr, k_ptr, v_ptr, sinks_ptr, out_ptr, documents_ptr, firsts_ptr, starts_ptr,
    key_starts_ptr,
    scale, heads, kv_heads, window,
    HEAD_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    head = tl.program_id(1)
    document = tl.load(documents_ptr + block)
    if document < 0:
        return
    start = tl.load(starts_ptr + document).to(tl.int64)
    num_queries = (tl.load(starts_ptr + document + 1) - start).to(tl.int32)
    key_start = tl.load(key_starts_ptr + document).to(tl.int64)
    length = (tl.load(key_starts_ptr + document + 1) - key_start).to(tl.int32)
    rows = tl.load(firsts_ptr + block) + tl.arange(0, BLOCK_Q)
    first = tl.load(firsts_ptr + block) + length - num_queries
    queries = first + tl.arange(0, BLOCK_Q)
    dims = tl.arange(0, HEAD_DIM)
    is_query = rows < num_queries
    q_rows = ((start + rows) * heads + head) * HEAD_DIM
    q = tl.load(q_ptr + q_rows[:, None] + dims[None, :], mask=is_query[:, None], other=0.0)
    kv_head = head // (heads // kv_heads)
    sink = tl.load(sinks_ptr + head) * LOG2_E
    largest = tl.zeros((BLOCK_Q,), dtype=tl.float32) + sink
    total = tl.full((BLOCK_Q,), 1.0, dtype=tl.float32)
    acc = tl.zeros((BLOCK_Q, HEAD_DIM), dtype=tl.float32)
    # The first key that is visible to the block's first query, rounded down to a whole key block.
    low = tl.maximum(first - window + 1, 0) // BLOCK_K * BLOCK_K
    high = tl.minimum(first + BLOCK_Q, length)
    # The blocks of keys from inner_low to inner_high are visible to every query of the block; the
    # blocks at both ends, which need masks, are computed first.
    inner_low = tl.cdiv(tl.maximum(first + BLOCK_Q - window, 0), BLOCK_K) * BLOCK_K
    inner_low = tl.minimum(inner_low, high)
    inner_high = tl.maximum((first + 1) // BLOCK_K * BLOCK_K, inner_low)
    columns = tl.arange(0, BLOCK_K)
    for place in range(low, high - inner_high + inner_low, BLOCK_K):
        key = tl.where(place < inner_low, place, place - inner_low + inner_high)
        keys = key + columns
        pointers = ((key_start + keys) * kv_heads + kv_head)[:, None] * HEAD_DIM + dims[None, :]
        is_key = (keys < length)[:, None]
        k = tl.load(k_ptr + pointers, mask=is_key, other=0.0)
        v = tl.load(v_ptr + pointers, mask=is_key, other=0.0)
        distance = queries[:, None] - keys[None, :]
        is_seen = (distance >= 0) & (distance < window)
        # The maximum is never minus infinity, because it starts at the sink.
        largest, total, acc = attend_keys(q, k, v, is_seen, scale, largest, total, acc)
    for key in range(inner_low, inner_high, BLOCK_K):
        rows_of_keys = (key_start + key + columns) * kv_heads + kv_head
        pointers = rows_of_keys[:, None] * HEAD_DIM + dims[None, :]
        k = tl.load(k_ptr + pointers)
        v = tl.load(v_ptr + pointers)
        largest, total, acc = attend_keys(q, k, v, None, scale, largest, total, acc)
    out = round_to(acc / total[:, None], out_ptr.dtype.element_ty)
    tl.store(out_ptr + q_rows[:, None] + dims[None, :], out, mask=is_query[:, None])


@dataclass(frozen=True, slots=True)
class Cached:
    """The pages with the keys and values of a batch of sequences.

    tables: int32 [B, width]. lengths: int32 [B], including the query's position; 0 for an empty
    slot of the batch, whose result is zero. max_length: an upper bound of the lengths. It
    determines the number of splits, and does not change the result.
    """

    tables: Tensor
    lengths: Tensor
    max_length: int


@on_its_device
def decode_attention(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, cached: Cached, sinks: Tensor, window: int | None
) -> Tensor:
    """Attention of one query per sequence over its visible positions: [B, heads, D].

    Arguments as for `prefill_attention`, but q is [B, heads, D] and the pages are [num_pages,
    page_size, kv_heads, D].
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
        q.contiguous(), k_pages, v_pages, cached.tables, cached.lengths, sums, maxima, totals,
        head_dim**-0.5 * LOG2_E.value, cached.tables.shape[1], window or cached.max_length,
        num_splits,
        KV_HEADS=kv_heads, GROUP=group, ROWS=max(_LEAST_ROWS, triton.next_power_of_2(group)),
        HEAD_DIM=head_dim, PAGE_SIZE=page_size, SPLIT=SPLIT_KEYS, BLOCK_K=KEY_BLOCK,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    _merge_kernel[(batch, heads)](
        sums, maxima, totals, sinks, out, num_splits,
        HEAD_DIM=head_dim, SPLITS=triton.next_power_of_2(num_splits),
    )  # fmt: skip
    return out


@triton.jit
def _decode_kernel(
    q_ptr, k_ptr, v_ptr, tables_ptr, lengths_ptr, sums_ptr, maxima_ptr, totals_ptr,
    scale, table_width, window, num_splits,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr, SPLIT: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
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
    sums_ptr, maxima_ptr, totals_ptr, sinks_ptr, out_ptr,
    num_splits,
    HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
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
