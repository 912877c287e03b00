"""The shared builders as one fixture, for tests that do not import `tests.core.quality` yet."""

from __future__ import annotations

from types import ModuleType

import pytest

from tests.core import quality


@pytest.fixture(scope="session")
def world() -> ModuleType:
    return quality
