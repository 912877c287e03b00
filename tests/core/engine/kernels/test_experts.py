"""The kernels of the mixture of experts against plain torch, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nmoe_core.base.errors import CheckpointError
from nmoe_core.engine.kernels.expert_product import TileShape, grouped_product
from nmoe_core.engine.kernels.expert_weights import DenseExperts, tile_experts
from nmoe_core.engine.kernels.mixture import FusedExperts, combine
from nmoe_core.engine.kernels.routing import choose_experts, route, sort_choices
from nmoe_core.engine.weights import mxfp4

# Few, large programs: the interpreter pays for each.
TILE = TileShape(rows=16, columns=64, num_warps=4, num_stages=2)
LIMIT, ALPHA = 7.0, 1.702


def swiglu(gate_up):
    gate, up = gate_up.chunk(2, -1)
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return (up + 1) * gate * torch.sigmoid(ALPHA * gate)


def make_weights(num_experts, rows, columns, kind, generator):
    """Weights of a kind, and the float32 [E, N, K] they stand for."""
    values = torch.randn(num_experts, rows, columns, generator=generator) * columns**-0.5
    bias = torch.randn(num_experts, rows, generator=generator)
    if kind == "mxfp4":
        blocks, scales = mxfp4.encode(values)
        return tile_experts(blocks, scales, bias), mxfp4.decode(blocks, scales)
    weight = values.to(torch.bfloat16 if kind == "bf16" else torch.float32)
    return DenseExperts(weight, bias), weight.float()


@pytest.mark.parametrize(("num_tokens", "num_experts", "k"), [(1, 4, 4), (19, 5, 2), (40, 128, 4)])
def test_chosen_experts_and_weights_are_those_of_topk_and_softmax(num_tokens, num_experts, k):
    logits = torch.randn(num_tokens, num_experts, generator=torch.Generator().manual_seed(0))
    weights, experts = choose_experts(logits, k)
    values, expected = logits.topk(k)
    assert torch.equal(experts.long(), expected)
    torch.testing.assert_close(weights, values.softmax(-1))


def test_equal_logits_choose_the_lower_expert():
    _, experts = choose_experts(torch.zeros(2, 8), 3)
    assert experts.tolist() == [[0, 1, 2], [0, 1, 2]]


def test_logits_of_nan_keep_experts_in_range_and_give_weights_of_nan():
    logits = torch.zeros(2, 4)
    logits[1] = torch.nan
    weights, experts = choose_experts(logits, 2)
    assert weights[0].isfinite().all()
    assert weights[1].isnan().all()
    assert ((experts >= 0) & (experts < 4)).all()


@settings(max_examples=12)
@given(st.data())
def test_choices_are_sorted_stably_and_cut_into_tiles_of_one_expert(data):
    num_experts = data.draw(st.integers(1, 9), "experts")
    k = data.draw(st.integers(1, min(3, num_experts)), "k")
    chosen = data.draw(st.lists(st.integers(0, num_experts - 1), min_size=k, max_size=90), "chosen")
    experts = torch.tensor(chosen[: len(chosen) // k * k], dtype=torch.int32).view(-1, k)
    result = sort_choices(torch.ones(experts.shape), experts, num_experts, tile_rows=16)
    flat = experts.flatten()
    assert torch.equal(result.sorted_choices.long(), flat.argsort(stable=True))
    counts = flat.bincount(minlength=num_experts)
    assert result.expert_starts.tolist() == [0, *counts.cumsum(0).tolist()]
    expected = [
        (expert, int(result.expert_starts[expert]) + first)
        for expert in range(num_experts)
        for first in range(0, int(counts[expert]), 16)
    ]
    tiles = list(zip(result.tile_experts.tolist(), result.tile_starts.tolist(), strict=True))
    assert tiles[: len(expected)] == expected
    assert all(expert == -1 for expert, _ in tiles[len(expected) :])


def test_many_blocks_of_choices_are_sorted_as_one():
    generator = torch.Generator().manual_seed(1)
    experts = torch.randint(0, 5, (1100, 2), generator=generator, dtype=torch.int32)
    result = sort_choices(torch.ones(experts.shape), experts, 5, tile_rows=64)
    assert torch.equal(result.sorted_choices.long(), experts.flatten().argsort(stable=True))


@pytest.mark.parametrize("kind", ["mxfp4", "bf16", "fp32"])
@pytest.mark.parametrize("inputs", [96, 64])
def test_products_are_those_of_plain_torch(kind, inputs):
    generator = torch.Generator().manual_seed(2)
    num_tokens, num_experts, k, inner = 21, 4, 2, 96
    dtype = torch.float32 if kind == "fp32" else torch.bfloat16
    # Large enough that both limits cut.
    x = (4 * torch.randn(num_tokens, inputs, generator=generator)).to(dtype)
    up, up_values = make_weights(num_experts, 2 * inner, inputs, kind, generator)
    down, down_values = make_weights(num_experts, 40, inner, kind, generator)
    logits = torch.randn(num_tokens, num_experts, generator=generator)
    logits[:, 2] = -100.0  # nobody chooses it
    plan = route(logits, k, TILE.rows)
    activated = grouped_product(x, up, plan, TILE, (LIMIT, ALPHA))
    rows = grouped_product(activated, down, plan, TILE)
    tolerance = 1e-4 if kind == "fp32" else 2e-2
    for place, choice in enumerate(plan.sorted_choices.tolist()):
        token, expert = choice // k, int(plan.experts.flatten()[choice])
        assert expert != 2
        expected = swiglu(up_values[expert] @ x[token].float() + up.bias[expert])
        torch.testing.assert_close(
            activated[place].float(), expected, rtol=tolerance, atol=tolerance
        )
        product = down_values[expert] @ activated[place].float() + down.bias[expert]
        expected = product * plan.weights.flatten()[choice]
        torch.testing.assert_close(rows[choice], expected, rtol=1e-4, atol=1e-4)


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
    with pytest.raises(CheckpointError, match="scale byte 129"):
        tile_experts(blocks, torch.full((1, 1, 1), 129, dtype=torch.uint8), torch.zeros(1, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_combine_adds_experts_in_order_and_the_residual_last(dtype):
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(5 * 3, 70, generator=generator)
    residual = torch.randn(5, 70, generator=generator).to(dtype)
    in_order = rows.view(5, 3, 70)[:, 0]
    for j in (1, 2):
        in_order = in_order + rows.view(5, 3, 70)[:, j]
    assert torch.equal(combine(rows, residual), residual + in_order.to(dtype))


def test_a_token_s_bits_do_not_depend_on_its_batch():
    generator = torch.Generator().manual_seed(5)
    up, _ = make_weights(4, 64, 64, "mxfp4", generator)
    down, _ = make_weights(4, 64, 32, "mxfp4", generator)
    fused = FusedExperts(up, down, 2, LIMIT, ALPHA)
    x, residual = torch.randn(2, 20, 64, generator=generator)
    logits = torch.randn(20, 4, generator=generator)
    together = fused(x, logits, residual, batch_invariant=True)
    alone = fused(x[7:8], logits[7:8], residual[7:8], batch_invariant=True)
    assert torch.equal(together[7], alone[0])
