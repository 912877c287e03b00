"""Finds documents that a split already has, by their line or by the SHA-256 of their text.

A pass over a source that grew or changed reuses their tokens and tokenises only new text. A known
line is not parsed: its document is copied as a whole. All processes memory-map the same tables (see
`tables`).
"""

from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson

from loader.files.regular import read_file, regular
from loader.files.shard import open_shard
from nmoe_core.prep.incremental.tables import BY_LINE, BY_TEXT, DOCUMENTS, FILES, KEY, TEXT, OldFile
from nmoe_core.shards.lines import LINE_ROW
from nmoe_core.shards.shard_file import NPY_HEADER_BYTES


class LineMatch(NamedTuple):
    """Known documents among lines, one entry each, and known records that left no document."""

    lines: np.ndarray
    """int64: number of the line."""
    numbers: np.ndarray
    """int64: number of the document; consecutive numbers are adjacent in one file."""
    keys: np.ndarray
    """uint64 `[lines, 2]`."""
    buckets: np.ndarray
    num_tokens: np.ndarray
    id_bytes: np.ndarray
    text_bytes: np.ndarray
    outcomes: np.ndarray
    """Numbers of `prep.tokenize.OUTCOMES`."""
    are_emptied: np.ndarray


class Run(NamedTuple):
    """Consecutive documents, in the form in which a shard file stores them."""

    tokens: np.ndarray
    num_tokens: np.ndarray
    ids: memoryview
    id_bytes: np.ndarray
    lines: np.ndarray
    changes: list[Any]
    """Record batches: what transforms changed in them; empty without transforms."""


class KnownDocuments:
    """The tables of a split; a process opens them on the first lookup."""

    def __init__(self, tables: Path) -> None:
        self._directory = tables
        self._maps: dict[int, tuple[np.ndarray, memoryview]] = {}
        self._changed: dict[str, Any] = {}  # tables of changes, by the path of their file

    @cached_property
    def has_lines(self) -> bool:
        """Whether any line is known."""
        return bool(self._files) and self._by_line.shape[1] > 0

    def find_texts(self, sha256s: Sequence[str]) -> dict[int, np.ndarray]:
        """Tokens of the known texts, without BOS and EOS, by index."""
        if not self._files or not sha256s:
            return {}
        words = np.frombuffer(bytes.fromhex("".join(sha256s)), ">u8").reshape(-1, 4)
        places, found = find_keys(self._by_text, self._documents[TEXT], words.astype(np.uint64))
        rows = self._documents[[7, 8, 11]][:, found].T.tolist()
        return dict(zip(places.tolist(), (self._inner(*row) for row in rows)))

    def find_lines(self, keys: np.ndarray) -> LineMatch:
        """The documents of the known lines; `keys` is uint64 `[lines, 2]`."""
        lines, found = find_keys(self._by_line, self._documents[KEY], keys)
        text_bytes, *places, files = self._documents[6:, found].astype(np.int64)
        starts, ends, id_starts, id_ends = places
        facts = [(file.bucket, file.outcome, file.is_emptied) for file in self._files]
        buckets, outcomes, are_emptied = np.array(facts, np.int32).reshape(-1, 3)[files].T
        sizes = ends - starts, id_ends - id_starts, text_bytes
        kinds = outcomes, are_emptied
        return LineMatch(lines, found + files, keys[lines], buckets, *sizes, *kinds)

    def run(self, number: int, count: int) -> Run:
        """The `count` documents of a file that start at document `number`."""
        file = bisect_right(self._firsts, number) - 1
        documents = self._documents[:, number - file : number - file + count]
        starts, ends, id_starts, id_ends = documents[7:11].astype(np.int64)
        lines = np.empty(count, LINE_ROW)
        lines["key"] = documents[KEY].T
        lines["text_bytes"] = documents[6]
        tokens, ids = self._mapped(file)
        tokens = tokens[starts[0] : ends[-1]]
        ids = ids[id_starts[0] : id_ends[-1]]
        changes = self._changes(file, number - self._firsts[file], count)
        return Run(tokens, ends - starts, ids, id_ends - id_starts, lines, changes)

    @cached_property
    def _files(self) -> list[OldFile]:
        path = self._directory / FILES
        return [OldFile(*row) for row in orjson.loads(read_file(path))] if path.is_file() else []

    @cached_property
    def _firsts(self) -> list[int]:
        """The number of each file's first document. One number is skipped between files, so that
        the last document of a file and the first document of the next file are not consecutive."""
        return [0, *accumulate(file.num_documents + 1 for file in self._files)]

    @cached_property
    def _documents(self) -> np.ndarray:
        return self._load(DOCUMENTS)

    @cached_property
    def _by_text(self) -> np.ndarray:
        return self._load(BY_TEXT)

    @cached_property
    def _by_line(self) -> np.ndarray:
        return self._load(BY_LINE)

    def _inner(self, start: int, end: int, file: int) -> np.ndarray:
        """The tokens of a document without BOS and EOS."""
        return self._mapped(file)[0][start + self._files[file].has_bos : end - 1]

    def _mapped(self, number: int) -> tuple[np.ndarray, memoryview]:
        """The tokens and the ids of a file."""
        if number not in self._maps:
            file = self._files[number]
            ids = np.asarray(np.memmap(regular(file.ids), np.uint8, "r")).data
            self._maps[number] = open_shard(Path(file.npy), file.dtype), ids
        return self._maps[number]

    def _changes(self, number: int, first: int, count: int) -> list[Any]:
        """What transforms changed in documents of a file."""
        file = self._files[number]
        if not file.changes:
            return []
        if file.changes not in self._changed:
            import pyarrow as pa

            with pa.memory_map(regular(file.changes)) as rows:
                self._changed[file.changes] = pa.ipc.open_file(rows).read_all()
        return self._changed[file.changes].slice(file.first_document + first, count).to_batches()

    def _load(self, name: str) -> np.ndarray:
        path = self._directory / name
        is_empty = path.stat().st_size <= NPY_HEADER_BYTES  # an empty file cannot be memory-mapped
        return np.asarray(np.load(regular(path), mmap_mode=None if is_empty else "r"))


def find_keys(
    order: np.ndarray, columns: np.ndarray, words: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Which keys are in a table.

    Args:
        order: uint64 `[2, keys]`: the ascending first words of the keys, and their table columns.
        columns: uint64 `[words, columns]`: the keys of the table.
        words: uint64 `[N, words]`: the keys to look for.

    Returns:
        The indices of the `words` that are in the table, and their table columns.
    """
    if order.shape[1] == 0:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    at = np.searchsorted(order[0], words[:, 0])
    at[at == order.shape[1]] = 0
    found = order[1, at].astype(np.int64)
    places = np.flatnonzero((columns[:, found] == words.T).all(axis=0))
    return places, found[places]
