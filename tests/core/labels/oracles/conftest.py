"""A judge's server for each test that asks for one, and the settings to reach it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nmoe_core.config.quality import HttpOracleTable
from nmoe_core.labels.oracles import flow
from tests.core.labels.oracles.server import MODEL, JudgeServer


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    made = JudgeServer()
    yield made
    made.close()


@pytest.fixture
def table(server: JudgeServer) -> Callable[..., HttpOracleTable]:
    def make(**more: Any) -> HttpOracleTable:
        settings: dict[str, Any] = {"timeout_s": 60.0, "max_outage_s": 60.0, "concurrency": 8}
        return HttpOracleTable(base_url=server.url, model=MODEL, **settings | more)

    return make


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow, "FIRST_PAUSE_S", 0.02)
