"""One way to say that something is refused, and how."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from loader.errors import NmoeError


@contextmanager
def refused(kind: type[NmoeError], *words: str, code: str | None = None) -> Iterator[None]:
    """The block raises `kind` with `code`, in one line that has all `words`."""
    with pytest.raises(kind) as caught:
        yield
    assert code in (None, caught.value.code)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)
