"""What transforms know of the other documents of a source: keys of lines or paragraphs that several
documents share.

A pass before prep's own makes one table for each transform that needs it, and processes memory-map
the tables (`prep.incremental.shared_keys`). A key has 64 bits: among 10^10 different paragraphs
about three pairs are expected to have equal keys, so that about three would be removed wrongly.
"""

from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from loader.files.regular import regular


class Keys(NamedTuple):
    """Keys of the lines or paragraphs of a batch, in order."""

    hashes: np.ndarray
    """uint64 `[keys]`."""
    places: np.ndarray
    """int64 `[keys]`: number of the text in the batch."""


class SharedKeys:
    """The table of a transform; a process opens it at the first lookup."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def find(self, hashes: np.ndarray) -> np.ndarray:
        """For each hash, the row number of the first record that has it; -1 if it is not shared."""
        known, firsts = self._table
        if not len(known):
            return np.full(len(hashes), -1)
        at = np.searchsorted(known, hashes)
        at[at == len(known)] = 0
        return np.where(known[at] == hashes, firsts[at].astype(np.int64), -1)

    @cached_property
    def _table(self) -> np.ndarray:
        """uint64 `[2, keys]`: ascending hashes, and first row numbers."""
        return np.load(regular(self._path), mmap_mode="r")


def table_path(directory: Path, step: int) -> Path:
    """The table of the transform with this number."""
    return directory / f"step_{step}.npy"
