"""Experts: MXFP4 exactly, the mixture against its definition, and what it may not depend on."""

from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor

from nmoe_core.engine import (
    BatchedGenerator,
    GeneratorOptions,
    ModelConfig,
    Transformer,
    make_tiny_checkpoint,
)
from nmoe_core.engine.backend import with_experts
from nmoe_core.engine.block import PLAIN, MixtureOfExperts
from nmoe_core.engine.experts import PLAIN_EXPERTS, RUN_ROWS
from nmoe_core.engine.grouped import GROUPED
from nmoe_core.engine.weights import mxfp4
from nmoe_core.engine.weights.checkpoint import open_checkpoint
from nmoe_core.engine.weights.families import FAMILIES
from nmoe_core.engine.weights.mxfp4 import PackedExperts
from tests.core.engine.builders import SMALL
from tests.refusals import refused

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def test_every_byte_under_every_scale_decodes_exactly():
    # [256 scales, 16 groups, 16 bytes]: row s holds the 256 bytes in order under scale s.
    byte = torch.arange(256, dtype=torch.uint8)
    blocks, scales = byte.view(1, 16, 16).repeat(256, 1, 1), byte.view(256, 1).repeat(1, 16)
    decoded = mxfp4.decode(blocks, scales)
    codes = np.array([[E2M1[byte & 15], E2M1[byte >> 4]] for byte in range(256)])
    with np.errstate(over="ignore"):
        expected = codes.reshape(1, 512) * 2.0 ** (np.arange(255) - 127.0)[:, None]
        expected = expected.astype(np.float32)
    assert np.array_equal(decoded[:255].numpy(), expected)
    assert np.isfinite(expected[:253]).all()
    assert decoded[255].isnan().all()
    in_bfloat16 = mxfp4.decode(blocks, scales, torch.bfloat16)
    assert torch.equal(in_bfloat16[:255].float(), decoded[:255])


def test_shapes_that_do_not_belong_together_are_refused():
    with pytest.raises(ValueError, match="does not match"):
        mxfp4.decode(torch.zeros(2, 1, 16, dtype=torch.uint8), torch.zeros(1, 1).byte())
    with pytest.raises(ValueError, match="complete groups"):
        mxfp4.encode(torch.zeros(4, 33))


def test_encoding_picks_the_nearest_value_and_ties_go_to_the_even_code():
    grid = torch.arange(-96, 97) / 16
    for start in range(0, len(grid) - 31, 31):
        group = torch.cat([grid[start : start + 31], torch.tensor([6.0])])
        decoded = mxfp4.decode(*mxfp4.encode(group[None]))[0]
        for value, got in zip(group.tolist(), decoded.tolist(), strict=True):
            code = min(range(8), key=lambda c, value=value: (abs(abs(value) - E2M1[c]), c % 2))
            assert got == np.copysign(E2M1[code], value)


def test_decoded_values_encode_back_to_themselves_over_the_whole_range():
    generator = torch.Generator().manual_seed(1)
    powers = torch.randint(-120, 120, (64, 2, 1), generator=generator)
    values = torch.randn(64, 2, 32, generator=generator) * torch.exp2(powers.float())
    decoded = mxfp4.decode(*mxfp4.encode(values.flatten(1)))
    assert torch.equal(mxfp4.decode(*mxfp4.encode(decoded)), decoded)
    error = (decoded.view(64, 2, 32) - values).abs().amax(-1)
    assert bool((error <= values.abs().amax(-1) * 0.26).all())
    # Zeros and denormals have a scale too.
    blocks, scales = mxfp4.encode(torch.tensor([[0.0] * 32 + [2.0**-140] * 32]))
    assert scales.tolist() == [[0, 0]]
    assert mxfp4.decode(blocks, scales).abs().max() == 0


@pytest.fixture(params=[PLAIN_EXPERTS, GROUPED], ids=["plain", "grouped"])
def mixture(request, small_config: ModelConfig, make_checkpoint) -> MixtureOfExperts:
    """Six experts, two per token, hidden 32, intermediate 64."""
    with open_checkpoint(make_checkpoint(small_config)) as checkpoint:
        return MixtureOfExperts(small_config, checkpoint.layer(0, torch.float32), request.param)


