"""Checkpoints for the engine's tests: written by the tests themselves, tiny, seeded."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nmoe_core.engine import ModelConfig, Transformer, make_tiny_checkpoint
from nmoe_core.engine.weights.layout import HUGGING_FACE
from tests.core.engine.builders import SMALL, random_tensors
from tests.golden.engine.recipe import checkpoint, write_checkpoint

# Read when transformers is first imported; local directories need no hub.
os.environ["HF_HUB_OFFLINE"] = "1"


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
    return lambda name: checkpoint(name, root)


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
def make_checkpoint(tmp_path: Path) -> Callable[[ModelConfig], Path]:
    """`make(config)` writes a bfloat16 Hugging Face checkpoint of random weights, unquantised."""

    def make(config: ModelConfig) -> Path:
        tensors = random_tensors(config, 17, HUGGING_FACE, is_packed=False)
        return write_checkpoint(tmp_path / "made", config.to_hf(), tensors)

    return make
