"""`DeterministicLoader`: this rank's rows of the global stream, batch by batch.

The stream is a pure function of the plan; a batch is `batch_size` consecutive sequences and a rank
owns a contiguous run of them, so any world size reads the same stream and the position is one
number: that of the last batch returned, also where a thread reads ahead. Train stops before a batch
that would not be whole; valid gives its last rows as a short batch, since each is to be seen once.
A batch's memory is used again only when nobody holds the batch or a view of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from loader.arguments import check_arguments, check_plan_allows, rank_rows, wrapper
from loader.buffers import HeldBuffers, pinned_tensor
from loader.config import resolve_plan
from loader.errors import ConfigError, PlanError, StateError
from loader.plan import LoaderPlan
from loader.prefetch import Prefetcher, weak_method
from loader.state import make_state, resume
from loader.stream import RankRows, Split, Stream


class Batch(NamedTuple):
    """A batch and what it is made of.

    inputs, targets: `[local_batch, seq_len]`. source_index: int64 [local_batch], an index of
    `source_names`. document_spans: for each row, int64 [num_documents, 2], start and end in
    `inputs` of the documents in it, end exclusive and past the EOS; the first and last may be parts
    of documents. They come from the index files; None where a source has none. lr_scale: factor of
    the learning rate at this step. sequence_index: int64 [local_batch], each row's number in the
    global stream. global_sequence_index: number of the global batch's first sequence, equal on all
    ranks.
    """

    inputs: Any
    targets: Any
    source_index: np.ndarray
    source_names: tuple[str, ...]
    document_spans: tuple[np.ndarray, ...] | None
    lr_scale: float
    sequence_index: np.ndarray
    global_sequence_index: int


class _Rows(NamedTuple):
    """Rows of a batch: filled memory as the caller's kind of array, source and window of each."""

    memory: Any
    sources: np.ndarray
    windows: np.ndarray