def _by_definition(mixture: MixtureOfExperts, x: Tensor) -> Tensor:
    """Every expert on every row in float64, then the sum over the two largest logits."""
    x, stacks = x.double(), mixture.experts
    logits = x @ mixture.router_weight.double().T + mixture.router_bias.double()
    result = torch.zeros_like(x)
    for row, (values, experts) in enumerate(zip(*logits.topk(2, dim=-1), strict=True)):
        for weight, expert in zip(torch.softmax(values, 0), experts.tolist(), strict=True):
            both = stacks.gate_up.matrix(expert).double() @ x[row]
            gate, up = (both + stacks.gate_up_bias[expert].double()).chunk(2)
            gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
            inner = (up + 1) * gate / (1 + torch.exp(-1.702 * gate))
            out = stacks.down.matrix(expert).double() @ inner + stacks.down_bias[expert].double()
            result[row] += weight * out
    return result


@pytest.mark.parametrize("num_rows", [1, 5, 40, 4 * RUN_ROWS])
@pytest.mark.parametrize("min_rows", [1, 16])
def test_rows_are_the_weighted_sum_of_their_experts(mixture, num_rows: int, min_rows: int):
    x, residual = torch.randn(2, num_rows, 32, generator=torch.Generator().manual_seed(num_rows))
    batching = SimpleNamespace(min_rows=min_rows, batch_invariant=False)
    with torch.inference_mode():
        found, none = mixture(x, residual, batching), mixture(x[:0], residual[:0], batching)
    expected = residual.double() + _by_definition(mixture, x)
    torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=1e-5)
    assert none.shape == (0, 32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_experts_give_the_same_bits_in_less_memory(tiny_dir, dtype: torch.dtype):
    ids = torch.arange(60).view(2, 30)
    decoded = Transformer.from_checkpoint(tiny_dir, dtype=dtype)
    packed = Transformer.from_checkpoint(tiny_dir, dtype=dtype, moe_backend="packed")
    assert torch.equal(packed(ids), decoded(ids))
    stack = packed.blocks[0].get_submodule("mlp").experts.gate_up
    assert isinstance(stack, PackedExperts)
    stored = sum(parameter.nbytes for parameter in stack.parameters())
    assert stored * 8 == 4.25 * 8 * 128 * 64


def test_only_the_experts_of_a_batch_are_decoded(tiny_dir, monkeypatch: pytest.MonkeyPatch):
    packed = Transformer.from_checkpoint(tiny_dir, moe_backend="packed")
    decode = Mock(wraps=mxfp4.decode)
    monkeypatch.setattr(mxfp4, "decode", decode)
    packed(torch.tensor([[5]]))
    # Four blocks, two experts per token, two matrices each.
    assert decode.call_count == 4 * 2 * 2


def test_experts_that_are_not_mxfp4_cannot_stay_packed(small_config, make_checkpoint):
    directory = make_checkpoint(small_config)
    with refused("E-CONFIG-EXPERTS", r"layers\.0\.mlp\.experts.*only MXFP4"):
        Transformer.from_checkpoint(directory, moe_backend="packed")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
def test_grouped_products_give_the_model_s_numbers_to_rounding(tmp_path, family, dtype):
    directory = make_tiny_checkpoint(tmp_path / "checkpoint", family=family, vocab_size=300)
    ids = torch.randint(0, 300, (3, 40), generator=torch.Generator().manual_seed(0))
    own, grouped = (
        Transformer.from_checkpoint(directory, dtype=dtype, moe_backend=experts)(ids)
        for experts in ("decoded", "grouped")
    )
    # In bfloat16 a rounding may choose another expert, which moves that row and those after it.
    distances = (own - grouped).norm(dim=-1) / own.norm(dim=-1)
    assert distances.median() <= (1e-5 if dtype == torch.float32 else 0.03)


def test_grouped_products_keep_the_promise_of_batch_invariance(tiny_dir):
    model = Transformer.from_checkpoint(tiny_dir, moe_backend="grouped")
    own = Transformer.from_checkpoint(tiny_dir)
    options = GeneratorOptions(batch_invariant=True)
    found = []
    for each in (own, model):
        generator = BatchedGenerator(each, 64, 2, options=options)
        generator.add([5, 6, 7], 4)
        found.append(generator.step()[0])
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("family", "device", "dtype"),
    [("llama", "cpu", torch.float32), ("gpt_oss", "cuda", torch.float32)],
)
def test_a_model_without_grouped_products_is_refused(family, device, dtype):
    config = replace(SMALL, family=next(f for f in FAMILIES if f.model_type == family))
    with refused("E-CONFIG-EXPERTS", "does not support this model on this device"):
        with_experts(PLAIN, "grouped", config, torch.device(device), dtype, is_packed=False)
