"""Whole models on kernels against the plain path, in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nmoe_core.engine.generator import BatchedGenerator
from nmoe_core.engine.kernels import decode_attention, prefill_attention
from nmoe_core.engine.kernels.block import kernels_available, with_kernels
from nmoe_core.engine.model import Transformer
from nmoe_core.engine.tiny import make_tiny_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """Two blocks, one of each kind of attention, with a window that the prompts outgrow."""
    sizes = {"num_layers": 2, "num_experts": 4, "vocab_size": 320, "sliding_window": 16}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    return make_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"), **sizes)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(prefill_attention, "QUERY_BLOCK", 32)
    monkeypatch.setattr(decode_attention, "SPLIT_KEYS", 64)


@pytest.mark.parametrize("experts", ["decoded", "packed"])
def test_hidden_states_are_those_of_the_plain_path(checkpoint, experts):
    plain = Transformer.from_checkpoint(checkpoint, experts=experts)
    ids = torch.randint(0, 320, (2, 40), generator=torch.Generator().manual_seed(0))
    options = {"lengths": torch.tensor([40, 7]), "return_hidden_states": (1, 2), "no_logits": True}
    _, expected = plain(ids, **options)
    fused = with_kernels(Transformer.from_checkpoint(checkpoint, experts=experts))
    _, found = fused(ids, **options)
    for tap in (1, 2):
        torch.testing.assert_close(found[tap], expected[tap], rtol=1e-4, atol=1e-4)


def test_a_plain_machine_has_no_device_for_kernels():
    assert not kernels_available("cpu")


@pytest.mark.parametrize("use_graphs", [False, True])
def test_generation_gives_the_plain_path_s_tokens(checkpoint, use_graphs):
    """Prompts of two lengths in one batch, the longer one in two pieces; then decoding."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 320, (n,), generator=generator).tolist() for n in (3, 21)]
    sizes = {"max_seq_len": 64, "max_batch": 3, "max_step_tokens": 16}
    plain = BatchedGenerator(Transformer.from_checkpoint(checkpoint), **sizes)
    expected = plain.generate_batch(prompts, max_tokens=3, temperature=0.0)
    model = with_kernels(Transformer.from_checkpoint(checkpoint), use_graphs=use_graphs)
    fused = BatchedGenerator(model, **sizes)
    assert fused.generate_batch(prompts, max_tokens=3, temperature=0.0) == expected
    assert (model._graphs is not None) == use_graphs
