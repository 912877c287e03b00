"""Every kernel against plain torch on a GPU, at the shapes of gpt-oss-20b and gpt-oss-120b."""

import pytest
import torch

from nmoe_core.engine.experts import Chosen
from nmoe_core.engine.kernels.block import FusedExperts, combine
from nmoe_core.engine.kernels.expert_product import DECODE, PREFILL
from nmoe_core.engine.kernels.routing import choose_experts
from tests.gpu import checks
from tests.gpu.checks import ALPHA, LIMIT, assert_near, random_experts, swiglu

pytestmark = pytest.mark.gpu
HIDDEN, TOP_K = 2880, 4
HEADS = 64, 8, 64
CUDA = "cuda"


@pytest.fixture
def like() -> torch.Tensor:
    return torch.empty(0, device=CUDA, dtype=torch.bfloat16)


@pytest.mark.parametrize("num_experts", [32, 128])
@pytest.mark.parametrize("num_tokens", [1, 7, 64, 257])
@pytest.mark.parametrize("tile", [PREFILL, DECODE])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_grouped_products_at_real_shapes(num_experts, num_tokens, tile, dtype):
    up = random_experts(num_experts, 2 * HIDDEN, HIDDEN, CUDA, dtype)
    down = random_experts(num_experts, HIDDEN, HIDDEN, CUDA, dtype)
    x = torch.randn(num_tokens, HIDDEN, device=CUDA, dtype=torch.bfloat16)
    logits = torch.randn(num_tokens, num_experts, device=CUDA)
    for splits in (1, 3) if tile is DECODE else (1,):
        checks.check_products(x, logits, up, down, TOP_K, tile, splits)


def test_a_prefill_batch_of_a_mixture_is_that_of_plain_torch():
    num_tokens, num_experts = 2048, 32
    up, up_values = random_experts(num_experts, 2 * HIDDEN, HIDDEN, CUDA)
    down, down_values = random_experts(num_experts, HIDDEN, HIDDEN, CUDA)
    x, residual = torch.randn(2, num_tokens, HIDDEN, device=CUDA, dtype=torch.bfloat16)
    logits = torch.randn(num_tokens, num_experts, device=CUDA)
    fused, chosen = FusedExperts(up, down, LIMIT, ALPHA), Chosen(*choose_experts(logits, TOP_K))
    found = fused(x, chosen, residual)
    values, experts = logits.topk(TOP_K)
    weights = values.softmax(-1)
    expected = torch.zeros(num_tokens, HIDDEN, device=CUDA)
    for expert in range(num_experts):
        tokens, place = (experts == expert).nonzero(as_tuple=True)
        inner = swiglu(x[tokens].float() @ up_values[expert].float().T + up.bias[expert])
        out = inner.bfloat16().float() @ down_values[expert].float().T + down.bias[expert]
        expected.index_add_(0, tokens, out * weights[tokens, place, None])
    assert_near(found, residual.float() + expected)
    assert all(torch.equal(fused(x, chosen, residual), found) for _ in range(20))


def test_ten_thousand_random_routings_are_those_of_torch():
    generator = torch.Generator().manual_seed(0)
    for i in range(10_000):
        num_experts = (32, 128)[i % 2]
        num_tokens = int(torch.randint(1, 300, (), generator=generator))
        logits = torch.randn(num_tokens, num_experts, device=CUDA)
        if i % 3 == 0:  # all on a few experts
            logits[:, : num_experts - 5] -= 100.0
        checks.check_routing(logits, TOP_K)


@pytest.mark.parametrize("window", [None, 128])
def test_attention_over_ragged_documents_and_over_pages(like, window):
    checks.check_prefill(HEADS, [4096, 1, 127, 128, 129, 0, 1000], window, like)
    width = 8192 // 32 if window is None else window // 32 + 1
    checks.check_decode(HEADS, [1, 31, 32, 129, 4097, 8000], width, window, 32, like)


def test_rotation_norm_and_combine(like):
    checks.check_rotation(HEADS, 300, like)
    x, delta = torch.randn(2, 300, HIDDEN).to(like)
    checks.check_norm(x, delta)
    rows = torch.randn(300 * TOP_K, HIDDEN, device=CUDA)
    assert_near(combine(rows[None], x), x.float() + rows.view(300, TOP_K, HIDDEN).sum(1))
