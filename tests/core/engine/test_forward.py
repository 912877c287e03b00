"""The forward pass: padding, batches, windows, stopping early and going on, refusals."""

import dataclasses
import platform
import re
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from nmoe_core.engine import ModelConfig, Residual, Transformer, attention
from nmoe_core.engine.attention import attend
from nmoe_core.engine.packing import linear
from tests.refusals import refused

# The same document in another batch; with MKL on x86 the difference was 0 wherever measured.
SAME = 1e-5
LENGTHS = torch.tensor([1, 33, 16, 80, 17])


def _ids(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 300, shape, generator=torch.Generator().manual_seed(seed))


def _calls(modules: nn.ModuleList) -> list[int]:
    """Numbers of the blocks that run from now on, from 1."""
    seen: list[int] = []
    for number, module in enumerate(modules, 1):
        module.register_forward_hook(lambda *_, number=number: seen.append(number))
    return seen


@pytest.fixture
def fresh_model(tiny_dir) -> Transformer:
    """A model a test may hook."""
    return Transformer.from_checkpoint(tiny_dir)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_document_has_the_same_bits_alone_and_in_any_batch(tiny_dir, dtype: torch.dtype):
    """So features of training and of grading are the same; seen with MKL and oneDNN on x86."""
    model = Transformer.from_checkpoint(tiny_dir, dtype=dtype)
    is_exact = platform.machine() in ("x86_64", "AMD64")
    tolerance = 0 if is_exact else SAME if dtype == torch.float32 else 0.1

    def assert_same(found: Tensor, expected: Tensor) -> None:
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)

    ids, order = _ids(7, 80, seed=5), torch.tensor([6, 2, 3])
    lengths = torch.tensor([1, 33, 16, 80, 17, 64, 65])
    logits, hidden = model(ids, lengths, return_hidden_states=(3, 4))
    _, reordered = model(ids[order], lengths[order], return_hidden_states=(4,))
    for row, document in enumerate(order.tolist()):
        assert_same(reordered[4][row], hidden[4][document])
    for document, length in enumerate(lengths.tolist()):
        alone, states = model(ids[document : document + 1, :length], return_hidden_states=(3, 4))
        assert_same(alone[0], logits[document, :length])
        for tap in (3, 4):
            assert_same(states[tap][0], hidden[tap][document, :length])


def test_a_windowed_block_takes_no_keys_before_its_window(tiny_model, monkeypatch):
    block = Mock(wraps=attention._attend_block)
    monkeypatch.setattr(attention, "_attend_block", block)
    tiny_model(_ids(1, 65), return_hidden_states=(2,), no_logits=True)
    shapes = [(call.args[0].shape[2], call.args[1].shape[2]) for call in block.call_args_list]
    # Window 16, then all: 15 positions before a block of 64 are seen, or every one.
    assert shapes == [(64, 64), (64, 79), (64, 64), (64, 128)]


def test_padding_is_neither_read_nor_computed_nor_returned(fresh_model: Transformer):
    ids = _ids(5, 80)
    is_pad = torch.arange(80) >= LENGTHS[:, None]
    num_rows: list[int] = []
    for block in fresh_model.blocks:
        experts = block.get_submodule("mlp")
        experts.register_forward_hook(lambda _, args, __: num_rows.append(len(args[0])))
    logits, hidden = fresh_model(ids, LENGTHS, return_hidden_states=(2,))
    assert num_rows == [int(LENGTHS.sum())] * 4
    assert fresh_model.tokens_processed == int(LENGTHS.sum())
    again, hidden_again = fresh_model(
        ids.masked_fill(is_pad, -7), LENGTHS, return_hidden_states=(2,)
    )
    assert torch.equal(logits, again)
    assert torch.equal(hidden[2], hidden_again[2])
    assert torch.equal(fresh_model(ids.int(), LENGTHS.int()), logits)
    assert logits[is_pad].abs().max() == hidden[2][is_pad].abs().max() == 0


def test_empty_documents_give_nothing(tiny_model: Transformer):
    logits = tiny_model(_ids(2, 3), torch.tensor([0, 3]))
    assert (logits[1] - tiny_model(_ids(2, 3)[1:])[0]).abs().max() < SAME
    assert tiny_model(_ids(2, 3), torch.tensor([0, 0])).abs().max() == 0


