"""A judge's server for each test that asks for one; pauses are short."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nmoe_core.labels.oracles import replies
from tests.core.labels.oracles.server import JudgeServer


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    made = JudgeServer()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replies, "FIRST_PAUSE_S", 0.02)
