"""Every kernel against plain torch on a GPU, at the shapes of gpt-oss-20b and gpt-oss-120b."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from nmoe_core.engine.kernels.decode_attention import Cached, decode_attention
from nmoe_core.engine.kernels.expert_product import DECODE, PREFILL, grouped_product
from nmoe_core.engine.kernels.expert_weights import DenseExperts, TiledExperts, tile_experts
from nmoe_core.engine.kernels.mixture import FusedExperts, combine
from nmoe_core.engine.kernels.prefill_attention import prefill_attention, query_blocks
from nmoe_core.engine.kernels.routing import choose_experts, route, sort_choices
from nmoe_core.engine.kernels.rows import add_rms_norm, rotate_and_store
from nmoe_core.engine.rope import rotate
from nmoe_core.engine.weights import mxfp4

pytestmark = pytest.mark.gpu
HIDDEN, HEADS, KV_HEADS, DIM, TOP_K = 2880, 64, 8, 64, 4
LIMIT, ALPHA = 7.0, 1.702
CUDA = "cuda"


def random_mxfp4(num_experts, rows, columns):
    """Packed weights, and the [E, N, K] bfloat16 values they stand for."""
    blocks = torch.randint(0, 256, (num_experts, rows, columns // 32, 16), dtype=torch.uint8)
    scales = torch.randint(117, 122, (num_experts, rows, columns // 32), dtype=torch.uint8)
    blocks, scales = blocks.to(CUDA), scales.to(CUDA)
    bias = torch.randn(num_experts, rows, device=CUDA)
    values = mxfp4.decode(blocks, scales, torch.bfloat16)
    return tile_experts(blocks, scales, bias), values


def dense(packed: TiledExperts, values: torch.Tensor) -> DenseExperts:
    return DenseExperts(values, packed.bias)


def swiglu(gate_up):
    gate, up = gate_up.chunk(2, -1)
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return (up + 1) * gate * torch.sigmoid(ALPHA * gate)


def assert_near(found, expected, share=0.01):
    """Bfloat16 results: by norm, since single values near zero have no relative error."""
    error = (found.float() - expected.float()).norm() / expected.float().norm()
    assert error < share, float(error)
    assert found.isfinite().all()


@pytest.mark.parametrize("num_experts", [32, 128])
@pytest.mark.parametrize("num_tokens", [1, 7, 64, 257])
@pytest.mark.parametrize("shape", [PREFILL, DECODE])
@pytest.mark.parametrize("is_packed", [True, False])
def test_grouped_products_at_real_shapes(num_experts, num_tokens, shape, is_packed):
    up, up_values = random_mxfp4(num_experts, 2 * HIDDEN, HIDDEN)
    down, down_values = random_mxfp4(num_experts, HIDDEN, HIDDEN)
    x = torch.randn(num_tokens, HIDDEN, device=CUDA, dtype=torch.bfloat16)
    plan = route(torch.randn(num_tokens, num_experts, device=CUDA), TOP_K, shape.rows)
    first = up if is_packed else dense(up, up_values)
    second = down if is_packed else dense(down, down_values)
    activated = grouped_product(x, first, plan, shape, (LIMIT, ALPHA))
    rows = grouped_product(activated, second, plan, shape)
    for expert in plan.experts.unique().tolist():
        places = plan.expert_starts[expert : expert + 2].tolist()
        choices = plan.sorted_choices[places[0] : places[1]].long()
        inputs = x[choices // TOP_K].float()
        expected = swiglu(inputs @ up_values[expert].float().T + up.bias[expert])
        here = activated[places[0] : places[1]]
        assert_near(here, expected)
        product = here.float() @ down_values[expert].float().T + down.bias[expert]
        assert_near(rows[choices], product * plan.weights.flatten()[choices, None])


def test_a_prefill_batch_of_a_mixture_is_that_of_plain_torch():
    num_tokens, num_experts = 2048, 32
    up, up_values = random_mxfp4(num_experts, 2 * HIDDEN, HIDDEN)
    down, down_values = random_mxfp4(num_experts, HIDDEN, HIDDEN)
    x, residual = torch.randn(2, num_tokens, HIDDEN, device=CUDA, dtype=torch.bfloat16)
    logits = torch.randn(num_tokens, num_experts, device=CUDA)
    found = FusedExperts(up, down, TOP_K, LIMIT, ALPHA)(x, logits, residual)
    values, experts = logits.topk(TOP_K)
    weights = values.softmax(-1)
    expected = torch.zeros(num_tokens, HIDDEN, device=CUDA)
    for expert in range(num_experts):
        tokens, place = (experts == expert).nonzero(as_tuple=True)
        inner = swiglu(x[tokens].float() @ up_values[expert].float().T + up.bias[expert])
        out = inner.bfloat16().float() @ down_values[expert].float().T + down.bias[expert]
        expected.index_add_(0, tokens, out * weights[tokens, place, None])
    assert_near(found, residual.float() + expected)


def test_mixture_results_are_the_same_bits_every_time():
    up, _ = random_mxfp4(32, 2 * HIDDEN, HIDDEN)
    down, _ = random_mxfp4(32, HIDDEN, HIDDEN)
    experts = FusedExperts(up, down, TOP_K, LIMIT, ALPHA)
    x, residual = torch.randn(2, 700, HIDDEN, device=CUDA, dtype=torch.bfloat16)
    logits = torch.randn(700, 32, device=CUDA)
    first = experts(x, logits, residual)
    assert all(torch.equal(experts(x, logits, residual), first) for _ in range(20))


def test_ten_thousand_random_routings_are_those_of_torch():
    generator = torch.Generator().manual_seed(0)
    for i in range(10_000):
        num_experts = (32, 128)[i % 2]
        num_tokens = int(torch.randint(1, 300, (), generator=generator))
        logits = torch.randn(num_tokens, num_experts, device=CUDA)
        if i % 3 == 0:  # all on a few experts
            logits[:, : num_experts - 5] -= 100.0
        weights, experts = choose_experts(logits, TOP_K)
        plan = sort_choices(weights, experts, num_experts, 16)
        values, expected = logits.topk(TOP_K)
        assert torch.equal(experts.long(), expected)
        torch.testing.assert_close(weights, values.softmax(-1))
        assert torch.equal(plan.sorted_choices.long(), experts.flatten().argsort(stable=True))
        counts = experts.flatten().bincount(minlength=num_experts)
        assert torch.equal(plan.expert_starts[1:].long(), counts.cumsum(0))


def attend(q, k, v, sinks, window):
    """float32 causal attention of one document: q [T, heads, D], k and v [T, kv_heads, D]."""
    length, group = len(q), q.shape[1] // k.shape[1]
    q, k, v = q.float(), *(x.float().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("thd,shd->hts", q, k) * q.shape[2] ** -0.5
    distance = torch.arange(length, device=CUDA)[:, None] - torch.arange(length, device=CUDA)
    hidden = (distance < 0) | (distance >= (window or length))
    scores = scores.masked_fill(hidden, -torch.inf)
    with_sink = torch.cat([scores, sinks[:, None, None].expand(-1, length, 1)], 2)
    return torch.einsum("hts,shd->thd", with_sink.softmax(2)[:, :, :-1], v)


@pytest.mark.parametrize("window", [None, 128])
def test_prefill_attention_over_ragged_documents(window):
    lengths = [4096, 1, 127, 128, 129, 0, 1000]
    num_rows = sum(lengths)
    q = torch.randn(num_rows, HEADS, DIM, device=CUDA, dtype=torch.bfloat16)
    k, v = torch.randn(2, num_rows, KV_HEADS, DIM, device=CUDA, dtype=torch.bfloat16)
    sinks = torch.randn(HEADS, device=CUDA)
    starts = torch.tensor([0, *lengths], device=CUDA).cumsum(0).int()
    found = prefill_attention(q, k, v, sinks, query_blocks(starts, num_rows), window)
    for first, length in zip(starts.tolist(), lengths, strict=False):
        if length:
            rows = slice(first, first + length)
            assert_near(found[rows], attend(q[rows], k[rows], v[rows], sinks, window))


@pytest.mark.parametrize("window", [None, 128])
def test_decode_attention_over_pages(window):
    page_size, lengths = 32, [1, 31, 32, 129, 4097, 8000]
    width = 8192 // page_size if window is None else window // page_size + 1
    num_pages = len(lengths) * width
    tables = torch.randperm(num_pages, device=CUDA).view(len(lengths), width).int()
    pages = torch.randn(2, num_pages, page_size, KV_HEADS, DIM, device=CUDA, dtype=torch.bfloat16)
    q = torch.randn(len(lengths), HEADS, DIM, device=CUDA, dtype=torch.bfloat16)
    sinks = torch.randn(HEADS, device=CUDA)
    sizes = torch.tensor(lengths, device=CUDA).int()
    found = decode_attention(q, *pages, Cached(tables, sizes, 8192), sinks, window)
    for i, length in enumerate(lengths):
        seen = torch.arange(max(0, length - (window or length)), length, device=CUDA)
        page = tables[i, seen // page_size % width].long()
        k, v = (x[page, seen % page_size].float().repeat_interleave(8, 1) for x in pages)
        scores = torch.einsum("hd,shd->hs", q[i].float(), k) * DIM**-0.5
        weights = torch.cat([scores, sinks[:, None]], 1).softmax(1)[:, :-1]
        assert_near(found[i], torch.einsum("hs,shd->hd", weights, v))


def test_rotation_norm_and_combine():
    qkv = torch.randn(300, (HEADS + 2 * KV_HEADS) * DIM, device=CUDA, dtype=torch.bfloat16)
    angles = torch.randn(300, DIM // 2, device=CUDA)
    table = torch.complex(angles.cos(), angles.sin())
    slots = torch.randperm(320, device=CUDA)[:300]
    pages = torch.zeros(2, 10, 32, KV_HEADS, DIM, device=CUDA, dtype=torch.bfloat16)
    q = rotate_and_store(qkv, table, slots, pages[0], pages[1])
    heads = qkv.unflatten(1, (-1, DIM))
    turned = rotate(heads[:, : HEADS + KV_HEADS], table)
    torch.testing.assert_close(q, turned[:, :HEADS], rtol=1e-2, atol=1e-2)
    stored = pages.view(2, 320, KV_HEADS, DIM)[:, slots]
    torch.testing.assert_close(stored[0], turned[:, HEADS:], rtol=1e-2, atol=1e-2)
    assert torch.equal(stored[1], heads[:, HEADS + KV_HEADS :])
    x, delta = torch.randn(2, 300, HIDDEN, device=CUDA, dtype=torch.bfloat16)
    weight = torch.randn(HIDDEN, device=CUDA)
    total, normalised = add_rms_norm(x, delta, weight, 1e-5)
    assert torch.equal(total, x + delta)
    expected = F.rms_norm(total.float(), (HIDDEN,), weight, 1e-5)
    torch.testing.assert_close(normalised, expected.bfloat16(), rtol=1e-2, atol=1e-2)
    rows = torch.randn(300 * TOP_K, HIDDEN, device=CUDA)
    assert_near(combine(rows, x), x.float() + rows.view(300, TOP_K, HIDDEN).sum(1))
