"""Checkpoints for the engine's tests: written by the tests themselves, tiny, seeded."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nmoe_core.engine import ModelConfig, Transformer, make_tiny_checkpoint
from nmoe_core.engine.weights.layout import HUGGING_FACE, stored_tensors
from tests.core.engine.builders import SMALL
from tests.golden.engine import recipe

# Read when transformers is first imported; local directories need no hub.
os.environ["HF_HUB_OFFLINE"] = "1"

MakeCheckpoint = Callable[..., Path]


@pytest.fixture(autouse=True)
def _one_thread():
    """Two shared cores: more threads make these sizes slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def golden_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`golden_checkpoint(name)`: the stored one, or the one written by recipe, once per session."""
    root = tmp_path_factory.mktemp("golden")
    return lambda name: recipe.checkpoint(name, root)


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers, window 16, vocabulary 300, as `make_tiny_checkpoint` writes it."""
    directory = tmp_path_factory.mktemp("tiny") / "checkpoint"
    return make_tiny_checkpoint(directory, vocab_size=300, num_layers=4, sliding_window=16)


@pytest.fixture(scope="session")
def tiny_model(tiny_dir: Path) -> Transformer:
    """The model of `tiny_dir`; tests do not change it but for its counter."""
    return Transformer.from_checkpoint(tiny_dir)


@pytest.fixture
def small_config() -> ModelConfig:
    """A shape for `make_checkpoint`, to be varied with `dataclasses.replace`."""
    return SMALL


@pytest.fixture
def make_checkpoint(tmp_path: Path) -> MakeCheckpoint:
    """`make(config)` writes a bfloat16 Hugging Face checkpoint of random weights, unquantised."""

    def make(config: ModelConfig, raw: dict[str, object] | None = None) -> Path:
        directory = tmp_path / "made"
        directory.mkdir()
        generator = torch.Generator().manual_seed(17)
        tensors = {}
        for name, spec in stored_tensors(config, HUGGING_FACE, ()).items():
            values = torch.randn(spec.shape, generator=generator)
            if name.endswith("norm.weight"):
                values = 1 + 0.1 * values
            elif len(spec.shape) > 1 and "embed" not in name and "bias" not in name:
                inputs = spec.shape[-2] if len(spec.shape) == 3 else spec.shape[-1]
                values = 2 * values / inputs**0.5
            tensors[name] = values.bfloat16()
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        (directory / "config.json").write_text(json.dumps(config.to_hf() | (raw or {})))
        return directory

    return make
