"""`DeterministicLoader`: this rank's rows of the global stream, batch by batch.

The stream is a pure function of the plan. A batch is `batch_size` consecutive sequences, of which
each rank reads a contiguous part, so any world size reads the same stream. The position is one
number: the position after the last returned batch, even if a thread reads ahead. Train stops before
an incomplete batch, and an iteration continues from the position. Valid returns its last rows as a
short batch, since every row must be read once, and each iteration is a pass from the first batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any, Self, Unpack

import numpy as np

from loader.batches import BatchReader, MemoryOptions, ReadOptions, Rows, check_names
from loader.errors import AttributeConfigError, ConfigError, PlanError, StateError
from loader.plan.records import LoaderPlan
from loader.ranks import check_found, data_rank
from loader.rows.forms import Batch
from loader.rows.prefetch import Prefetcher, weak_method
from loader.rows.stream import Split, Stream
from loader.state import make_state, resume


class DeterministicLoader:
    """Reads this rank's part of a plan's stream. Implements torchdata's `Stateful`.

    The memory of a batch is reused only after the caller has released the batch and its views. Only
    one thread at a time may read a loader.

    Args:
        plan: A checked plan.
        rank, world_size: This rank, and the number of ranks that share each batch, at most
            `batch_size`. By default they are detected: see `loader.ranks.data_rank`.
        split: `train` or `valid`.
        backend: `torch` or `numpy` arrays; `auto` is torch if it is installed.
        memory: See `loader.batches.MemoryOptions`.

    Raises:
        ConfigError: An argument is out of range; for `split="valid"`, also for the reasons listed
            in `loader.batches.BatchReader`.
        PlanError, FormatError: The plan's data cannot be read; see `loader.rows.stream.Stream`.
    """

    def __init__(
        self,
        plan: LoaderPlan,
        rank: int | None = None,
        world_size: int | None = None,
        split: Split = "train",
        backend: str = "auto",
        **memory: Unpack[MemoryOptions],
    ) -> None:
        check_names(memory)
        self._is_rank_found = rank is None  # detected, and not yet compared with torch.distributed
        rank, world_size = data_rank(rank, world_size)
        self._options = ReadOptions(rank, world_size, split, backend, **memory)
        self._options.check_plan(plan)
        self.rank = rank
        self.world_size = world_size
        self.split: Split = split
        self._read_from(plan, Stream(plan, split))
        ahead = self._options.prefetch
        self._prefetch = Prefetcher(weak_method(self._fill), ahead) if ahead else None

    def __repr__(self) -> str:
        plan = self.plan
        own = self._options.rows(self.plan.batch_size)
        return (
            f"<Loader of {self.split}, plan {plan.plan_id} {plan.plan_hash[:12]}: "
            f"step {self.step} of {self.num_steps}, rank {self.rank} of {self.world_size} "
            f"({own.last - own.first} of {plan.batch_size} rows of {plan.seq_len} tokens), "
            f"{', '.join(self.source_names[:4])}{', ...' * (len(self.source_names) > 4)}>"
        )

    def __getstate__(self) -> object:
        raise AttributeConfigError(
            "a loader has open files and cannot be copied or pickled",
            where=repr(self),
            do="send its plan and its state_dict(), and open a loader there",
        )

    def __len__(self) -> int:
        """Number of batches of the whole stream, at any position; equals `num_steps`."""
        return self.num_steps

    @property
    def dataset(self) -> Any:
        """Left out, as `hasattr` says: accelerate and transformers' Trainer would skip batches
        through it. Raises an AttributeError that is a ConfigError."""
        raise AttributeConfigError(
            "skip_first_batches cannot skip batches of a loader, which has no dataset",
            where="dataset",
            do="give the trainer a RowDataset, or call load_state_dict or seek_step",
        )

    @property
    def num_steps(self) -> int:
        """Number of batches of the whole stream."""
        return -(-self._end // self.plan.batch_size)

    @property
    def num_sequences(self) -> int:
        """Number of sequences of the whole stream, over all ranks."""
        return self._end

    @property
    def step(self) -> int:
        """Number of batches before the next batch."""
        return -(-self._next // self.plan.batch_size)

    def next(self) -> Any:
        """The next batch: inputs and targets, int64 `[local_batch, seq_len]` each, or the form that
        `loader.batches.MemoryOptions` describes. Raises StopIteration at the plan's end.

        Targets are inputs shifted by one token. Positions without a target are -100. They occur
        with best-fit packing, and in the last valid batch if ranks share its rows. With
        `contiguous=False` inputs and targets are views of one array: copy a view before you write
        into it, and flatten with `reshape(-1)`.
        """
        rows = self._reader.form(self._read())
        self.skip()
        return rows

    def next_with_meta(self) -> Batch:
        """The next batch in the form `batch`. Raises as `next`, and FormatError if an index is
        missing or does not match its file (E-INDEX-...); after a FormatError the position has not
        changed."""
        batch = self._reader.batch(self._read())
        self.skip()
        return batch

    def read_rows(self, first: int, stop: int) -> Any:
        """Rows `[first, stop)` of the global stream, over all ranks, in the form of `next`; the
        position does not change. Raises IndexError for rows outside complete batches, and
        ConfigError if a thread reads ahead."""
        if self._prefetch is not None:
            raise ConfigError(
                "read_rows cannot be used with prefetch", where="prefetch", expected="0"
            )
        if not 0 <= first < stop <= self._end:
            raise IndexError(f"rows {first} to {stop} of {self._end}")
        self._open_stream()
        return self._reader.form(self._reader.read_rows(first, stop - first))

    def __iter__(self) -> Iterator[Any]:
        """Train: batches from the current position to the end. Valid: one pass from the first
        batch. After `seek` or `load_state_dict`, the first pass starts at the new position instead,
        unless this is the end."""
        if self.split == "train":
            return self
        if not self._is_set or self._next >= self._end:
            self._next = 0
        return iter(self.next, None)

    def __next__(self) -> Any:
        return self.next()

    def seek(self, n: int) -> None:
        """Make sequence `n`, counted over all ranks, the first sequence of the next batch. Raises
        StateError if `n` is neither a multiple of `batch_size` nor the end, or is outside the
        stream (E-SEEK)."""
        self._check_place(n, self._end, self.plan.batch_size)
        self._next = int(n)
        self._is_set = True

    def skip(self) -> None:
        """Skip the next batch without reading it. Raises StopIteration at the end, and ConfigError
        if the rank was detected before torch.distributed was initialised."""
        if self._is_rank_found:
            check_found((self.rank, self.world_size))
            self._is_rank_found = False
        if self._next >= self._end:
            raise StopIteration
        self._next = min(self._next + self.plan.batch_size, self._end)
        self._is_set = False

    def seek_step(self, step: int) -> None:
        """`seek(step * batch_size)`."""
        self.seek(step * self.plan.batch_size)

    def state_dict(self) -> dict[str, Any]:
        """The position after the last returned batch: JSON values, equal on all ranks."""
        return make_state(self.plan, self.split, self._next, self._counts())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was saved, on any rank of any world size.

        If the state has only counts per source from another run (`loader.plan.continuation`), the
        loader makes a new plan that continues there at step 0, and `plan` becomes this plan.

        Raises:
            StateError: The state is malformed, belongs to another plan or split, or its position
                does not exist. After this error the loader's position has not changed.
            PlanError: A source has too few tokens for the rest of the plan (E-PLAN-SHORT).
        """
        stream = self._open_stream()
        plan, n = resume(state, self.plan, self.split, stream)
        if plan is self.plan:
            self.seek(n)
            return
        if self._prefetch is not None:
            self._prefetch.close()
        self._read_from(plan, Stream(plan, self.split), n)
        self._is_set = True
        stream.close()

    def metrics(self) -> dict[str, dict[str, float]]:
        """Counts so far over all ranks, by source: sequences, tokens (without padding), epochs;
        and, if the plan masks documents, `masked`: the number of masked targets."""
        found = self._counts()
        masked = self._open_stream().masked_before(self._next)
        for name, count in zip(self.source_names, masked or ()):
            found[name]["masked"] = count
        return found

    def _counts(self) -> dict[str, dict[str, float]]:
        stream = self._open_stream()
        n = self._next
        counts = stream.schedule.counts_before(n)
        epochs = stream.schedule.epochs_before(n)
        rows = zip(self.source_names, counts.tolist(), stream.tokens_before(n), epochs.tolist())
        return {
            name: {"sequences": count, "tokens": tokens, "epochs": epoch}
            for name, count, tokens, epoch in rows
        }

    def lr_scale(self, step: int | None = None) -> float:
        """Factor of the learning rate at a step, by default at the next step."""
        n = self._next if step is None else step * self.plan.batch_size
        return self._open_stream().schedule.lr_scale(n)

    def per_source(self) -> dict[str, DeterministicLoader]:
        """One loader per valid source, which reads it from its first to its last window. Raises
        ConfigError for train."""
        if self.split != "valid":
            raise ConfigError("per_source needs the valid split", where="split", found=self.split)
        chosen: dict[str, Any] = asdict(replace(self._options, prefetch=0))
        plans = [replace(self.plan, valid=(source,)) for source in self.plan.valid]
        return {
            name: DeterministicLoader(plan, **chosen)
            for name, plan in zip(self.source_names, plans)
        }

    def close(self) -> None:
        """Unmap all files; the loader cannot be read afterwards. May be called again."""
        if self._prefetch is not None:
            self._prefetch.close()
        if self._stream is not None:
            self._stream.close()
        self._stream = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_from(self, plan: LoaderPlan, stream: Stream, n: int = 0) -> None:
        """Switch to a plan's stream at sequence `n`; if this raises, the loader is unchanged."""
        batch_size = plan.batch_size
        end = stream.num_sequences
        if self.split == "train":
            end -= end % batch_size
        if not end:
            raise PlanError(
                "the plan is shorter than one step",
                where=plan.plan_id,
                found=f"{stream.num_sequences} sequences",
                expected=f"at least batch_size = {batch_size}",
                code="E-PLAN-SHORT",
            )
        self._check_place(n, end, batch_size)
        self._reader = BatchReader(plan, stream, end, self._options)
        self.plan = plan
        self.source_names = stream.source_names
        self._stream: Stream | None = stream
        self._end = end
        self._next = n
        self._is_set = False  # whether the position was set and no row was read after it

    @staticmethod
    def _check_place(n: int, end: int, batch_size: int) -> None:
        found = repr(n)
        is_whole = isinstance(n, int | np.integer) and not isinstance(n, bool)
        if not is_whole or not 0 <= n <= end:
            raise StateError("no such position", found=found, expected=f"0 to {end}", code="E-SEEK")
        if n % batch_size and n != end:
            expected = f"a multiple of batch_size = {batch_size}"
            raise StateError(
                "position is inside a batch", found=found, expected=expected, code="E-SEEK"
            )

    def _open_stream(self) -> Stream:
        if self._stream is None:
            raise StateError("the loader is closed", code="E-STATE-CLOSED")
        return self._stream

    def _read(self) -> Rows:
        """This rank's rows of the next batch."""
        self._open_stream()
        if self._next >= self._end:
            raise StopIteration
        step = self._next // self.plan.batch_size
        return self._fill(step) if self._prefetch is None else self._prefetch.get(step)

    def _fill(self, step: int) -> Rows:
        """Read a step's rows. With prefetch, only the prefetch thread calls this function."""
        self._open_stream()
        return self._reader.read(step)
