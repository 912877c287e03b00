"""Appends the documents of blocks to shards: new documents, and documents that are copied from old
files.

Consecutive documents of an old file are copied together, even across blocks. New documents are
buffered over several blocks, because one write to a shard takes as long as encoding many documents.
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from nmoe_core.prep.incremental.reuse import KnownDocuments, Run
from nmoe_core.prep.passthrough_columns import PassthroughColumns, StagedChanges
from nmoe_core.prep.tokenize import DROPPED, Columns, TokenizedBlock
from nmoe_core.shards.lines import DROPPED_ROW, StagedLines
from nmoe_core.shards.writer import ShardWriter

_MAX_WAITING_BYTES = 8 * 2**20  # bytes of tokens of new documents to buffer: about three blocks


class _Waiting(NamedTuple):
    """Known documents that are still to be copied to a shard."""

    number: int
    num_documents: int


class Appender:
    """Appends to the shards of a pass (`writers`, by shard number), to their passthrough columns,
    and to the record of what transforms changed."""

    def __init__(
        self,
        writers: Mapping[int, ShardWriter],
        lines: StagedLines,
        columns: PassthroughColumns,
        changes: StagedChanges,
        known: KnownDocuments,
    ) -> None:
        self._writers = writers
        self._lines = lines
        self._columns = columns
        self._changes = changes
        self._known = known
        self._waiting = dict[int, _Waiting]()
        self._new = dict[int, list[Run]]()
        self._new_bytes = 0
        there = [file for writer in writers.values() for file in writer.state]
        self.num_documents = sum(num_documents for _, num_documents, _ in there)
        """Documents in the shards, including buffered ones."""
        self.num_tokens = sum(num_tokens for num_tokens, _, _ in there)
        """Tokens of these documents."""

    def add(self, block: TokenizedBlock, stop: int) -> None:
        """Append the documents among the first `stop` records of a block."""
        columns = block.columns
        self._drop(columns, stop)
        ids = memoryview(block.ids)
        stored = np.flatnonzero(columns.id_bytes)
        stored = stored[np.argsort(columns.buckets[stored], kind="stable")]
        num_tokens = columns.num_tokens[stored]
        id_bytes = columns.id_bytes[stored]
        numbers = columns.numbers[stored]
        buckets = columns.buckets[stored]
        is_new = numbers < 0
        all_ends, new_ends, token_ends, id_ends = (
            [0, *np.cumsum(sizes).tolist()]
            for sizes in (num_tokens, is_new, num_tokens * is_new, id_bytes * is_new)
        )
        # A run belongs to one shard. Its documents are all new, or consecutive in one old file, so
        # that number minus index is the same for all of them.
        offsets = np.where(is_new, np.iinfo(np.int64).min, numbers - np.arange(len(numbers)))
        is_first = np.diff(buckets, prepend=-1).astype(np.bool_)
        is_first[1:] |= offsets[1:] != offsets[:-1]
        for first, last in pairwise([*np.flatnonzero(is_first).tolist(), len(stored)]):
            bucket = int(buckets[first])
            # A budget may end inside the block.
            last = first + int(np.searchsorted(stored[first:last], stop))
            if last == first:
                continue
            self.num_documents += last - first
            self.num_tokens += all_ends[last] - all_ends[first]
            self._columns.add(bucket, block.kept, first, last)
            if not is_new[first]:
                self._wait(bucket, _Waiting(int(numbers[first]), last - first))
                continue
            self._copy(bucket)
            new = Run(
                block.tokens[token_ends[first] : token_ends[last]],
                num_tokens[first:last],
                ids[id_ends[first] : id_ends[last]],
                id_bytes[first:last],
                block.lines[new_ends[first] : new_ends[last]],
                _rows(block.changes, new_ends[first], new_ends[last]),
            )
            self._new.setdefault(bucket, []).append(new)
        self._new_bytes += block.tokens.nbytes
        if self._new_bytes > _MAX_WAITING_BYTES:
            self._append_new()

    def append_all(self) -> None:
        """Append the buffered documents."""
        for bucket in list(self._waiting):
            self._copy(bucket)
        self._append_new()

    def _drop(self, columns: Columns, stop: int) -> None:
        """Note which of the first `stop` records left no document."""
        is_dropped = np.isin(columns.outcomes, DROPPED) & columns.lines["key"].any(axis=1)
        dropped = np.flatnonzero(is_dropped[:stop])
        rows = np.empty(len(dropped), DROPPED_ROW)
        rows["line"] = columns.lines[dropped]
        rows["outcome"] = columns.outcomes[dropped]
        rows["is_emptied"] = columns.are_emptied[dropped]
        buckets = columns.buckets[dropped]
        for bucket in np.unique(buckets).tolist():
            if bucket in self._writers:
                self._lines.drop(bucket, rows[buckets == bucket])

    def _wait(self, bucket: int, more: _Waiting) -> None:
        """Delay a copy, so that documents that follow in the old file are copied in the same
        call."""
        before = self._waiting.get(bucket)
        if before is not None and before.number + before.num_documents == more.number:
            num_documents = before.num_documents + more.num_documents
            self._waiting[bucket] = _Waiting(before.number, num_documents)
            return
        self._copy(bucket)
        self._waiting[bucket] = more

    def _copy(self, bucket: int) -> None:
        if (waiting := self._waiting.pop(bucket, None)) is not None:
            self._append_new_of(bucket)  # the source has them before the documents to copy
            self._append(bucket, self._known.run(waiting.number, waiting.num_documents))

    def _append_new(self) -> None:
        for bucket in list(self._new):
            self._append_new_of(bucket)
        self._new_bytes = 0

    def _append_new_of(self, bucket: int) -> None:
        runs = self._new.pop(bucket, [])
        if len(runs) == 1:  # no copy, since the tokens may be those of one long document
            self._append(bucket, runs[0])
        elif runs:
            tokens, num_tokens, ids, id_bytes, lines, changes = zip(*runs)
            sizes = np.concatenate(num_tokens), np.concatenate(id_bytes)
            all_ids = memoryview(b"".join(ids))
            rows = [batch for of_run in changes for batch in of_run]
            joined = np.concatenate(tokens), sizes[0], all_ids, sizes[1], np.concatenate(lines)
            self._append(bucket, Run(*joined, rows))

    def _append(self, bucket: int, run: Run) -> None:
        self._writers[bucket].add_batch(run.tokens, run.num_tokens, run.ids, run.id_bytes)
        self._lines.append(bucket, run.lines.tobytes())
        for rows in run.changes:
            self._changes.add(bucket, rows)


def _rows(changes: Any, first: int, last: int) -> list[Any]:
    """Rows of a record batch; none if there is no batch."""
    return [] if changes is None else [changes.slice(first, last - first)]
