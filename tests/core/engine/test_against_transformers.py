"""Against transformers itself, on shapes the goldens do not have.

Each checkpoint is written by the test, loaded by both, and computed in float32.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from nmoe_core.engine import ModelConfig, Transformer
from nmoe_core.engine.weights.config import FULL, SLIDING

transformers = pytest.importorskip("transformers")

LOGITS_ATOL = 2e-4
HIDDEN_RTOL = 1e-5


def _reference(directory: Path) -> Any:
    """The model of transformers, its MXFP4 experts decoded."""
    config = transformers.AutoConfig.from_pretrained(directory)
    is_quantised = getattr(config, "quantization_config", None) is not None
    decode = {"quantization_config": transformers.Mxfp4Config(dequantize=True)}
    return transformers.GptOssForCausalLM.from_pretrained(
        directory,
        dtype=torch.float32,
        attn_implementation="eager",
        **(decode if is_quantised else {}),
    ).eval()


def _assert_equal_to_transformers(directory: Path, length: int = 40) -> None:
    ours, theirs = Transformer.from_checkpoint(directory), _reference(directory)
    depth = ours.config.num_hidden_layers
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(0, ours.config.vocab_size, (2, length), generator=generator)
    logits, hidden = ours(ids, return_hidden_states=range(1, depth + 1))
    with torch.no_grad():
        expected = theirs(ids, output_hidden_states=True, use_cache=False)
    assert (logits - expected.logits).abs().max() <= LOGITS_ATOL
    # The last state of transformers is after the final norm.
    states = [*expected.hidden_states[1:depth], None]
    for tap, state in enumerate(states[:-1], 1):
        assert (hidden[tap] - state).norm() / state.norm() <= HIDDEN_RTOL


def test_tiny_checkpoint_loads_in_transformers_and_gives_the_same(tiny_dir: Path):
    _assert_equal_to_transformers(tiny_dir)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"num_key_value_heads": 6},
        {"experts_per_token": 1},
        {"experts_per_token": 6},
        {"layer_types": (FULL, FULL, SLIDING)},
        {"rope_scaling": None},
        {"swiglu_limit": 0.5},
    ],
    ids=["base", "no GQA", "top-1", "all experts", "layer types", "no yarn", "low limit"],
)
def test_unquantised_shapes_equal_transformers(small_config: ModelConfig, make_checkpoint, change):
    _assert_equal_to_transformers(make_checkpoint(dataclasses.replace(small_config, **change)))


@pytest.mark.parametrize("window", [7, 128])
@pytest.mark.parametrize("beyond", [-1, 0, 1])
def test_lengths_around_the_window_equal_transformers(
    small_config: ModelConfig, make_checkpoint, window: int, beyond: int
):
    config = dataclasses.replace(small_config, sliding_window=window)
    _assert_equal_to_transformers(make_checkpoint(config), window + beyond)


@pytest.mark.parametrize("truncate", [False, True])
def test_rope_parameters_of_newer_files_equal_transformers(
    small_config: ModelConfig, make_checkpoint, truncate: bool
):
    rope = small_config.to_hf()["rope_scaling"] | {"rope_theta": 5000.0, "truncate": truncate}
    raw = {"rope_parameters": rope, "rope_scaling": None, "rope_theta": None}
    directory = make_checkpoint(small_config, raw)
    _assert_equal_to_transformers(directory, 150)


def test_what_transformers_saves_can_be_loaded(
    small_config: ModelConfig, make_checkpoint, tmp_path
):
    written = make_checkpoint(small_config)
    _reference(written).bfloat16().save_pretrained(tmp_path / "saved")
    ids = torch.arange(50)[None]
    saved = Transformer.from_checkpoint(tmp_path / "saved")
    assert torch.equal(saved(ids), Transformer.from_checkpoint(written)(ids))
