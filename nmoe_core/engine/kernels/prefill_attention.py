"""Attention of packed documents over themselves, with sinks and a sliding window.

One program computes a block of queries of one head, walking the keys it can see with a running
softmax (FlashAttention, arXiv 2205.14135). A head's sink is a logit whose probability is dropped:
the running maximum starts at it and the running sum at one. Blocks never span two documents.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nmoe_core.engine.kernels.mode import LOG2_E, attend_keys, round_to
from nmoe_core.engine.transfers import on_its_device

QUERY_BLOCK = 128
KEY_BLOCK = 64


@dataclass(frozen=True, slots=True)
class QueryBlocks:
    """Blocks of queries of a packed batch, the same for every layer.

    documents, firsts: int32 [max_blocks], document and first row within it of each block; a
    document of -1 marks blocks past the last. starts, key_starts: int32 [B + 1], first row and
    first key of each document. Of a document with more keys than queries, the queries are the last
    ones, and keys that no window reaches may be left out at its beginning.
    """

    documents: Tensor
    firsts: Tensor
    starts: Tensor
    key_starts: Tensor


def query_blocks(starts: Tensor, num_rows: int) -> QueryBlocks:
    """Cut documents with as many keys as queries into blocks.

    `starts` is int32 [B + 1] on the device, `num_rows` its last.
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
        blocks: Where the documents' queries and keys lie.
        window: Positions seen, the query's own included; None for all before it.
    """
    num_rows, heads, head_dim = q.shape
    out = torch.empty_like(q)
    if num_rows:
        _prefill_kernel[(len(blocks.documents), heads)](
            *(q.contiguous(), k.contiguous(), v.contiguous(), sinks, out),
            *(blocks.documents, blocks.firsts, blocks.starts, blocks.key_starts),
            *(head_dim**-0.5 * LOG2_E.value, heads, k.shape[1], window or len(k)),
            HEAD_DIM=head_dim,
            BLOCK_Q=QUERY_BLOCK,
            BLOCK_K=KEY_BLOCK,
            num_warps=4,
            num_stages=3,
        )
    return out


@triton.jit
def _prefill_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    sinks_ptr,
    out_ptr,
    documents_ptr,
    firsts_ptr,
    starts_ptr,
    key_starts_ptr,
    scale,
    heads,
    kv_heads,
    window,
    HEAD_DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
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
    # The first key that the block's first query sees, rounded down to a whole key block.
    low = tl.maximum(first - window + 1, 0) // BLOCK_K * BLOCK_K
    high = tl.minimum(first + BLOCK_Q, length)
    for key in range(low, high, BLOCK_K):
        keys = key + tl.arange(0, BLOCK_K)
        kv_rows = ((key_start + keys) * kv_heads + kv_head) * HEAD_DIM
        is_key = (keys < length)[:, None]
        k = tl.load(k_ptr + kv_rows[:, None] + dims[None, :], mask=is_key, other=0.0)
        v = tl.load(v_ptr + kv_rows[:, None] + dims[None, :], mask=is_key, other=0.0)
        distance = queries[:, None] - keys[None, :]
        is_seen = (distance >= 0) & (distance < window)
        # A maximum is never minus infinity: it starts at the sink.
        largest, total, acc = attend_keys(q, k, v, is_seen, scale, largest, total, acc)
    out = round_to(acc / total[:, None], out_ptr.dtype.element_ty)
    tl.store(out_ptr + q_rows[:, None] + dims[None, :], out, mask=is_query[:, None])
