"""What tests of the loader share: opening one, reading it to its end, and refusals."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from loader import DeterministicLoader, build_loader
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


def open_loader(cfg: object, *args: Any, **kwargs: Any) -> DeterministicLoader:
    """A loader of numpy arrays; arguments as those of `build_loader`."""
    return build_loader(cfg, *args, backend="numpy", **kwargs)[0]


def all_rows(loader: DeterministicLoader) -> np.ndarray:
    """What is left of a loader as rows of seq_len + 1."""
    parts = [np.concatenate([i, t[:, -1:]], axis=1) for i, t in loader]
    return np.concatenate(parts) if parts else np.empty((0, loader.plan.seq_len + 1), np.int64)
