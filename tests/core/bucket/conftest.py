"""Two machines that share a bucket."""

from pathlib import Path
from typing import Any

import pytest

from tests.buckets import URL, Machine


@pytest.fixture
def machines(s3: Any, tmp_path: Path) -> tuple[Machine, Machine]:
    """Two machines with an empty root."""
    return Machine(tmp_path / "one", URL), Machine(tmp_path / "two", URL)
