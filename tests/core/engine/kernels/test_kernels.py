"""Every kernel against plain torch, in Triton's interpreter."""

from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nmoe_core.engine.experts import Chosen
from nmoe_core.engine.kernels import block
from nmoe_core.engine.kernels.attention import Cached, decode_attention, query_blocks
from nmoe_core.engine.kernels.block import FusedExperts, combine
from nmoe_core.engine.kernels.expert_product import (
    DECODE,
    DenseExperts,
    TileShape,
    grouped_product,
    splits_for,
    tile_experts,
    tile_for,
)
from nmoe_core.engine.kernels.routing import choose_experts, sort_choices
from nmoe_core.engine.weights import mxfp4
from tests.gpu import checks
from tests.gpu.checks import random_experts
from tests.refusals import refused

HEADS = 4, 2, 16
FLOAT32, BFLOAT16 = (torch.empty(0, dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
# Few, large programs: the interpreter pays for each.
TILE = TileShape(rows=16, columns=64, num_warps=4, num_stages=2)


@pytest.mark.parametrize("window", [None, 1, 10, 15, 16, 18, 33, 45])
@pytest.mark.parametrize(
    ("lengths", "key_lengths", "like"),
    [
        ([1, 0, 35], None, FLOAT32),
        ([3, 20], [40, 20], FLOAT32),
        ([2, 18], [80, 48], FLOAT32),  # blocks of 16 keys that the last queries see whole, or not
        ([3], [33], FLOAT32),
        ([18], None, BFLOAT16),
    ],
    ids=["whole", "last queries", "interior", "edge", "bfloat16"],
)
def test_packed_documents_attend_to_themselves_alone(window, lengths, key_lengths, like):
    checks.check_prefill(HEADS, lengths, window, like, key_lengths)


def test_query_blocks_cover_every_document_once():
    lengths = [5, 0, 16, 33]
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    blocks = query_blocks(starts, sum(lengths))
    pairs = list(zip(blocks.documents.tolist(), blocks.firsts.tolist(), strict=True))
    assert [p for p in pairs if p[0] >= 0] == [(0, 0), (2, 0), (3, 0), (3, 16), (3, 32)]


@pytest.mark.parametrize(
    ("window", "lengths", "width"),
    [(None, [1, 40, 0, 23], 6), (16, [15, 16, 17, 90], 3), (None, [70], 9)],
)
def test_decoding_reads_the_pages_of_each_sequence(window, lengths, width):
    checks.check_decode(HEADS, lengths, width, window, 8, FLOAT32)


def test_a_sequence_decodes_to_the_same_bits_in_any_batch():
    q, pages, tables, sizes, sinks = checks.paged(HEADS, [33, 60], 10, 8, FLOAT32)
    both, alone = (
        decode_attention(q[:n], *pages, Cached(tables[:n], sizes[:n], longest), sinks, None)
        for n, longest in ((2, 80), (1, 33))
    )
    assert torch.equal(both[0], alone[0])


@pytest.mark.parametrize("like", [FLOAT32, BFLOAT16], ids=str)
def test_rows_are_rotated_stored_added_normalised_and_combined(like):
    checks.check_rotation(HEADS, 5, like)
    x, delta = torch.randn(2, 3, 100).to(like)
    for added in (None, delta):
        checks.check_norm(x, added)
    # Experts are added in order, and the residual last.
    rows, residual = torch.randn(5, 3, 70), torch.randn(5, 70).to(like)
    in_order = rows[:, 0] + rows[:, 1] + rows[:, 2]
    assert torch.equal(combine(rows.flatten(0, 1)[None], residual), residual + in_order.to(like))
    parts = torch.randn(3, 10, 70)
    of_each = ((parts[0] + parts[1]) + parts[2]).view(5, 2, 70)
    in_order = of_each[:, 0] + of_each[:, 1]
    assert torch.equal(combine(parts, residual), residual + in_order.to(like))


@pytest.mark.parametrize(("num_tokens", "num_experts", "k"), [(1, 4, 4), (19, 5, 2), (40, 128, 4)])
def test_chosen_experts_and_weights_are_those_of_topk_and_softmax(num_tokens, num_experts, k):
    checks.check_routing(torch.randn(num_tokens, num_experts), k)


def test_equal_logits_choose_the_lower_expert_and_nan_gives_weights_of_nan():
    logits = torch.zeros(2, 8)
    logits[1] = torch.nan
    weights, experts = choose_experts(logits, 3)
    assert experts[0].tolist() == [0, 1, 2]
    assert weights[0].isfinite().all()
    assert weights[1].isnan().all()
    assert ((experts >= 0) & (experts < 8)).all()


@settings(max_examples=12)
@given(st.data())
def test_choices_are_sorted_stably_and_cut_into_tiles_of_one_expert(data):
    num_experts = data.draw(st.integers(1, 9), "experts")
    k = data.draw(st.integers(1, min(3, num_experts)), "k")
    chosen = data.draw(st.lists(st.integers(0, num_experts - 1), min_size=k, max_size=90), "chosen")
    experts = torch.tensor(chosen[: len(chosen) // k * k], dtype=torch.int32).view(-1, k)
    checks.check_sorted(experts, num_experts, 16)


def test_many_blocks_of_choices_are_sorted_as_one():
    checks.check_sorted(torch.randint(0, 5, (1100, 2), dtype=torch.int32), 5, 64)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("inputs", [96, 64])
def test_products_are_those_of_plain_torch(dtype, inputs):
    # Large enough that both limits cut.
    x = 4 * torch.randn(21, inputs)
    logits = torch.randn(21, 4)
    logits[:, 2] = -100.0  # an expert without rows
    up, down = random_experts(4, 192, inputs, dtype=dtype), random_experts(4, 40, 96, dtype=dtype)
    checks.check_products(x.to(dtype or torch.bfloat16), logits, up, down, 2, TILE)


@pytest.mark.parametrize("dtype", [None, torch.float32], ids=str)
@pytest.mark.parametrize("splits", [2, 3, 4])  # of five tiles of inputs: uneven, and one with none
def test_a_product_in_splits_adds_up_to_that_of_plain_torch(dtype, splits):
    x, logits = torch.randn(5, 64), torch.randn(5, 4)
    up, down = random_experts(4, 640, 64, dtype=dtype), random_experts(4, 40, 320, dtype=dtype)
    checks.check_products(x.to(dtype or torch.bfloat16), logits, up, down, 2, TILE, splits)


def test_a_small_batch_of_a_mixture_is_split_and_near_what_it_is_unsplit(monkeypatch):
    product = Mock(wraps=grouped_product)
    monkeypatch.setattr(block, "grouped_product", product)
    (up, _), (down, _) = random_experts(2, 2048, 32), random_experts(2, 48, 1024)
    fused = FusedExperts(up, down, checks.LIMIT, checks.ALPHA)
    x, residual = torch.randn(1, 32), torch.randn(1, 48)
    chosen = Chosen(*choose_experts(torch.randn(1, 2), 2))
    split, unsplit = (fused(x, chosen, residual, invariant) for invariant in (False, True))
    assert [call.kwargs.get("splits") for call in product.call_args_list] == [None, 2, None, 1]
    torch.testing.assert_close(split, unsplit, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("batch", "splits"), [(1, 5), (8, 5), (16, 1), (70, 1)])
def test_splits_follow_from_the_number_of_programs_of_a_batch(batch, splits):
    """At the shapes of gpt-oss-20b: 32 experts, four a token, 2,880 inputs and outputs."""
    logits = torch.randn(batch, 32)
    tile = tile_for(4 * batch, 32, torch.bfloat16)
    plan = sort_choices(*choose_experts(logits, 4), 32, tile.rows)
    weights = DenseExperts(torch.empty(32, 1, 1).expand(32, 2880, 2880), torch.empty(32, 2880))
    assert splits_for(plan, weights, tile) == splits


def test_every_code_and_scale_is_decoded_exactly():
    """One input at a time is one, so an output is a weight, whatever its code and scale."""
    scales = torch.tensor([0, 1, 60, 126, 127, 128], dtype=torch.uint8)
    codes = torch.arange(16, dtype=torch.uint8)
    blocks = (codes | (codes.roll(5) << 4)).expand(6, 1, 1, 16)
    packed = tile_experts(blocks, scales.view(6, 1, 1), torch.zeros(6, 1))
    expected = mxfp4.decode(blocks, scales.view(6, 1, 1))
    tile = TileShape(rows=16, columns=16, num_warps=4, num_stages=2)
    experts = torch.arange(6, dtype=torch.int32).repeat_interleave(32).view(-1, 1)
    plan = sort_choices(torch.ones(experts.shape), experts, 6, tile.rows)
    rows = grouped_product(torch.eye(32).repeat(6, 1), packed, plan, tile)
    assert torch.equal(rows.view(6, 32), expected[:, 0])


def test_scales_beyond_what_the_kernels_take_are_refused():
    blocks = torch.zeros(1, 1, 1, 16, dtype=torch.uint8)
    with refused("E-CHECKPOINT-SCALE", "scale byte 129"):
        tile_experts(blocks, torch.full((1, 1, 1), 129, dtype=torch.uint8), torch.zeros(1, 1))


def test_a_token_s_bits_do_not_depend_on_its_batch(monkeypatch):
    monkeypatch.setattr(np, "matmul", product_of_a_tile)  # the interpreter's
    (up, _), (down, _) = random_experts(4, 64, 256), random_experts(4, 64, 32)
    fused = FusedExperts(up, down, checks.LIMIT, checks.ALPHA)
    x, residual = torch.randn(80, 256), torch.randn(80, 64)
    weights, experts = choose_experts(torch.randn(80, 4), 2)
    together = fused(x, Chosen(weights, experts), residual, batch_invariant=True)
    one = Chosen(weights[7:8], experts[7:8])
    alone = fused(x[7:8], one, residual[7:8], batch_invariant=True)
    assert torch.equal(together[7], alone[0])


def product_of_a_tile(a, b, dtype=None):
    """a [M, K] by b [K, N] as a GPU adds them up: each row by itself, in an order that may differ
    between tile shapes. Rows of numpy's own product depend on each other on some processors."""
    order = slice(None, None, 1 if len(a) <= DECODE.rows else -1)
    return np.stack([(row[:, None] * b)[order].sum(0, dtype=dtype) for row in a])