@pytest.mark.parametrize("window", [None, 1, 31, 32, 33, 64])
@pytest.mark.parametrize("length", [1, 31, 32, 33, 100])
def test_blocks_of_queries_give_the_attention_of_the_definition(window: int | None, length: int):
    generator = torch.Generator().manual_seed(length)
    q = torch.randn(2, 2, 3, length, 8, generator=generator)
    k, v = torch.randn(2, 2, 2, length, 8, generator=generator)
    sinks = torch.randn(6, generator=generator)
    expected = torch.empty_like(q)
    for head in range(6):
        kv, member = divmod(head, 3)
        for i in range(length):
            first = 0 if window is None else max(0, i - window + 1)
            seen = k[:, kv, first : i + 1] @ q[:, kv, member, i, :, None] / 8**0.5
            weights = torch.softmax(
                torch.cat([seen[..., 0], sinks[head].expand(2, 1)], dim=1), dim=1
            )
            expected[:, kv, member, i] = (weights[:, :-1, None] * v[:, kv, first : i + 1]).sum(1)
    torch.testing.assert_close(attend(q, k, v, sinks, window), expected, atol=2e-6, rtol=1e-5)


def test_stopping_early_runs_only_the_blocks_asked_for(fresh_model: Transformer):
    seen = _calls(fresh_model.blocks)
    ids = _ids(2, 20)
    _, full = fresh_model(ids, return_hidden_states=(1, 2, 3, 4))
    for tap, last, blocks in ((3, 3, [1, 2, 3]), (2, None, [1, 2]), (2, 3, [1, 2, 3])):
        seen.clear()
        logits, hidden = fresh_model(
            ids, return_hidden_states=(tap,), up_to_layer=last, no_logits=True
        )
        assert (seen, logits) == (blocks, None)
        assert torch.equal(hidden[tap], full[tap])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_going_on_from_a_hidden_state_is_the_same_as_not_stopping(tiny_dir, dtype: torch.dtype):
    model = Transformer.from_checkpoint(tiny_dir, dtype=dtype)
    ids = _ids(5, 80)
    logits, full = model(ids, LENGTHS, return_hidden_states=(3, 4))
    seen = _calls(model.blocks)
    _, part = model(ids, LENGTHS, return_hidden_states=(3,), up_to_layer=3, no_logits=True)
    seen.clear()
    resumed, rest = model(Residual(3, part[3]), LENGTHS, return_hidden_states=(4,))
    assert seen == [4]
    assert torch.equal(resumed, logits)
    assert torch.equal(rest[4], full[4])
    kept, before = torch.tensor([1, 4]), model.tokens_processed
    survivors = Residual(3, part[3][kept, :33])
    _, rest = model(survivors, LENGTHS[kept], return_hidden_states=(4,), no_logits=True)
    assert (rest[4] - full[4][kept, :33]).abs().max() < (SAME if dtype == torch.float32 else 0.1)
    assert model.tokens_processed - before == 33 + 17


@pytest.mark.parametrize("lengths", [LENGTHS, None])
def test_logits_may_be_used_under_autograd(tiny_model: Transformer, lengths: Tensor | None):
    bias = torch.zeros(300, requires_grad=True)
    (tiny_model(_ids(5, 80), lengths) + bias).square().mean().backward()
    assert bias.grad is not None


def test_hidden_states_train_a_head(tiny_model: Transformer):
    _, hidden = tiny_model(_ids(5, 80), LENGTHS, return_hidden_states=(4,), no_logits=True)
    head = nn.Linear(64, 1)
    head(hidden[4]).square().mean().backward()
    assert head.weight.grad is not None
    assert not any(parameter.requires_grad for parameter in tiny_model.parameters())


