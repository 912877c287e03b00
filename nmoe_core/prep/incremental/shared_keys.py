"""A pass before the pass: finds the lines, paragraphs and passages that documents of a split share.

Workers read the same blocks as prep and return a key for each line or paragraph. The keys are
written to files by their high bits, and each file is sorted by itself, so memory does not grow with
the source, except for 8 bytes per record. The result is a table for each transform that reads the
corpus, and a digest for each record (`RecordDigests`). While keys are sorted, each takes 16 bytes
on disk. The whole split is read, even if a token budget ends prep's own pass earlier.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from loader.files.checksummed_json import sealed
from loader.files.regular import regular
from nmoe_core.base.atomic import atomic_file, named_errors, save_array, write_json
from nmoe_core.base.compute.api import Map
from nmoe_core.base.fingerprint import read_sealed
from nmoe_core.config.transforms import LinesTable, TransformTable
from nmoe_core.prep.incremental.known_keys import (
    KEPT_NAME,
    KeyWriter,
    KnownKeys,
    RecordKeys,
    are_usable,
    seal_keys,
)
from nmoe_core.prep.incremental.new_records import read_block
from nmoe_core.prep.incremental.record_digests import DIGESTS_NAME, RecordDigests
from nmoe_core.prep.pass_plan import PassPlan
from nmoe_core.prep.tokenize import BlockTokenizer
from nmoe_core.sources.records import Block, Rows
from nmoe_core.text.normalise import normalize_batch
from nmoe_core.text.transforms.corpus import table_path

SHARED_NAME = "shared"
KEYS_NAME = "keys"
_DONE_NAME = "done.json"
_PAIR = np.dtype([("key", "<u8"), ("row", "<i8")])
_PART_BYTES = 2**30  # bytes of the source for each file of keys
_MAX_PART_BITS = 10
_HELD_BYTES = 64 * 2**20


class _BlockJob(NamedTuple):
    """A block whose keys are computed."""

    step: int
    block: Block
    rows: Rows
    kept: Path | None
    """Directory of the keys of an earlier pass."""
    digests: np.ndarray | None
    """uint64: what earlier transforms decided about each record of the block."""


class _PartJob(NamedTuple):
    """A file of keys to sort."""

    path: Path
    table: TransformTable


class _Decided(NamedTuple):
    """What a file of keys decides."""

    shared: np.ndarray
    """uint64 `[2, keys]`: ascending keys, and the row number of the first record of each."""
    removed: np.ndarray
    """_PAIR: keys, and the records that lose their lines or paragraphs."""


def find_shared(plan: PassPlan, directory: Path, pool: Map) -> bool:
    """Write the tables and digests of a pass to a directory. Returns False, and does nothing, if
    they are there already."""
    tables = plan.settings.transforms
    steps = [step for step, table in enumerate(tables) if table.reads_corpus]
    made_from = plan.identity()
    names = [*(table_path(directory, step).name for step in steps), DIGESTS_NAME]
    there = read_sealed(directory / _DONE_NAME) or {}
    if there.get("made_from") == made_from and all((directory / one).is_file() for one in names):
        return False
    shutil.rmtree(directory, ignore_errors=True)
    (directory / KEYS_NAME).mkdir(parents=True)
    of_record = {**plan.settings.identity(), "max_tokens": None}
    of_record["reading"] = plan.split.source.reading.digest
    kept: Path | None = plan.old_dir / KEPT_NAME
    if not plan.settings.reuse or not are_usable(plan.old_dir / KEPT_NAME, of_record):
        kept = None
    digests = np.zeros(0, np.uint64)
    for step in steps:
        parts = _Parts(directory / "parts", plan.split.source.size_bytes())
        keys = KeyWriter(directory / KEYS_NAME, step)
        for found, num_rows in pool(block_keys, _blocks(plan, step, kept, digests)):
            parts.add(found)
            keys.add(found)
            if num_rows > len(digests):
                digests.resize(max(num_rows, 2 * len(digests)), refcheck=False)
        keys.close()
        jobs = [_PartJob(path, tables[step]) for path in parts.close()]
        shared = [np.zeros((2, 0), np.uint64)]
        for decided in pool(decide, jobs):
            shared.append(decided.shared)
            factor = np.uint64(2 * step + 1)
            np.add.at(digests, decided.removed["row"], decided.removed["key"] * factor)
        _save(table_path(directory, step), np.concatenate(shared, axis=1))
        shutil.rmtree(directory / "parts")
    _save(directory / DIGESTS_NAME, digests)
    seal_keys(directory / KEYS_NAME, of_record)
    write_json(directory / _DONE_NAME, sealed({"made_from": made_from}))
    return True


def block_keys(worker: BlockTokenizer, job: _BlockJob) -> tuple[RecordKeys, int]:
    """The keys of the records of a block, and the number of records up to its end."""
    chain = worker.transforms
    assert chain is not None
    known = None if job.kept is None else KnownKeys(job.kept, job.step)
    first = job.block.start.row
    digests = None if job.digests is None else RecordDigests(Path(), job.digests, first)
    read = read_block(job.block, job.rows, known, digests, chain.key_columns)
    zeros = np.zeros(0, np.int64)
    empty = RecordKeys(
        zeros, read.keys[:0], zeros.astype(np.uint64), zeros, zeros.astype(np.uint64)
    )
    parts = [empty]
    if known is not None and read.match is not None:
        lines, numbers, *_ = read.match
        salts = chain.salts(read.known_columns(chain.columns), len(lines), job.step)
        parts.append(known.take(numbers, lines + first, salts))
    readable = [i for i in range(len(read.records.rows)) if i not in read.records.bad]
    wanted = np.array(readable, np.int64)
    for part, raw in read.batches(wanted, chain.columns):
        texts, payloads = normalize_batch(raw.texts)
        batch = raw._replace(texts=texts, payloads=payloads, source=worker.settings.name)
        keys = chain.keys(batch, job.step)
        counts = np.bincount(keys.places, minlength=len(texts))
        rows = np.asarray(batch.rows, np.int64)
        salts = chain.salts(batch.columns, len(texts), job.step)
        parts.append(RecordKeys(rows, read.keys[wanted[part]], salts, counts, keys.hashes))
    return RecordKeys.joined(parts), job.block.end.row


def decide(worker: object, job: _PartJob) -> _Decided:
    """Sort the keys of a file, and decide which of their lines or paragraphs are removed."""
    least = job.table.boilerplate_documents if isinstance(job.table, LinesTable) else 2
    pairs = np.fromfile(regular(job.path), _PAIR)
    order = np.argsort(pairs["key"])
    begins, counts = _groups(pairs["key"][order])
    pairs = pairs[order[np.repeat(counts >= least, counts)]]  # only few are in so large groups
    pairs = pairs[np.lexsort((pairs["row"], pairs["key"]))]
    is_of_lines = isinstance(job.table, LinesTable)
    if is_of_lines:  # a document counts once
        is_new = np.ones(len(pairs), np.bool_)
        is_new[1:] = pairs[1:] != pairs[:-1]
        pairs = pairs[is_new]
    begins, counts = _groups(pairs["key"])
    is_shared = counts >= least
    firsts = pairs["row"][begins]
    is_removed = np.repeat(is_shared, counts)
    if not is_of_lines:
        is_removed &= pairs["row"] != np.repeat(firsts, counts)
    shared = np.stack([pairs["key"][begins], firsts.astype(np.uint64)])[:, is_shared]
    return _Decided(shared, pairs[is_removed])


def _groups(ordered: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where each group of equal values begins, and how many values it has."""
    is_first = np.ones(len(ordered), np.bool_)
    is_first[1:] = ordered[1:] > ordered[:-1]
    begins = np.flatnonzero(is_first)
    return begins, np.diff(begins, append=len(ordered))