class DeterministicLoader:
    """Reads this rank's part of a plan's stream. Has the state shape of torchdata's `Stateful`.

    Args:
        plan: A checked plan.
        rank: Number of this rank.
        world_size: Number of ranks that share each batch; at most `batch_size`.
        split: `train` or `valid`.
        backend: `torch` or `numpy` arrays; `auto` is torch where it is installed.
        dtype: Type of inputs and targets: `int64`, `int32` or `uint32`. Packed targets hold -100,
            so they cannot be `uint32`.
        prefetch: Batches that a thread reads ahead; 0 reads in `next`.
        pin_memory: Page-locked tensors, from torch's own pool.

    Raises:
        ConfigError: An argument is out of range.
        PlanError, FormatError: The plan's data cannot be read; see `loader.stream.Stream`.
    """

    def __init__(
        self,
        plan: LoaderPlan,
        rank: int = 0,
        world_size: int = 1,
        split: Split = "train",
        backend: str = "auto",
        *,
        dtype: str = "int64",
        prefetch: int = 0,
        pin_memory: bool = False,
    ) -> None:
        check_arguments(rank, world_size, split, backend, dtype, prefetch, pin_memory)
        check_plan_allows(plan, world_size, dtype)
        self._backend, self._wrap = backend, wrapper(backend)
        self.rank, self.world_size = rank, world_size
        self.split: Split = split
        stream = Stream(plan, split)
        self._read_from(plan, stream)
        first, last = rank_rows(plan.batch_size, rank, world_size)
        self._rank_rows = RankRows(plan.batch_size, first, last)
        self._is_packed = stream.is_packed
        shape = stream.shape(last - first)
        self._pin_memory, self._dtype = pin_memory, np.dtype(dtype)
        self._buffers = HeldBuffers(partial(np.empty, shape, self._dtype))
        self._prefetch = Prefetcher(weak_method(self._fill), prefetch) if prefetch else None

    @property
    def num_steps(self) -> int:
        """Batches from the start of the stream to its end."""
        return -(-self._end // self.plan.batch_size)

    @property
    def num_sequences(self) -> int:
        """Sequences from the start of the stream to its end, over all ranks."""
        return self._end

    @property
    def step(self) -> int:
        """Batches before the next one."""
        return -(-self._next // self.plan.batch_size)

    def next(self) -> tuple[Any, Any]:
        """The next batch: inputs and targets, int64 `[local_batch, seq_len]` each.

        Targets are inputs shifted by one token. Both are views of one array: copy one before
        writing to it in place, move `inputs` and `targets` to a device before they are made
        contiguous, and flatten with `reshape(-1)`, not `view(-1)`. Under best-fit packing they are
        arrays of their own, and targets hold -100 where there is nothing to predict.

        Raises:
            StopIteration: The plan has come to its end.
        """
        return self._split(self._read().memory)

    def next_with_meta(self) -> Batch:
        """The next batch and what it is made of. Raises as `next` does.

        Raises:
            FormatError: An index is missing or not of its file (E-INDEX-...); the loader stays
                where it was.
        """
        first = self._next
        rows = self._read()
        try:
            spans = self._open_stream().spans(rows.sources, rows.windows)
        except BaseException:
            self._next = first
            raise
        inputs, targets = self._split(rows.memory)
        offset, _ = rank_rows(self._size(first), self.rank, self.world_size)
        return Batch(
            inputs=inputs,
            targets=targets,
            source_index=rows.sources.copy(),
            source_names=self.source_names,
            document_spans=spans,
            lr_scale=self._open_stream().lr_scale(first),
            sequence_index=first + offset + np.arange(len(rows.sources)),
            global_sequence_index=first,
        )

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        """Batches from the current position to the end."""
        return self

    def __next__(self) -> tuple[Any, Any]:
        """See `next`."""
        return self.next()

    def seek(self, n: int) -> None:
        """Make sequence `n` the first of the next batch: the state after n / batch_size batches.

        Args:
            n: Sequences before it over all ranks; a multiple of `batch_size`, or the end.

        Raises:
            StateError: It is neither, or lies outside the stream (E-SEEK).
        """
        found = repr(n)
        if isinstance(n, bool) or not isinstance(n, int | np.integer) or not 0 <= n <= self._end:
            raise StateError(
                "no such position", found=found, expected=f"0 to {self._end}", code="E-SEEK"
            )
        if n % self.plan.batch_size and n != self._end:
            raise StateError(
                "position is inside a batch",
                found=found,
                expected=f"a multiple of batch_size = {self.plan.batch_size}",
                code="E-SEEK",
            )
        self._next = int(n)

    def skip(self) -> None:
        """Pass over the next batch without reading it. Raises StopIteration at the end."""
        if self._next >= self._end:
            raise StopIteration
        self._next += self._size(self._next)

    def seek_step(self, step: int) -> None:
        """`seek(step * batch_size)`."""
        self.seek(step * self.plan.batch_size)

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch returned: JSON values, equal on all ranks."""
        return make_state(self.plan, self.split, self._next, self.metrics())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was saved, on any rank of any world size.

        A state that counts what another run read of each source (`loader.offsets`) makes a plan of
        its own, which begins there with step 0; `plan` is then that one.

        Raises:
            StateError: The state is malformed, of another plan or split, or its position does not
                exist; the loader stays where it was.
            PlanError: A source has not what is left to read of it (E-PLAN-SHORT); the same.
        """
        before, stream, place = self.plan, self._open_stream(), self._next
        plan, n = resume(state, before, self.split, stream)
        if plan is before:
            self.seek(n)
            return
        if self._prefetch is not None:
            self._prefetch.close()
        self._read_from(plan, Stream(plan, self.split))
        try:
            self.seek(n)
        except StateError:
            self._read_from(before, stream)
            self._next = place
            raise
        stream.close()

    def metrics(self) -> dict[str, dict[str, float]]:
        """Read so far over all ranks, by source: sequences, tokens (without padding), epochs."""
        stream, n = self._open_stream(), self._next
        counts, epochs = stream.counts_before(n).tolist(), stream.epochs_before(n).tolist()
        rows = zip(self.source_names, counts, stream.tokens_before(n), epochs)
        return {
            name: {"sequences": count, "tokens": tokens, "epochs": epoch}
            for name, count, tokens, epoch in rows
        }

    def lr_scale(self, step: int | None = None) -> float:
        """The learning rate's factor at a step; the next one when left out."""
        n = self._next if step is None else step * self.plan.batch_size
        return self._open_stream().lr_scale(n)

    def per_source(self) -> dict[str, DeterministicLoader]:
        """A loader of each valid source alone: unmixed, finite, from its first window to its last.

        Raises:
            ConfigError: The loader reads `train`, which is mixed.
        """
        if self.split != "valid":
            raise ConfigError("only valid is read by source", where="split", found=self.split)
        make = partial(
            DeterministicLoader,
            rank=self.rank,
            world_size=self.world_size,
            split="valid",
            backend=self._backend,
            dtype=self._dtype.name,
            pin_memory=self._pin_memory,
        )
        plans = [replace(self.plan, valid=(source,)) for source in self.plan.valid]
        return {name: make(plan) for name, plan in zip(self.source_names, plans)}

    def close(self) -> None:
        """Unmap all files; the loader cannot be read afterwards. May be called again."""
        if self._prefetch is not None:
            self._prefetch.close()
        if self._stream is not None:
            self._stream.close()
        self._stream = None

    def __enter__(self) -> Self:
        """The loader itself; leaving the block closes it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def _read_from(self, plan: LoaderPlan, stream: Stream) -> None:
        """Take a plan's stream, from its start; nothing changes where it has no whole step."""
        whole = stream.num_sequences // plan.batch_size
        end = whole * plan.batch_size if self.split == "train" else stream.num_sequences
        if not end:
            raise PlanError(
                "the plan ends within its first step",
                where=plan.plan_id,
                found=f"{stream.num_sequences} sequences",
                expected=f"at least batch_size = {plan.batch_size}",
                code="E-PLAN-SHORT",
            )
        self.plan, self.source_names = plan, stream.source_names
        self._stream: Stream | None = stream
        self._end, self._next = end, 0

    def _open_stream(self) -> Stream:
        if self._stream is None:
            raise StateError("the loader is closed", code="E-STATE-CLOSED")
        return self._stream

    def _read(self) -> _Rows:
        """This rank's rows of the next batch; the position moves on once they are read."""
        self._open_stream()
        if self._next >= self._end:
            raise StopIteration
        step = self._next // self.plan.batch_size
        rows = self._fill(step) if self._prefetch is None else self._prefetch.get(step)
        self._next += self._size(self._next)
        return rows

    def _size(self, n: int) -> int:
        return min(self.plan.batch_size, self._end - n)

    def _fill(self, step: int) -> _Rows:
        """Read a step's rows. With prefetch on, called from its thread alone."""
        n, stream, rows = step * self.plan.batch_size, self._open_stream(), self._rank_rows
        if n + rows.size > self._end:
            rows = self._last_rows(self._end - n)
        elif not self._pin_memory:
            memory = self._buffers.take()
            return _Rows(self._wrap(memory), *stream.read(n, rows, memory))
        shape = stream.shape(rows.last - rows.first)
        if self._pin_memory:
            pinned = pinned_tensor(shape, self._dtype)
            return _Rows(pinned, *stream.read(n, rows, pinned.numpy()))
        memory = np.empty(shape, self._dtype)
        return _Rows(self._wrap(memory), *stream.read(n, rows, memory))

    def _last_rows(self, size: int) -> RankRows:
        if size <= 0:
            raise StopIteration
        return RankRows(size, *rank_rows(size, self.rank, self.world_size))

    def _split(self, memory: Any) -> tuple[Any, Any]:
        if self._is_packed:
            return memory[0], memory[1]
        if isinstance(memory, np.ndarray):
            return memory[:, :-1], memory[:, 1:]
        seq_len = self.plan.seq_len
        return memory.narrow(1, 0, seq_len), memory.narrow(1, 1, seq_len)


def build_loader(
    cfg: object,
    rank: int = 0,
    world_size: int = 1,
    split: Split = "train",
    print_fn: Callable[[str], None] | None = None,
    backend: str = "auto",
    *,
    dtype: str = "int64",
    prefetch: int = 0,
    pin_memory: bool = False,
    cache_dir: str | Path | None = None,
) -> tuple[DeterministicLoader, LoaderPlan]:
    """Open a plan, or plan a run from its settings, and open its loader.

    Args:
        cfg: A plan, a path to one (`.json`) or to a TOML file, a mapping, or an object with the
            settings as attributes; see `loader.config`. Or the URL of a plan, see `loader.remote`.
        rank, world_size, split, backend, dtype, prefetch, pin_memory: See `DeterministicLoader`.
        print_fn: Called on rank 0 with one line that says what was opened.
        cache_dir: Where files of a URL are kept.

    Raises:
        ConfigError, PlanError, FormatError: Before anything is read from a shard; for arguments,
            before a plan is made.
    """
    check_arguments(rank, world_size, split, backend, dtype, prefetch, pin_memory)
    if isinstance(cfg, str) and "://" in cfg:
        from loader.remote import fetch_plan

        cfg = fetch_plan(cfg, cache_dir)
    plan = resolve_plan(cfg)
    loader = DeterministicLoader(
        plan,
        rank,
        world_size,
        split,
        backend,
        dtype=dtype,
        prefetch=prefetch,
        pin_memory=pin_memory,
    )
    if print_fn is not None and rank == 0:
        print_fn(
            f"loader {split}: plan {plan.plan_id} {plan.plan_hash[:12]}, "
            f"{len(loader.source_names)} sources, {loader.num_steps} steps of "
            f"{plan.batch_size} x {plan.seq_len} tokens"
        )
    return loader, plan
