"""A judge's server for all tests of a file."""

from collections.abc import Iterator

import pytest

from tests.core.labels.oracles.server import JudgeServer


@pytest.fixture(scope="module")
def server() -> Iterator[JudgeServer]:
    made = JudgeServer()
    yield made
    made.close()
