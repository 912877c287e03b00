"""`DeterministicLoader`: this rank's rows of the global stream, batch by batch.

The stream is a pure function of the plan; a batch is `batch_size` consecutive sequences and a rank
owns a contiguous run of them, so any world size reads the same stream and the position is one
number. Nothing is prefetched and nothing is random. Train stops before a batch that would not be
whole; valid gives its last rows as a short batch, since each is to be seen exactly once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple, Self

import numpy as np

from loader.config import resolve_plan
from loader.errors import ConfigError, PlanError, StateError
from loader.plan import LoaderPlan
from loader.settings import unknown_name
from loader.state import make_state, read_state
from loader.stream import Split, Stream

BACKENDS = ("auto", "numpy", "torch")


class Batch(NamedTuple):
    """A batch and what it is made of.

    inputs, targets: int64 [local_batch, seq_len]. source_index: int64 [local_batch], an index of
    `source_names`. document_spans: for each row, int64 [num_documents, 2], start and end in
    `inputs` of the documents in it, end exclusive and past the EOS; the first and last may be parts
    of documents. sequence_index: int64 [local_batch], each row's number in the global stream.
    global_sequence_index: number of the global batch's first sequence, equal on all ranks.
    """

    inputs: Any
    targets: Any
    source_index: np.ndarray
    source_names: tuple[str, ...]
    document_spans: tuple[np.ndarray, ...]
    lr_scale: float
    sequence_index: np.ndarray
    global_sequence_index: int


class DeterministicLoader:
    """Reads this rank's part of a plan's stream. Has the state shape of torchdata's `Stateful`.

    Args:
        plan: A checked plan.
        rank: Number of this rank.
        world_size: Number of ranks that share each batch; at most `batch_size`.
        split: `train` or `valid`.
        backend: `torch` or `numpy` arrays; `auto` is torch where it is installed.

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
    ) -> None:
        if split not in ("train", "valid"):
            raise unknown_name("split", str(split), ("train", "valid"), "loader")
        _check_ranks(rank, world_size, plan.batch_size)
        self._split = _splitter(backend)
        self.plan, self.rank, self.world_size, self.split = plan, rank, world_size, split
        self._stream: Stream | None = Stream(plan, split)
        self.source_names = self._stream.source_names
        whole = self._stream.num_sequences // plan.batch_size
        self._end = whole * plan.batch_size if split == "train" else self._stream.num_sequences
        if not self._end:
            raise PlanError(
                "the plan ends within its first step",
                where=plan.plan_id,
                found=f"{self._stream.num_sequences} sequences",
                expected=f"at least batch_size = {plan.batch_size}",
                code="E-PLAN-SHORT",
            )
        self._next = 0

    @property
    def num_steps(self) -> int:
        """Batches from the start of the stream to its end."""
        return -(-self._end // self.plan.batch_size)

    @property
    def step(self) -> int:
        """Batches before the next one."""
        return -(-self._next // self.plan.batch_size)

    def next(self) -> tuple[Any, Any]:
        """The next batch: inputs and targets, int64 `[local_batch, seq_len]` each.

        Targets are inputs shifted by one token. Both are views of one array, so copy one before
        writing to it in place; they are not contiguous (`reshape(-1)`, not `view(-1)`).

        Raises:
            StopIteration: The plan has come to its end.
        """
        rows, _ = self._read()
        return self._split(rows)

    def next_with_meta(self) -> Batch:
        """The next batch and what it is made of. Raises as `next` does."""
        first = self._next
        rows, start = self._read()
        stop = start + len(rows)
        inputs, targets = self._split(rows)
        return Batch(
            inputs=inputs,
            targets=targets,
            source_index=self._open_stream().source_index(start, stop),
            source_names=self.source_names,
            document_spans=_spans(rows[:, :-1], self.plan.eos_token_id),
            lr_scale=1.0,
            sequence_index=np.arange(start, stop),
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

    def seek_step(self, step: int) -> None:
        """`seek(step * batch_size)`."""
        self.seek(step * self.plan.batch_size)

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch returned: JSON values, equal on all ranks."""
        return make_state(self.plan, self.split, self._next, self.metrics())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was saved, on any rank of any world size.

        Raises:
            StateError: The state is malformed, of another plan or split, or its position does not
                exist; the loader stays where it was.
        """
        self.seek(read_state(state, self.plan, self.split))

    def metrics(self) -> dict[str, dict[str, float]]:
        """Read so far over all ranks, by source: sequences, tokens (targets), epochs."""
        stream = self._open_stream()
        counts = stream.counts_before(self._next)
        epochs = counts * self.plan.stride / stream.num_tokens
        return {
            name: {"sequences": count, "tokens": count * self.plan.seq_len, "epochs": epoch}
            for name, count, epoch in zip(self.source_names, counts.tolist(), epochs.tolist())
        }

    def close(self) -> None:
        """Unmap all files; the loader cannot be read afterwards. May be called again."""
        if self._stream is not None:
            self._stream.close()
        self._stream = None

    def __enter__(self) -> Self:
        """The loader itself; leaving the block closes it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def _open_stream(self) -> Stream:
        if self._stream is None:
            raise StateError("the loader is closed", code="E-STATE-CLOSED")
        return self._stream

    def _read(self) -> tuple[np.ndarray, int]:
        """This rank's rows of the next batch, int64 `[local_batch, seq_len + 1]`, and the number of
        the first. The position moves on once they are read."""
        stream = self._open_stream()
        size = min(self.plan.batch_size, self._end - self._next)
        if size <= 0:
            raise StopIteration
        first, last = rank_rows(size, self.rank, self.world_size)
        rows = np.empty((last - first, self.plan.seq_len + 1), np.int64)
        stream.read(self._next + first, self._next + last, rows)
        start = self._next + first
        self._next += size
        return rows, start


def build_loader(
    cfg: object,
    rank: int = 0,
    world_size: int = 1,
    split: Split = "train",
    print_fn: Callable[[str], None] | None = None,
    backend: str = "auto",
) -> tuple[DeterministicLoader, LoaderPlan]:
    """Open a plan, or plan a run from its settings, and open its loader.

    Args:
        cfg: A plan, a path to one (`.json`) or to a TOML file, a mapping, or an object with the
            settings as attributes; see `loader.config`.
        rank, world_size, split, backend: See `DeterministicLoader`.
        print_fn: Called on rank 0 with one line that says what was opened.

    Raises:
        ConfigError, PlanError, FormatError: Before anything is read from a shard.
    """
    plan = resolve_plan(cfg)
    loader = DeterministicLoader(plan, rank, world_size, split, backend)
    if print_fn is not None and rank == 0:
        print_fn(
            f"loader {split}: plan {plan.plan_id} {plan.plan_hash[:12]}, "
            f"{len(loader.source_names)} sources, {loader.num_steps} steps of "
            f"{plan.batch_size} x {plan.seq_len} tokens"
        )
    return loader, plan


def rank_rows(num_rows: int, rank: int, world_size: int) -> tuple[int, int]:
    """Rows `[first, last)` of a global batch that a rank owns; earlier ranks take the remainder."""
    share, rest = divmod(num_rows, world_size)
    first = rank * share + min(rank, rest)
    return first, first + share + (rank < rest)


def _check_ranks(rank: int, world_size: int, batch_size: int) -> None:
    if not 1 <= world_size <= batch_size:
        raise ConfigError(
            "a rank would get no row",
            where="world_size",
            found=world_size,
            expected=f"1 to batch_size = {batch_size}",
        )
    if not 0 <= rank < world_size:
        raise ConfigError(
            "no such rank", where="rank", found=rank, expected=f"0 to {world_size - 1}"
        )


def _splitter(backend: str) -> Callable[[np.ndarray], tuple[Any, Any]]:
    """What turns rows into inputs and targets of the caller's kind of array, without a copy."""
    if backend not in BACKENDS:
        raise unknown_name("backend", str(backend), BACKENDS, "loader")
    if backend == "numpy":
        return _split_rows
    try:
        import torch
    except ImportError:
        if backend == "auto":
            return _split_rows
        raise ConfigError(
            "torch is not installed", where="backend", do="pip install torch, or use numpy"
        ) from None

    def split(rows: np.ndarray) -> tuple[Any, Any]:
        tensor, seq_len = torch.from_numpy(rows), rows.shape[1] - 1
        return tensor.narrow(1, 0, seq_len), tensor.narrow(1, 1, seq_len)

    return split


def _split_rows(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return rows[:, :-1], rows[:, 1:]


def _spans(inputs: np.ndarray, eos_token_id: int) -> tuple[np.ndarray, ...]:
    """Document spans of each row of inputs: int64 `[num_documents, 2]`; each EOS ends one."""
    num_rows, seq_len = inputs.shape
    is_edge = np.zeros(num_rows * seq_len + 1, np.bool_)
    is_edge[1:] = (inputs == eos_token_id).ravel()
    is_edge[::seq_len] = True
    edges = np.flatnonzero(is_edge)
    spans = np.stack([edges[:-1], edges[1:]], axis=1)
    first = np.searchsorted(edges, np.arange(0, len(is_edge), seq_len)).tolist()
    return tuple(spans[a:b] - row * seq_len for row, (a, b) in enumerate(pairwise(first)))
