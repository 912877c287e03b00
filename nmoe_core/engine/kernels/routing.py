"""Routes rows to experts: top-k with softmax, and a stable counting sort without atomics.

The sort works on the flattened choices [T * k], in three launches. First, each program counts the
experts of one block. Then one program turns the counts into offsets and the list of row tiles.
Last, each program places the rows of its block. The host needs no size except T, so a CUDA graph
can contain all launches. A tile holds rows of only one expert. If logits are equal, the lower
expert is chosen.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nmoe_core.engine.transfers import on_its_device

_SORT_BLOCK = 128
_TOPK_BLOCK = 16
_TILES_BLOCK = 64
_OFFSETS_CHUNK = 16


@dataclass(frozen=True, slots=True)
class Routing:
    """Rows sorted by expert; R = T * k choices.

    weights: float32 [T, k], softmax over the chosen logits. experts: int32 [T, k], largest logit
    first. sorted_choices: int32 [R], flat choice (t * k + j) at each sorted position; choices of
    one expert keep their order. expert_starts: int32 [E + 1], first position of each expert.
    tile_experts, tile_starts: int32 [max_tiles], expert and first position of each tile of
    `tile_rows` rows; unused tiles have expert -1.
    """

    weights: Tensor
    experts: Tensor
    sorted_choices: Tensor
    expert_starts: Tensor
    tile_experts: Tensor
    tile_starts: Tensor
    tile_rows: int


@on_its_device
def choose_experts(logits: Tensor, experts_per_token: int) -> tuple[Tensor, Tensor]:
    """float32 weights and int32 experts, [T, k] each, from float32 logits [T, E]."""
    num_tokens, num_experts = logits.shape
    weights = torch.empty(num_tokens, experts_per_token, device=logits.device)
    experts = torch.empty_like(weights, dtype=torch.int32)
    if num_tokens:
        _choose_kernel[(triton.cdiv(num_tokens, _TOPK_BLOCK),)](
            logits.contiguous(), weights, experts, num_tokens, num_experts,
            TOP_K=experts_per_token, PADDED_K=triton.next_power_of_2(experts_per_token),
            PADDED_EXPERTS=triton.next_power_of_2(num_experts), BLOCK=_TOPK_BLOCK,
        )  # fmt: skip
    return weights, experts


@on_its_device
def sort_choices(weights: Tensor, experts: Tensor, num_experts: int, tile_rows: int) -> Routing:
    """Sort the choices [T, k] by expert and split each expert's rows into tiles."""
    device = experts.device
    num_choices = experts.numel()
    num_blocks = max(1, triton.cdiv(num_choices, _SORT_BLOCK))
    max_tiles = min(num_experts, num_choices) + num_choices // tile_rows
    padded = triton.next_power_of_2(num_experts)
    counts = torch.empty(num_blocks, padded, dtype=torch.int32, device=device)
    starts = torch.empty(num_experts + 1, dtype=torch.int32, device=device)
    tile_experts = torch.empty(max_tiles, dtype=torch.int32, device=device)
    tile_starts = torch.empty_like(tile_experts)
    sorted_choices = torch.empty(num_choices, dtype=torch.int32, device=device)
    shape = {"PADDED_EXPERTS": padded, "BLOCK": _SORT_BLOCK}
    _count_kernel[(num_blocks,)](experts, counts, num_choices, **shape)
    _offsets_kernel[(1,)](
        counts, starts, tile_experts, tile_starts, num_blocks, num_experts, max_tiles,
        TILE_ROWS=tile_rows, PADDED_EXPERTS=padded, CHUNK=_OFFSETS_CHUNK, BLOCK=_TILES_BLOCK,
    )  # fmt: skip
    _place_kernel[(num_blocks,)](experts, counts, sorted_choices, num_choices, **shape)
    return Routing(weights, experts, sorted_choices, starts, tile_experts, tile_starts, tile_rows)


