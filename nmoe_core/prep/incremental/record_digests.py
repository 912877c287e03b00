"""What transforms that read the corpus decide about each record, as a digest.

A record whose own bytes are unchanged may lose other lines than before, because other records
changed. So the digest is a part of the key by which a known record is found.
"""

from functools import cached_property
from pathlib import Path

import numpy as np

from loader.files.regular import regular

DIGESTS_NAME = "records.npy"
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


class RecordDigests:
    """The digests of the records of a source: those of a file, which a process opens at the first
    lookup, or given ones of the records from row `first`."""

    def __init__(self, directory: Path, given: np.ndarray | None = None, first: int = 0) -> None:
        self._path = directory / DIGESTS_NAME
        self._given = given
        self._first = first

    def mixed(self, keys: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """The keys of records with these row numbers, uint64 `[records, 2]`, with their digests. A
        record without removed lines or paragraphs keeps its key, and so does one without a key."""
        digests = self._digests[rows - self._first]
        is_mixed = (digests > 0) & keys.any(axis=1)
        mixed = keys.copy()
        mixed[is_mixed, 0] ^= digests[is_mixed]
        mixed[is_mixed, 1] ^= digests[is_mixed] * _MULTIPLIER
        return mixed

    @cached_property
    def _digests(self) -> np.ndarray:
        return np.load(regular(self._path), mmap_mode="r") if self._given is None else self._given
