"""Matrices in int8: exact sums, the same row in any batch, near the model in float32."""

from pathlib import Path

import pytest
import torch

from nmoe_core.base.settings import expert_fingerprints
from nmoe_core.engine import Transformer, make_tiny_checkpoint
from nmoe_core.engine.packing import Int8Matrix
from tests.core.engine.builders import make_generator
from tests.refusals import refused


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2, which has biases."""
    path = tmp_path_factory.mktemp("int8")
    return make_tiny_checkpoint(path, family="qwen2", vocab_size=300)


def test_a_product_is_the_exact_sum_of_the_rounded_numbers() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(24, 64, generator=generator)
    x = torch.randn(5, 64, generator=generator) * torch.tensor([[1e-3], [1], [50], [1e4], [0]])
    bias = torch.randn(24, generator=generator)
    found = Int8Matrix(weight).product(x, bias)
    steps = x.abs().amax(1, keepdim=True).double() / 127
    scales = weight.abs().amax(1).double() / 127
    numbers = (x / steps.clamp(min=1e-30)).round()
    wanted = (numbers @ (weight / scales[:, None]).round().T) * steps * scales + bias
    assert torch.allclose(found.double(), wanted, rtol=1e-5, atol=1e-5)


def test_states_and_logits_are_near_those_in_float32_and_do_not_depend_on_the_batch(
    checkpoint: Path,
) -> None:
    exact = Transformer.from_checkpoint(checkpoint)
    model = Transformer.from_checkpoint(checkpoint, moe_backend="int8")
    ids = torch.randint(0, 300, (3, 40), generator=torch.Generator().manual_seed(1))
    lengths = torch.tensor([40, 3, 17])
    logits, states = model(ids, lengths, return_hidden_states=(4,))
    alone, own = model(ids[2:, :17], return_hidden_states=(4,))
    assert torch.equal(states[4][2, :17], own[4][0])
    assert torch.equal(logits[2, :17], alone[0])
    _, wanted = exact(ids, lengths, return_hidden_states=(4,))
    error = (states[4] - wanted[4]).norm() / wanted[4].norm()
    assert 0 < error < 0.05
    sizes = [sum(one.nbytes for one in m.blocks.parameters()) for m in (model, exact)]
    assert sizes[0] < 0.3 * sizes[1]
    assert expert_fingerprints(model.runtime.experts.name) == {"experts": "int8"}


def test_cached_steps_give_the_tokens_of_the_whole_forward_pass(checkpoint: Path) -> None:
    model = Transformer.from_checkpoint(checkpoint, moe_backend="int8")
    prompt = [5, 9, 200, 41, 7]
    tokens = list(prompt)
    for _ in range(12):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    generator = make_generator(model)
    (found,) = generator.generate_batch([prompt], max_tokens=12, temperature=0.0)
    assert found == tokens[len(prompt) :]


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
def test_a_family_with_experts_is_refused(tmp_path: Path, family: str) -> None:
    path = make_tiny_checkpoint(tmp_path, family=family, vocab_size=300)
    with refused("E-CONFIG-EXPERTS", naming=["int8", family]):
        Transformer.from_checkpoint(path, moe_backend="int8")


def test_another_dtype_is_refused(checkpoint: Path) -> None:
    with refused("E-CONFIG-EXPERTS", naming=["torch.float32 on cpu"]):
        Transformer.from_checkpoint(checkpoint, dtype=torch.bfloat16, moe_backend="int8")
