"""What tests of the loader share: opening one, and reading it to its end."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from loader import DeterministicLoader, build_loader


def open_loader(cfg: object, *args: Any, **kwargs: Any) -> DeterministicLoader:
    """A loader of numpy arrays; arguments as those of `build_loader`."""
    return build_loader(cfg, *args, backend="numpy", **kwargs)[0]


def rows_of(batches: Iterable[tuple[Any, Any]]) -> np.ndarray:
    """Batches as rows of seq_len + 1."""
    return np.concatenate([np.concatenate([i, t[:, -1:]], axis=1) for i, t in batches])


def all_rows(loader: DeterministicLoader) -> np.ndarray:
    """What is left of a loader as rows of seq_len + 1."""
    if loader.step == loader.num_steps:
        return np.empty((0, loader.plan.seq_len + 1), np.int64)
    return rows_of(loader)
