"""Kernels over single rows: residual addition with RMSNorm, and rotation with cache writes.

The residual sum is rounded to its dtype before it is normalised, as if these were two operations.
Mean and scaling are computed in float32 (RMSNorm: Zhang and Sennrich, arXiv 1910.07467). Rotation
is applied to adjacent pairs of a head (see `rotation.pair_halves`) in float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nmoe_core.engine.kernels.mode import round_to, widen
from nmoe_core.engine.transfers import on_its_device

_HEADS_BLOCK = 16


@on_its_device
def add_rms_norm(
    residual: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """`residual + delta` and its RMSNorm, [T, H] each.

    If `delta` is None, the unchanged residual is normalised and returned. weight: float32 [H].
    """
    num_tokens, width = residual.shape
    total = residual if delta is None else torch.empty_like(residual)
    normalised = torch.empty_like(residual)
    if num_tokens:
        _add_rms_norm_kernel[(num_tokens,)](
            residual, residual if delta is None else delta, weight, total, normalised,
            width, epsilon,
            HAS_DELTA=delta is not None, BLOCK=triton.next_power_of_2(width), num_warps=8,
        )  # fmt: skip
    return total, normalised


@triton.jit
def _add_rms_norm_kernel(
    residual_ptr, delta_ptr, weight_ptr, total_ptr, normalised_ptr,
    width, epsilon,
    HAS_DELTA: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * width
    columns = tl.arange(0, BLOCK)
    is_there = columns < width
    x = tl.load(residual_ptr + row + columns, mask=is_there, other=0.0)
    if HAS_DELTA:
        delta = tl.load(delta_ptr + row + columns, mask=is_there, other=0.0)
        x = round_to(widen(x) + widen(delta), x.dtype)
        tl.store(total_ptr + row + columns, x, mask=is_there)
    values = widen(x)
    scale = tl.rsqrt(tl.sum(values * values, axis=0) / width + epsilon)
    weight = tl.load(weight_ptr + columns, mask=is_there, other=0.0)
    out = round_to(values * scale * weight, x.dtype)
    tl.store(normalised_ptr + row + columns, out, mask=is_there)


@on_its_device
def rotate_and_store(
    qkv: Tensor, rotation: Tensor, slots: Tensor, k_pages: Tensor, v_pages: Tensor
) -> Tensor:
    """Rotate, store keys and values, and return the queries [N, heads, D].

    Args:
        qkv: [N, (heads + 2 * kv_heads) * D], queries, then keys, then values.
        rotation: complex64 [N, D / 2], of the rows' positions.
        slots: int32 or int64 [N], page * page_size + offset of each row; negative rows are not
            stored.
        k_pages, v_pages: [num_pages, page_size, kv_heads, D], written; [N, 1, kv_heads, D] with
            slots 0 .. N - 1 if there is no cache.
    """
    num_rows = len(qkv)
    kv_heads, head_dim = k_pages.shape[2:]
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    q = qkv.new_empty(num_rows, heads, head_dim)
    if num_rows:
        _rotate_kernel[(num_rows, triton.cdiv(heads + 2 * kv_heads, _HEADS_BLOCK))](
            qkv.contiguous(), torch.view_as_real(rotation), slots, q, k_pages, v_pages,
            heads, kv_heads,
            HALF_DIM=head_dim // 2, PADDED_HALF=triton.next_power_of_2(head_dim // 2),
            BLOCK=_HEADS_BLOCK,
        )  # fmt: skip
    return q


@triton.jit
def _rotate_kernel(
    qkv_ptr, rotation_ptr, slots_ptr, q_ptr, k_ptr, v_ptr,
    heads, kv_heads,
    HALF_DIM: tl.constexpr, PADDED_HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    # Load and store both values of a pair together; separate loads and stores took seven times as
    # long.
    values = tl.arange(0, 2 * PADDED_HALF)
    pairs = tl.arange(0, PADDED_HALF)
    head_dim = 2 * HALF_DIM
    is_pair = pairs < HALF_DIM
    is_there = (head < heads + 2 * kv_heads)[:, None] & (values < head_dim)[None, :]
    source = (row * (heads + 2 * kv_heads) + head)[:, None] * head_dim + values[None, :]
    x = tl.load(qkv_ptr + source, mask=is_there, other=0.0)
    even, odd = tl.split(tl.reshape(widen(x), (BLOCK, PADDED_HALF, 2)))
    turn = rotation_ptr + row * head_dim + 2 * pairs
    # Values (v) are not rotated.
    is_turned = (head < heads + kv_heads)[:, None]
    cos = tl.where(is_turned, tl.load(turn, mask=is_pair, other=1.0)[None, :], 1.0)
    sin = tl.where(is_turned, tl.load(turn + 1, mask=is_pair, other=0.0)[None, :], 0.0)
    turned = tl.join(even * cos - odd * sin, even * sin + odd * cos)
    turned = round_to(tl.reshape(turned, (BLOCK, 2 * PADDED_HALF)), q_ptr.dtype.element_ty)
    to_q = (row * heads + head)[:, None] * head_dim + values[None, :]
    tl.store(q_ptr + to_q, turned, mask=is_there & (head < heads)[:, None])
    slots = tl.load(slots_ptr + row).to(tl.int64) + tl.zeros((BLOCK,), dtype=tl.int64)
    is_stored = is_there & (slots >= 0)[:, None]
    to_k = (slots * kv_heads + head - heads)[:, None] * head_dim + values[None, :]
    is_key = is_stored & ((head >= heads) & (head < heads + kv_heads))[:, None]
    tl.store(k_ptr + to_k, turned, mask=is_key)
    is_value = is_stored & (head >= heads + kv_heads)[:, None]
    tl.store(v_ptr + to_k - kv_heads * head_dim, turned, mask=is_value)
