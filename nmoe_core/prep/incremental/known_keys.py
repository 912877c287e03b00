"""Keys of lines and paragraphs by record, which the next pass reuses: `.shared` in a split.

Of each record they are found by the key of its line and by what earlier transforms that read the
corpus decided about it, so a changed record, or one that loses other lines now, has none. The files
take 40 bytes per record and 8 per line or paragraph on disk, and 16 bytes of memory per record
while they are indexed. They only save work: no manifest names them.
"""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from loader.files.checksummed_json import sealed
from loader.files.regular import regular
from nmoe_core.base.atomic import named_errors, write_json
from nmoe_core.base.fingerprint import read_sealed, sha256_file
from nmoe_core.prep.incremental.reuse import LineMatch, find_keys

KEPT_NAME = ".shared"
_DONE_NAME = "done.json"
_NAMES = ("{step}.records", "{step}.hashes", "{step}.by_key")
_RECORD = np.dtype([("key", "<u8", 2), ("end", "<i8")])


class RecordKeys(NamedTuple):
    """The keys of some records."""

    rows: np.ndarray
    """int64 `[records]`: their row numbers."""
    names: np.ndarray
    """uint64 `[records, 2]`: the key of each record's line; 0 if it does not identify the text."""
    salts: np.ndarray
    """uint64 `[records]`: hashes of different records are compared after XOR with these."""
    counts: np.ndarray
    """int64 `[records]`."""
    hashes: np.ndarray
    """uint64 `[sum of counts]`."""

    @classmethod
    def joined(cls, parts: Sequence["RecordKeys"]) -> "RecordKeys":
        """The keys of all records, in the order of their rows."""
        rows, names, salts, counts, hashes = map(np.concatenate, zip(*parts))
        order = np.argsort(rows, kind="stable")
        places = _places(np.cumsum(counts)[order], counts[order])
        return cls(rows[order], names[order], salts[order], counts[order], hashes[places])


class KnownKeys:
    """The keys that an earlier pass wrote for one transform."""

    def __init__(self, directory: Path, step: int) -> None:
        records, hashes, by_key = (_mapped(directory / name.format(step=step)) for name in _NAMES)
        self._records = records.view(_RECORD)
        self._hashes = hashes.view(np.uint64)
        self._by_key = by_key.view(np.uint64).reshape(2, -1)

    @property
    def has_lines(self) -> bool:
        """Whether any record is known."""
        return self._by_key.shape[1] > 0

    def find_lines(self, keys: np.ndarray) -> LineMatch:
        """The records with these keys, uint64 `[lines, 2]`: only the fields `lines` and `numbers`
        have values."""
        lines, numbers = find_keys(self._by_key, self._records["key"].T, keys)
        return LineMatch(lines, numbers, keys[lines], *[np.zeros(len(lines), np.int64)] * 6)

    def take(self, numbers: np.ndarray, rows: np.ndarray, salts: np.ndarray) -> RecordKeys:
        """The keys of the records `numbers`, whose row numbers are now `rows`."""
        ends = self._records["end"]
        counts = ends[numbers] - np.where(numbers > 0, ends[numbers - 1], 0)
        hashes = self._hashes[_places(ends[numbers], counts)]
        return RecordKeys(rows, self._records["key"][numbers], salts, counts, hashes)


class KeyWriter:
    """Writes the keys of one transform to a directory."""

    def __init__(self, directory: Path, step: int) -> None:
        paths = [directory / name.format(step=step) for name in _NAMES]
        self._records_path, hashes, self._by_key_path = paths
        self._records = open(self._records_path, "wb")  # noqa: SIM115  (closed by close)
        self._hashes = open(hashes, "wb")  # noqa: SIM115
        self._end = 0

    def add(self, found: RecordKeys) -> None:
        """Append the keys of records that have a name."""
        is_named = found.names.any(axis=1)
        counts = found.counts[is_named]
        records = np.empty(len(counts), _RECORD)
        records["key"] = found.names[is_named]
        records["end"] = self._end + np.cumsum(counts)
        hashes = found.hashes[np.repeat(is_named, found.counts)]
        for file, values in ((self._records, records), (self._hashes, hashes)):
            with named_errors(file.name):
                file.write(values.data)
        self._end += int(counts.sum())

    def close(self) -> None:
        """Write the index, and make the files durable."""
        _finish(self._records)
        _finish(self._hashes)
        firsts = _mapped(self._records_path).view(_RECORD)["key"][:, 0]
        order = np.argsort(firsts, kind="stable")
        by_key = np.stack([firsts[order], order.astype(np.uint64)])
        with named_errors(self._by_key_path), open(self._by_key_path, "wb") as file:
            file.write(by_key.data)
            _finish(file)


def _finish(file: IO[bytes]) -> None:
    with named_errors(file.name), file:
        file.flush()
        os.fsync(file.fileno())


def seal_keys(directory: Path, made_from: dict[str, Any]) -> None:
    """Record from which settings the files of a directory were made, and their digests."""
    digests = {path.name: sha256_file(path) for path in sorted(directory.iterdir())}
    write_json(directory / _DONE_NAME, sealed({"made_from": made_from, "files": digests}))


def are_usable(directory: Path, made_from: dict[str, Any]) -> bool:
    """Whether a directory has undamaged keys made from these settings."""
    there = read_sealed(directory / _DONE_NAME) or {}
    files = {directory / name: digest for name, digest in there.get("files", {}).items()}
    if there.get("made_from") != made_from:
        return False
    return all(path.is_file() and sha256_file(path) == digest for path, digest in files.items())


def keep_keys(made: Path, split_dir: Path) -> None:
    """Replace the keys of a split by those of the pass that made its new shards, if it made any."""
    kept = split_dir / KEPT_NAME
    shutil.rmtree(kept, ignore_errors=True)
    if made.is_dir():
        os.replace(made, kept)


def _places(ends: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The places of consecutive values, `counts` of them up to each of the `ends`."""
    return np.repeat(ends - np.cumsum(counts), counts) + np.arange(int(counts.sum()))


def _mapped(path: Path) -> np.ndarray:
    """The bytes of a file; an empty file cannot be memory-mapped."""
    is_empty = not path.stat().st_size
    return (
        np.zeros(0, np.uint8) if is_empty else np.asarray(np.memmap(regular(path), np.uint8, "r"))
    )
