"""What a refusal looks like: one error with a code."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pytest

from loader.errors import NmoeError


@contextmanager
def refused(
    code: str, match: str | None = None, *, naming: Iterable[str] = ()
) -> Iterator[pytest.ExceptionInfo[NmoeError]]:
    """The block must raise an NmoeError of this code, whose text matches and names all of these."""
    with pytest.raises(NmoeError, match=match) as caught:
        yield caught
    assert caught.value.code == code
    assert all(text in str(caught.value) for text in naming)