def test_bfloat16_keeps_norms_router_and_sinks_in_float32(tiny_dir, tiny_model: Transformer):
    model = Transformer.from_checkpoint(tiny_dir, dtype=torch.bfloat16)
    kept = {
        re.sub(r"blocks\.\d+\.", "", name)
        for name, parameter in model.named_parameters()
        if parameter.dtype == torch.float32
    }
    assert kept == {
        "attn_norm.weight",
        "attn.sinks",
        "mlp_norm.weight",
        "mlp.router_weight",
        "mlp.router_bias",
        "norm.weight",
    }
    _, hidden = model(_ids(1, 80), return_hidden_states=(4,))
    assert hidden[4].dtype == torch.bfloat16
    expected = tiny_model(_ids(1, 80), return_hidden_states=(4,))[1][4]
    error = (hidden[4] - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error.median() < 0.03


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": torch.zeros(2, 3)}, "float32"),
        ({"input_ids": torch.zeros(3).long()}, r"input_ids int64 or int32 \[B, T\]"),
        ({"input_ids": None}, "None"),
        ({"input_ids": [[1, 2]]}, "a list"),
        ({"input_ids": "text"}, "a str"),
        ({"input_ids": torch.zeros(0, 4).long()}, r"\[0, 4\]"),
        ({"input_ids": torch.zeros(2, 0).long()}, r"\[2, 0\]"),
        ({"lengths": torch.tensor([4, 1])}, "0 to 3"),
        *[
            ({"lengths": lengths}, "lengths do not fit")
            for lengths in ([2, 1], (2, 1), torch.tensor([2.0, 1.0]), torch.tensor(2))
        ],
        ({"lengths": torch.tensor([1])}, "lengths"),
        ({"lengths": torch.tensor([1, 2], dtype=torch.int16)}, "lengths"),
        ({"return_hidden_states": (5,)}, "hidden state 5"),
        ({"return_hidden_states": (0,)}, "hidden state 0"),
        ({"return_hidden_states": (3,), "up_to_layer": 2, "no_logits": True}, "hidden state 3"),
        ({"up_to_layer": 5}, "within 1 to 4"),
        ({"up_to_layer": 0}, "within 1 to 4"),
        ({"up_to_layer": 2}, "logits after block 2"),
        ({"no_logits": True}, "no hidden state"),
        ({"input_ids": Residual(0, torch.zeros(2, 3, 64))}, "residual after block 0"),
        ({"input_ids": Residual(4, torch.zeros(2, 3, 64))}, "blocks 5 to 4"),
        ({"input_ids": Residual(1, [[1.0]])}, "hidden a list"),
        ({"input_ids": Residual(2, torch.zeros(2, 3, 63))}, "63"),
        ({"input_ids": Residual(2, torch.zeros(2, 3, 64).bfloat16())}, "bfloat16"),
        ({"input_ids": torch.zeros(1, 131_073).long()}, "131073 positions"),
        ({"input_ids": torch.tensor([[1, 300]])}, "found 300, expected 0 to 299"),
        ({"input_ids": torch.tensor([[1, -1]])}, "found -1, expected 0 to 299"),
    ],
)
def test_calls_that_make_no_sense_are_refused(tiny_model: Transformer, arguments, message: str):
    before = tiny_model.tokens_processed
    is_of_ids = message.startswith("found")
    with refused("E-TOKENIZER-VOCAB" if is_of_ids else "E-CONFIG-FORWARD", message):
        tiny_model(**({"input_ids": _ids(2, 3)} | arguments))
    assert tiny_model.tokens_processed == before


def test_a_given_config_replaces_the_config_of_the_files(tiny_dir, tiny_model: Transformer):
    config: ModelConfig = dataclasses.replace(tiny_model.config, sliding_window=4)
    model = Transformer.from_checkpoint(tiny_dir, config=config)
    assert model.config.sliding_window == 4
    assert not torch.equal(model(_ids(1, 20)), tiny_model(_ids(1, 20)))
    assert torch.equal(model(_ids(1, 4)), tiny_model(_ids(1, 4)))


@pytest.mark.parametrize(
    ("capability", "multiplied"), [("AVX2", "float32"), ("AVX512", "bfloat16")]
)
def test_bfloat16_is_multiplied_in_float32_where_a_cpu_has_no_products_of_it(
    monkeypatch: pytest.MonkeyPatch, capability: str, multiplied: str
):
    seen: set[torch.dtype] = set()
    product = functional.linear

    def watched(x: Tensor, *others: Any) -> Tensor:
        seen.add(x.dtype)
        return product(x, *others)

    monkeypatch.setattr(functional, "linear", watched)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    x, weight, bias = torch.randn(20, 64), torch.randn(40_000, 64), torch.randn(40_000)
    x, weight, bias = x.bfloat16(), weight.bfloat16(), bias.bfloat16()
    expected = product(x.float(), weight.float(), bias.float())
    for rows in (4, 20):
        found = linear(x[:rows], weight, bias, min_rows=1)
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found.float(), expected[:rows], rtol=2**-7, atol=1e-2)
    assert seen == {getattr(torch, multiplied)}
