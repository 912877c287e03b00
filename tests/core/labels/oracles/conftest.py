"""A judge's server and a tiny checkpoint for each test that asks for one; pauses are short."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from nmoe_core.engine import make_tiny_checkpoint
from nmoe_core.labels.oracles import engine, replies
from tests.core.labels.oracles.server import JudgeServer


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    made = JudgeServer()
    yield made
    made.close()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("oracle_weights")
    return make_tiny_checkpoint(path, num_layers=2, num_experts=4, hidden_size=32)


@pytest.fixture(autouse=True)
def _forget_the_model() -> Iterator[None]:
    clear = engine.load_generator.cache_clear
    yield
    clear()


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replies, "FIRST_PAUSE_S", 0.02)