@triton.jit
def _choose_kernel(
    logits_ptr, weights_ptr, experts_ptr,
    num_tokens, num_experts,
    TOP_K: tl.constexpr, PADDED_K: tl.constexpr, PADDED_EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.arange(0, PADDED_EXPERTS)
    places = tl.arange(0, PADDED_K)
    is_there = (tokens < num_tokens)[:, None] & (columns < num_experts)[None, :]
    pointers = logits_ptr + tokens[:, None] * num_experts + columns[None, :]
    raw = tl.load(pointers, mask=is_there, other=0.0)
    # If a row has NaN, its experts stay in range, and its weights are NaN, so that its result is
    # NaN too.
    poison = tl.sum(tl.where(raw != raw, raw, 0.0), axis=1)
    logits = tl.where(raw == raw, raw, -3.0e38)
    logits = tl.where((columns < num_experts)[None, :], logits, float("-inf"))
    chosen = tl.zeros((BLOCK, PADDED_K), dtype=tl.int32)
    values = tl.full((BLOCK, PADDED_K), float("-inf"), dtype=tl.float32)
    for place in tl.static_range(TOP_K):
        largest = tl.max(logits, axis=1)
        is_largest = logits == largest[:, None]
        expert = tl.min(tl.where(is_largest, columns[None, :], PADDED_EXPERTS), axis=1)
        is_place = places[None, :] == place
        chosen = tl.where(is_place, expert[:, None], chosen)
        values = tl.where(is_place, largest[:, None], values)
        logits = tl.where(columns[None, :] == expert[:, None], float("-inf"), logits)
    powers = tl.exp(values - tl.max(values, axis=1)[:, None])
    weights = powers / tl.sum(powers, axis=1)[:, None] + poison[:, None]
    is_out = (tokens < num_tokens)[:, None] & (places < TOP_K)[None, :]
    out = tokens[:, None] * TOP_K + places[None, :]
    tl.store(weights_ptr + out, weights, mask=is_out)
    tl.store(experts_ptr + out, chosen, mask=is_out)


@triton.jit
def _count_kernel(
    experts_ptr, counts_ptr, num_choices, PADDED_EXPERTS: tl.constexpr, BLOCK: tl.constexpr
):
    """counts[block, expert]: choices of the expert in the block."""
    block = tl.program_id(0)
    choices = block * BLOCK + tl.arange(0, BLOCK)
    columns = tl.arange(0, PADDED_EXPERTS)
    experts = tl.load(experts_ptr + choices, mask=choices < num_choices, other=-1)
    counts = tl.sum((experts[:, None] == columns[None, :]).to(tl.int32), axis=0)
    tl.store(counts_ptr + block * PADDED_EXPERTS + columns, counts)


@triton.jit
def _offsets_kernel(
    counts_ptr, starts_ptr, tile_experts_ptr, tile_starts_ptr,
    num_blocks, num_experts, max_tiles,
    TILE_ROWS: tl.constexpr, PADDED_EXPERTS: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Replace counts by the first position of (block, expert); write expert starts and the tile
    list."""
    columns = tl.arange(0, PADDED_EXPERTS)
    rows = tl.arange(0, CHUNK)
    totals = tl.zeros((PADDED_EXPERTS,), dtype=tl.int32)
    for first in range(0, num_blocks, CHUNK):
        pointers, is_there = _chunk(counts_ptr, first + rows, columns, num_blocks, PADDED_EXPERTS)
        totals += tl.sum(tl.load(pointers, mask=is_there, other=0), axis=0)
    starts = tl.cumsum(totals, axis=0) - totals
    tl.store(starts_ptr + columns, starts, mask=columns < num_experts)
    tl.store(starts_ptr + num_experts, tl.sum(totals, axis=0))
    running = starts
    for first in range(0, num_blocks, CHUNK):
        pointers, is_there = _chunk(counts_ptr, first + rows, columns, num_blocks, PADDED_EXPERTS)
        counts = tl.load(pointers, mask=is_there, other=0)
        earlier = tl.cumsum(counts, axis=0) - counts
        tl.store(pointers, running[None, :] + earlier, mask=is_there)
        running += tl.sum(counts, axis=0)
    tiles = (totals + TILE_ROWS - 1) // TILE_ROWS
    tile_ends = tl.cumsum(tiles, axis=0)
    num_tiles = tl.sum(tiles, axis=0)
    for first in range(0, max_tiles, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        expert = tl.sum((ids[:, None] >= tile_ends[None, :]).to(tl.int32), axis=1)
        is_expert = columns[None, :] == expert[:, None]
        before = tl.sum(tl.where(is_expert, (tile_ends - tiles)[None, :], 0), axis=1)
        start = tl.sum(tl.where(is_expert, starts[None, :], 0), axis=1)
        is_real = ids < num_tiles
        tl.store(tile_experts_ptr + ids, tl.where(is_real, expert, -1), mask=ids < max_tiles)
        place = start + (ids - before) * TILE_ROWS
        tl.store(tile_starts_ptr + ids, tl.where(is_real, place, 0), mask=ids < max_tiles)


@triton.jit
def _chunk(counts_ptr, blocks, columns, num_blocks, PADDED_EXPERTS: tl.constexpr):
    """Pointers and mask of the counts of blocks, [blocks, experts]."""
    pointers = counts_ptr + blocks[:, None] * PADDED_EXPERTS + columns[None, :]
    return pointers, (blocks < num_blocks)[:, None] & (columns >= 0)[None, :]


@triton.jit
def _place_kernel(
    experts_ptr, firsts_ptr, sorted_ptr,
    num_choices,
    PADDED_EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write each choice of a block to its position, after the earlier choices of the same
    expert."""
    block = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    choices = block * BLOCK + lanes
    is_there = choices < num_choices
    experts = tl.load(experts_ptr + choices, mask=is_there, other=0)
    others = tl.load(experts_ptr + choices, mask=is_there, other=-1)
    is_before = (others[None, :] == experts[:, None]) & (lanes[None, :] < lanes[:, None])
    rank = tl.sum(is_before.to(tl.int32), axis=1)
    first = tl.load(firsts_ptr + block * PADDED_EXPERTS + experts, mask=is_there, other=0)
    tl.store(sorted_ptr + first + rank, choices, mask=is_there)
