"""Tokens of texts that a split holds already, found by the SHA-256 of the normalised text.

A pass over a source that grew or changed takes them over and tokenises new text alone. One sorted
table per old shard lies in `.prep/known`, 56 bytes per document, mapped by all workers; making it
takes the memory of one shard's table. A text is looked for in the shard of its id first: there it
lies unless ids moved. A file with another checksum than its manifest says is not used, and neither
is a document that may have been cut.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from loader.files.format import MANIFEST_NAME, Manifest, ShardEntry, check_digest, load_manifest
from loader.files.shard import open_shard
from nmoe_core.base.errors import FormatError
from nmoe_core.prep.settings import PREP_CODE
from nmoe_core.shards.documents import open_entry
from nmoe_core.shards.manifest import ShardFormat, entry_row, shard_dirs

KNOWN_NAME = "known"
_LOG = logging.getLogger(__name__)
_NUM_COLUMNS = 7  # four words of the digest; file, first token, end of the text's tokens


class OldShard(NamedTuple):
    """A committed shard whose documents a pass may take over."""

    directory: Path
    table: Path


def old_shards(split_dir: Path, tables: Path, fmt: ShardFormat) -> list[OldShard]:
    """The shards of a split that were made by this code with this tokenizer."""
    found = []
    for directory in shard_dirs(split_dir):
        try:
            extra = load_manifest(directory / MANIFEST_NAME).extra
        except FormatError:  # no reader would take it
            continue
        made_by = extra.get("fingerprints", {}).get("code"), extra.get("tokenizer_fingerprint")
        if made_by == (PREP_CODE, fmt.tokenizer_fingerprint):
            found.append(OldShard(directory, tables / f"{directory.name}.npy"))
    return found


def write_table(worker: Any, shard: OldShard) -> int:
    """Write the table of a shard; return the number of documents in it."""
    manifest = load_manifest(shard.directory / MANIFEST_NAME)
    parts = [_rows(manifest, number) for number in range(len(manifest.shards))]
    rows = np.concatenate([np.empty((_NUM_COLUMNS, 0), np.uint64), *parts], axis=1)
    info = manifest.extra.get("source_info", {})
    if info.get("truncated_documents", 1) and rows.shape[1]:
        lengths = rows[6] - rows[5]
        rows = rows[:, lengths < lengths.max()]  # those that were cut are the longest
    np.save(shard.table, rows[:, np.argsort(rows[0], kind="stable")])
    return rows.shape[1]


def _rows(manifest: Manifest, number: int) -> np.ndarray:
    """The documents of one file, uint64 `[7, documents]`; none where it is damaged."""
    entry = manifest.shards[number]
    try:
        _check_digests(manifest, entry)
        file = open_entry(manifest.path.parent, manifest, entry)
        digests = bytes.fromhex("".join(sha256 for _, sha256 in file.ids()))
        words = np.frombuffer(digests, ">u8").reshape(len(file.spans), 4)
    except (FormatError, OSError, ValueError) as error:
        _LOG.warning("documents of %s are tokenised again: %s", manifest.shard_path(entry), error)
        return np.empty((_NUM_COLUMNS, 0), np.uint64)
    rows = np.empty((_NUM_COLUMNS, len(words)), np.uint64)
    rows[:4] = words.T
    rows[4] = number
    rows[5] = file.spans[:, 0] + (manifest.extra.get("bos_token_id") is not None)
    rows[6] = file.spans[:, 1] - 1
    return rows


def _check_digests(manifest: Manifest, entry: ShardEntry) -> None:
    check_digest(manifest.shard_path(entry), entry.checksum, "E-SHARD-CHECKSUM")
    for kind in ("index", "ids"):
        path = manifest.path.parent / str(entry_row(entry).get(f"{kind}_path"))
        check_digest(path, str(entry.extra.get(f"{kind}_checksum")), "E-SHARD-CHECKSUM")


class _Table:
    """The documents of one old shard."""

    def __init__(self, split_dir: Path, path: Path) -> None:
        self._rows = np.asarray(np.load(path, mmap_mode="r"))
        self._manifest = load_manifest(split_dir / path.stem / MANIFEST_NAME)
        self._files: dict[int, np.ndarray] = {}

    def find(self, words: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
        """Which of the digests, uint64 `[N, 4]`, are here, and the tokens of each of those."""
        if self._rows.shape[1] == 0:
            return np.empty(0, np.int64), []
        at = np.searchsorted(self._rows[0], words[:, 0])
        at[at == self._rows.shape[1]] = 0
        found = np.flatnonzero((self._rows[:4, at] == words.T).all(axis=0))
        spans = self._rows[4:, at[found]].T.tolist()
        return found, [self._file(number)[start:stop] for number, start, stop in spans]

    def _file(self, number: int) -> np.ndarray:
        if number not in self._files:
            path = self._manifest.shard_path(self._manifest.shards[number])
            self._files[number] = np.asarray(open_shard(path, self._manifest.dtype))
        return self._files[number]


class KnownTokens:
    """The tables of a split; a worker opens them when it first looks for a text."""

    def __init__(self, split_dir: Path, tables: Path) -> None:
        self._split_dir, self._directory = split_dir, tables
        self._tables: dict[str, _Table] | None = None

    def find(self, sha256s: Sequence[str], shards: Sequence[str]) -> dict[int, np.ndarray]:
        """Tokens, without BOS and EOS, of those texts that are known, by their place.

        `shards` names for each text the directory to look into first.
        """
        if self._tables is None:
            paths = sorted(self._directory.glob("*.npy"))
            self._tables = {path.stem: _Table(self._split_dir, path) for path in paths}
        if not self._tables:
            return {}
        digests = bytes.fromhex("".join(sha256s))
        words = np.frombuffer(digests, ">u8").reshape(-1, 4).astype(np.uint64)
        places: dict[str, list[int]] = {}
        for place, shard in enumerate(shards):
            places.setdefault(shard, []).append(place)
        known: dict[int, np.ndarray] = {}
        for shard, here in places.items():
            if (table := self._tables.get(shard)) is not None:
                _add(known, table, words, np.array(here))
        missing = np.array([place for place in range(len(shards)) if place not in known], np.int64)
        for table in self._tables.values():
            if missing.size:
                missing = np.delete(missing, _add(known, table, words, missing))
        return known


def _add(
    known: dict[int, np.ndarray], table: _Table, words: np.ndarray, places: np.ndarray
) -> np.ndarray:
    """Add what a table has of the texts at `places`; return which of those that is."""
    found, tokens = table.find(words[places])
    known.update(zip(places[found].tolist(), tokens))
    return found
