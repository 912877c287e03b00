"""Two machines that share a bucket."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loader.files.stores import objects
from nmoe_core.base.bucket import paths
from tests.buckets import URL, Machine


@pytest.fixture
def machines(s3: Any, tmp_path: Path) -> Iterator[tuple[Machine, Machine]]:
    """Two machines with an empty root."""
    yield Machine(tmp_path / "one", URL), Machine(tmp_path / "two", URL)
    paths.forget_all()
    objects.forget_roots()