class _Parts:
    """Files of keys, by their high bits, so that all keys of a file precede those of the next."""

    def __init__(self, directory: Path, size_bytes: int | None) -> None:
        directory.mkdir()
        bits = _MAX_PART_BITS if size_bytes is None else (size_bytes // _PART_BYTES).bit_length()
        self._bits = min(bits, _MAX_PART_BITS)
        self._paths = [directory / f"{part:04d}.keys" for part in range(2**self._bits)]
        self._held: list[np.ndarray] = []
        self._held_bytes = 0

    def add(self, found: RecordKeys) -> None:
        pairs = np.empty(len(found.hashes), _PAIR)
        pairs["key"] = found.hashes ^ np.repeat(found.salts, found.counts)
        pairs["row"] = np.repeat(found.rows, found.counts)
        self._held.append(pairs)
        self._held_bytes += pairs.nbytes
        if self._held_bytes > _HELD_BYTES:
            self._flush()

    def close(self) -> list[Path]:
        """Write what is held; the files that have keys, in order."""
        self._flush()
        return [path for path in self._paths if path.is_file()]

    def _flush(self) -> None:
        pairs = np.concatenate([np.zeros(0, _PAIR), *self._held])
        self._held.clear()
        self._held_bytes = 0
        parts = np.zeros(len(pairs), np.uint16)
        if self._bits:
            parts = (pairs["key"] >> np.uint64(64 - self._bits)).astype(np.uint16)
            pairs = pairs[np.argsort(parts, kind="stable")]
        bounds = np.append(0, np.cumsum(np.bincount(parts, minlength=len(self._paths))))
        for path, start, end in zip(self._paths, bounds[:-1].tolist(), bounds[1:].tolist()):
            if end > start:
                with named_errors(path), open(path, "ab") as file:
                    file.write(pairs[start:end].data)


def _blocks(
    plan: PassPlan, step: int, kept: Path | None, digests: np.ndarray
) -> Iterator[_BlockJob]:
    rows = plan.split.rows
    is_later = len(digests) > 0  # earlier transforms decided about all records
    for block in plan.split.source.blocks():
        if rows.stop is not None and block.start.row >= rows.stop:
            return
        of_block = digests[block.start.row : block.end.row].copy() if is_later else None
        yield _BlockJob(step, block, rows, kept, of_block)


def _save(path: Path, values: np.ndarray) -> None:
    with atomic_file(path) as file:
        save_array(file, values)
