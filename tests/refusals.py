"""What a refusal looks like: one error with a code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from loader.errors import NmoeError


@contextmanager
def refused(code: str, match: str | None = None) -> Iterator[pytest.ExceptionInfo[NmoeError]]:
    """The block must raise an NmoeError of this code, whose text matches."""
    with pytest.raises(NmoeError, match=match) as caught:
        yield caught
    assert caught.value.code == code
