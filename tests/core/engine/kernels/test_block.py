"""Whole models on kernels against the plain path, interpreted; and which devices get them."""

import importlib.util
import itertools
import logging
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from nmoe_core.engine import backend
from nmoe_core.engine.block import PLAIN
from nmoe_core.engine.experts import Chosen
from nmoe_core.engine.kernels import block
from nmoe_core.engine.kernels.block import KERNELS
from nmoe_core.engine.kernels.graphs import DecodeGraphs
from nmoe_core.engine.model import Transformer
from nmoe_core.engine.weights.tiny import make_tiny_checkpoint
from tests.core.engine.builders import make_generator


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """Two blocks, one of each kind of attention, with a window that the prompts outgrow."""
    sizes = {"num_layers": 2, "num_experts": 4, "vocab_size": 320, "sliding_window": 8}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    return make_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"), **sizes)


@pytest.mark.parametrize("experts", ["decoded", "packed", "grouped"])
def test_hidden_states_and_logits_are_those_of_the_plain_path(checkpoint, experts):
    plain = Transformer.from_checkpoint(checkpoint)
    ids = torch.randint(0, 320, (2, 9), generator=torch.Generator().manual_seed(0))
    options = {"lengths": torch.tensor([9, 2]), "return_hidden_states": (1, 2)}
    expected_logits, expected = plain(ids, **options)
    fused = Transformer.from_checkpoint(checkpoint, moe_backend=experts, use_kernels=True)
    logits, found = fused(ids, **options)
    for tap in (1, 2):
        torch.testing.assert_close(found[tap], expected[tap], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits, expected_logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("use_graphs", [False, True])
def test_generation_gives_the_plain_path_s_tokens(checkpoint, monkeypatch, use_graphs):
    """Prompts of two lengths in one batch, the longer one in two pieces; then decoding, as on a
    GPU: each pass launched before the tokens of the one before it are read."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 320, (n,), generator=generator).tolist() for n in (2, 9)]
    sizes = {"max_seq_len": 32, "max_batch": 2, "max_step_tokens": 8, "max_prefixes": 0}
    plain = make_generator(Transformer.from_checkpoint(checkpoint), **sizes)
    expected = plain.generate_batch(prompts, max_tokens=2, temperature=0.0)
    model = Transformer.from_checkpoint(checkpoint, use_kernels=True)
    model.use_graphs = use_graphs
    fused = make_generator(model, launches_ahead=True, **sizes)
    recorded, run = [], DecodeGraphs.run
    monkeypatch.setattr(DecodeGraphs, "run", lambda *a: recorded.append(1) or run(*a))
    assert fused.generate_batch(prompts, max_tokens=2, temperature=0.0) == expected
    assert bool(recorded) == use_graphs


def test_steps_are_recorded_anew_for_another_cache_and_only_then(checkpoint, monkeypatch):
    made, begin = [], DecodeGraphs.__init__
    monkeypatch.setattr(DecodeGraphs, "__init__", lambda *a: made.append(a[3]) or begin(*a))
    sizes = {"max_batch": 1, "max_step_tokens": 8, "max_prefixes": 0}
    plain = make_generator(Transformer.from_checkpoint(checkpoint), max_seq_len=32, **sizes)
    model = Transformer.from_checkpoint(checkpoint, use_kernels=True)
    model.use_graphs = True
    for max_seq_len in (32, 16):
        fused = make_generator(model, max_seq_len=max_seq_len, **sizes)
        for prompt in ([5, 6], [7, 8]):
            found = fused.generate_batch([prompt], max_tokens=3, temperature=0.0)
            assert found == plain.generate_batch([prompt], max_tokens=3, temperature=0.0)
    assert len(made) == 2
    assert made[0] is not made[1]


def test_batch_invariance_fixes_the_tile_of_every_batch(checkpoint, monkeypatch):
    sort = Mock(side_effect=LookupError)
    monkeypatch.setattr(block, "sort_choices", sort)
    experts = Transformer.from_checkpoint(checkpoint, use_kernels=True).blocks[0].experts
    per_token = 2
    counts = [4 * rows // per_token for rows in (1, 16, 32, 64, 128, 1000)]
    for batch_invariant, count in itertools.product((False, True), [*counts, counts[2] - 1]):
        x = torch.randn(count, 64)
        chosen = Chosen(torch.ones(count, per_token), torch.zeros(count, per_token).int())
        with pytest.raises(LookupError):
            experts(x, chosen, x, batch_invariant)
    rows = [call.args[3] for call in sort.call_args_list]
    assert rows == [16, 32, 64, 64, 64, 64, 32] + 7 * [16]


@pytest.mark.parametrize("has_kernels", [False, True])
def test_every_public_way_to_a_model_gives_kernels_where_the_device_has_them(
    checkpoint, monkeypatch, has_kernels
):
    """A CPU has none, although Triton's interpreter is on in this process and could run them."""
    plain = Transformer.from_checkpoint(checkpoint)
    assert plain.runtime is PLAIN
    asked = []
    if has_kernels:
        monkeypatch.setattr(backend, "has_kernels", lambda device: asked.append(device) or True)
    models = [
        Transformer.from_checkpoint(checkpoint),
        make_generator(checkpoint, 32, 1).model,
        make_generator(str(checkpoint), 32, 1, device="cpu").model,
    ]
    assert asked == [torch.device("cpu")] * 3 * has_kernels
    assert {model.runtime for model in models} == {KERNELS if has_kernels else PLAIN}
    assert {model.digest for model in models} == {plain.digest}
    ids, tolerance = torch.arange(5)[None], 1e-3 * has_kernels
    torch.testing.assert_close(models[0](ids), plain(ids), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("device", "has_cuda", "has_triton", "capability", "expected"),
    [
        ("cpu", True, True, (9, 0), False),
        ("cuda", True, True, (9, 0), True),
        ("cuda:3", True, True, (10, 0), False),
        ("cuda", False, True, (9, 0), False),
        ("cuda", True, False, (9, 0), False),
        ("cuda", True, True, (8, 0), False),
        ("cuda", True, True, (12, 0), False),
    ],
)
def test_kernels_need_triton_and_a_gpu_that_they_were_verified_on(
    monkeypatch, caplog, device, has_cuda, has_triton, capability, expected
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object() if has_triton else None)
    with caplog.at_level(logging.WARNING):
        assert backend.has_kernels(device) is expected
    is_other_gpu = device != "cpu" and has_cuda and has_triton and not expected
    assert len(caplog.messages) == is_other_gpu
    assert all("{}.{}".format(*capability) in line for line in caplog.messages)
    assert backend.has_kernels(torch.device(device)) is expected
