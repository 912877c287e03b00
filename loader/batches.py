"""Batches of one rank: their rows, their memory, and the last, short batch.

Where the last valid batch has fewer rows than there are ranks, ranks share rows: each gets one
whole row as inputs and a part of its targets, the others being -100. So every target is on one
rank, no rank is without a target, and where batches begin does not depend on the number of ranks.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np

from loader.arguments import ReadOptions, wrapper
from loader.errors import ConfigError
from loader.files.spans import IGNORE_INDEX
from loader.plan.records import LoaderPlan
from loader.rows.buffers import HeldBuffers, pinned_tensor
from loader.rows.stream import RankRows, Stream


class Batch(NamedTuple):
    """A batch and what it is made of.

    inputs, targets: `[local_batch, seq_len]`. source_index: int64 [local_batch], an index of
    `source_names`. document_spans: for each row, int64 [num_documents, 2], start and end in
    `inputs` of the documents in it, end exclusive and past the EOS; the first and last may be parts
    of documents. They come from the index files; None where a source has none. lr_scale: factor of
    the learning rate at this step. sequence_index: int64 [local_batch], each row's number in the
    global stream; two ranks have the same number where they share a row.
    global_sequence_index: number of the global batch's first sequence, equal on all ranks.
    """

    inputs: Any
    targets: Any
    source_index: np.ndarray
    source_names: tuple[str, ...]
    document_spans: tuple[np.ndarray, ...] | None
    lr_scale: float
    sequence_index: np.ndarray
    global_sequence_index: int


class Rows(NamedTuple):
    """Rows of a batch: inputs and targets as the caller's kind of array, the number of the first
    row in the batch, and source and window of each."""

    inputs: Any
    targets: Any
    first: int
    sources: np.ndarray
    windows: np.ndarray


class _Share(NamedTuple):
    """A rank's part of the targets of a row: part number `part` of `parts` equal ones."""

    row: int
    part: int
    parts: int


class BatchReader:
    """Reads one rank's rows of any batch of a stream.

    Args:
        plan, stream: What is read.
        end: Sequences up to the end of the last batch.
        options: Ranks and memory.

    Raises:
        ConfigError: Ranks would share rows of the last batch, and the type of its targets cannot
            hold -100, or the batch has fewer targets than there are ranks.
    """

    def __init__(self, plan: LoaderPlan, stream: Stream, end: int, options: ReadOptions) -> None:
        self._stream, self._end, self._options = stream, end, options
        self._batch_size, self._seq_len = plan.batch_size, plan.seq_len
        self._wrap, self._dtype = wrapper(options.backend), np.dtype(options.dtype)
        self._own = RankRows(plan.batch_size, *options.rows(plan.batch_size))
        shape = stream.shape(self._own.last - self._own.first, options.contiguous)
        self._buffers = HeldBuffers(partial(np.empty, shape, self._dtype))
        size = end % plan.batch_size
        self._last = self._last_share(end - size, size) if 0 < size < options.world_size else None

    def read(self, step: int) -> Rows:
        """Rows of batch number `step`; a batch past the end raises StopIteration."""
        n = step * self._batch_size
        size = min(self._batch_size, self._end - n)
        if size <= 0:
            raise StopIteration
        if size < self._batch_size and self._last is not None:
            return self._shared(n, size, self._last)
        rows = self._own if size == self._batch_size else RankRows(size, *self._options.rows(size))
        array, memory = self._memory(rows)
        return Rows(*self._parts(memory), rows.first, *self._stream.read(n, rows, array))

    def _memory(self, rows: RankRows) -> tuple[np.ndarray, Any]:
        """Memory to fill, and the same as the caller's kind of array."""
        if not self._options.pin_memory and rows is self._own:
            array = self._buffers.take()
            return array, self._wrap(array)
        shape = self._stream.shape(rows.last - rows.first, self._options.contiguous)
        return self._fresh(shape)

    def _fresh(self, shape: tuple[int, ...]) -> tuple[np.ndarray, Any]:
        if self._options.pin_memory:
            pinned = pinned_tensor(shape, self._dtype)
            return pinned.numpy(), pinned
        array = np.empty(shape, self._dtype)
        return array, self._wrap(array)

    def _shared(self, n: int, size: int, share: _Share) -> Rows:
        array, memory = self._fresh((2, 1, self._seq_len))
        rows = RankRows(size, share.row, share.row + 1)
        sources, windows = self._stream.read(n, rows, array)
        targets = array[1, 0]
        counted = np.flatnonzero(targets != IGNORE_INDEX)
        begin, end = (len(counted) * i // share.parts for i in (share.part, share.part + 1))
        targets[counted[:begin]] = targets[counted[end:]] = IGNORE_INDEX
        return Rows(*self._parts(memory), share.row, sources, windows)

    def _parts(self, memory: Any) -> tuple[Any, Any]:
        if memory.ndim == 3:
            return memory[0], memory[1]
        return memory[:, :-1], memory[:, 1:]

    def _last_share(self, n: int, size: int) -> _Share:
        """This rank's part of the batch of `size` rows at sequence `n`, fewer than ranks. Ranks go
        one by one to the row that has the most targets for each of its ranks."""
        world_size = self._options.world_size
        if self._options.dtype == "uint32":
            raise ConfigError(
                f"{world_size} ranks share the {size} rows of the last batch, so targets hold"
                f" {IGNORE_INDEX}",
                where="dtype",
                found="uint32",
                expected="int64 or int32",
            )
        counts = self._targets_of(n, size)
        if world_size > sum(counts):
            raise ConfigError(
                "a rank would get no target of the last batch",
                where="world_size",
                found=world_size,
                expected=f"at most the {sum(counts)} targets of its {size} rows",
                do="set another batch_size, or evaluate on fewer ranks",
            )
        ranks = [min(1, count) for count in counts]
        for _ in range(world_size - sum(ranks)):
            ranks[max(range(size), key=lambda i: counts[i] / max(1, ranks[i]))] += 1
        row = next(i for i in range(size) if self._options.rank < sum(ranks[: i + 1]))
        return _Share(row, self._options.rank - sum(ranks[:row]), ranks[row])

    def _targets_of(self, n: int, size: int) -> list[int]:
        """Targets of each row of a batch; only packed rows have fewer than `seq_len`."""
        if not self._stream.is_packed:
            return [self._seq_len] * size
        found, row = [], np.empty((2, 1, self._seq_len), np.int64)
        for i in range(size):
            self._stream.read(n, RankRows(size, i, i + 1), row)
            found.append(int((row[1] != IGNORE_INDEX).sum()))
        return found
