"""Against transformers itself, on shapes the goldens do not have.

Each checkpoint is written by the test, loaded by both, and computed in float32.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from nmoe_core.engine import ModelConfig, Transformer
from nmoe_core.engine.weights.config import FULL, SLIDING
from tests.core.engine.reference import assert_equal_to_transformers, load_reference


def test_tiny_checkpoint_loads_in_transformers_and_gives_the_same(tiny_dir: Path):
    assert_equal_to_transformers(tiny_dir)


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
    assert_equal_to_transformers(make_checkpoint(dataclasses.replace(small_config, **change)))


@pytest.mark.parametrize("window", [7, 128])
@pytest.mark.parametrize("beyond", [-1, 0, 1])
def test_lengths_around_the_window_equal_transformers(
    small_config: ModelConfig, make_checkpoint, window: int, beyond: int
):
    config = dataclasses.replace(small_config, sliding_window=window)
    assert_equal_to_transformers(make_checkpoint(config), length=window + beyond)


@pytest.mark.parametrize("truncate", [False, True])
def test_rope_parameters_of_newer_files_equal_transformers(
    small_config: ModelConfig, make_checkpoint, truncate: bool
):
    rope = small_config.to_hf()["rope_scaling"] | {"rope_theta": 5000.0, "truncate": truncate}
    raw = {"rope_parameters": rope, "rope_scaling": None, "rope_theta": None}
    directory = make_checkpoint(small_config, raw)
    assert_equal_to_transformers(directory, length=150)


def test_what_transformers_saves_can_be_loaded(
    small_config: ModelConfig, make_checkpoint, tmp_path
):
    written = make_checkpoint(small_config)
    load_reference(written).bfloat16().save_pretrained(tmp_path / "saved")
    ids = torch.arange(50)[None]
    saved = Transformer.from_checkpoint(tmp_path / "saved")
    assert torch.equal(saved(ids), Transformer.from_checkpoint(written)(ids))
