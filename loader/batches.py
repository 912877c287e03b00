"""Batches of one rank: options, rows and memory, and the short last batch.

If the last valid batch has fewer rows than there are ranks, ranks share rows: each rank gets a
complete row of inputs and a part of its targets; the other targets are -100. So every target is on
exactly one rank, every rank has a target, and batches start at the same sequences for any number of
ranks.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypedDict

import numpy as np

from loader.errors import ConfigError
from loader.files.spans import IGNORE_INDEX
from loader.plan.records import LoaderPlan
from loader.plan.settings import KEYS
from loader.plan.tables import unknown_name
from loader.rows.buffers import HeldBuffers, check_device, check_pinning, pinned_tensor
from loader.rows.forms import FORMS, OF_DOCUMENTS, OF_ROWS, Batch, formed
from loader.rows.stream import RankRows, Split, Stream

_CHOICES = {
    "split": ("train", "valid"),
    "backend": ("auto", "numpy", "torch"),
    "dtype": ("int64", "int32", "uint32"),
    "form": FORMS,
}


class MemoryOptions(TypedDict, total=False):
    """The form of a batch's arrays, and how many batches to read ahead.

    Attributes:
        dtype: Type of inputs and targets: `int64`, `int32` or `uint32`. Packed targets contain
            -100, so they cannot be `uint32`.
        prefetch: Batches that a thread reads ahead; 0 reads in `next`.
        pin_memory: Use page-locked tensors, from torch's pool.
        contiguous: Put inputs and targets into separate arrays, so that `targets.view(-1)` works.
            False returns two overlapping views of rows of `seq_len + 1` tokens, which takes less
            work per batch.
        form: `pair` returns (inputs, targets). `batch` returns a `loader.rows.forms.Batch`. `dict`
            returns the arguments of transformers' models: input_ids, labels (which the model
            shifts, so the last target of a row is missing) and shift_labels (the targets).
        extras: More entries of a dict. `[local_batch]` each: source_index, stage_index and
            sequence_index as in a `Batch`, and lr_scale. From `loader.files.spans`: position_ids,
            document_ids, attention_mask, and cu_seqlens, whose entries are cu_seq_lens_q,
            cu_seq_lens_k, max_length_q and max_length_k, as transformers names the arguments of
            flash attention.
        device: Destination of torch tensors.
    """

    dtype: str
    prefetch: int
    pin_memory: bool
    contiguous: bool
    form: str
    extras: tuple[str, ...]
    device: str | None


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Arguments of a loader besides its plan. Raises ConfigError if a value is unknown, out of
    range for every plan, or asks for pinned memory that this machine does not have."""

    rank: int = 0
    world_size: int = 1
    split: Split = "train"
    backend: str = "auto"
    dtype: str = "int64"
    prefetch: int = 0
    pin_memory: bool = False
    contiguous: bool = True
    form: str = "pair"
    extras: tuple[str, ...] = ()
    device: str | None = None

    def __post_init__(self) -> None:
        for key, known in _CHOICES.items():
            if getattr(self, key) not in known:
                raise unknown_name(key, str(getattr(self, key)), known, "loader")
        for key, low, high in (
            ("world_size", 1, math.inf),
            ("rank", 0, self.world_size - 1 if _is_count(self.world_size) else 0),
            ("prefetch", 0, math.inf),
        ):
            value = getattr(self, key)
            if not _is_count(value) or not low <= value <= high:
                expected = f"at least {low}" if high == math.inf else f"{low} to {high}"
                raise ConfigError(
                    "value is out of range", where=key, found=repr(value), expected=expected
                )
        if (self.pin_memory or self.device) and self.backend == "numpy":
            do = 'set backend = "torch"'
            raise ConfigError("pin_memory and device need torch", found='backend = "numpy"', do=do)
        for extra in self.extras:
            if extra not in (known := (*OF_ROWS, *OF_DOCUMENTS)):
                raise unknown_name("extra", str(extra), known, "loader")
        if self.extras and self.form != "dict":
            raise ConfigError(
                "extras need form = 'dict'",
                where="extras",
                found=f"form = {self.form!r}",
                do='set form = "dict"',
            )
        if self.pin_memory:
            check_pinning()

    def check_plan(self, plan: LoaderPlan) -> None:
        """Raise ConfigError if a batch has fewer rows than ranks, or the integer type is too small
        for the plan's token ids."""
        found = self.world_size
        expected = f"1 to batch_size = {plan.batch_size}"
        if found > plan.batch_size:
            raise ConfigError(
                "a batch has fewer rows than there are ranks",
                where="world_size",
                found=found,
                expected=expected,
            )
        dtype = self.dtype
        largest = plan.vocab_size - 1
        is_padded = self.split == "valid" and plan.pads_valid
        is_packed = plan.packing != "concat" or bool(plan.masked)
        if dtype == "uint32" and (is_packed or is_padded or self.form == "dict"):
            raise ConfigError(
                "targets of packed, padded or masked rows, and labels, contain -100",
                where="dtype",
                found=dtype,
                expected="int64",
            )
        if largest > np.iinfo(dtype).max:
            expected = f"a type for integers up to {largest}"
            raise ConfigError(
                "too small for the vocabulary", where="dtype", found=dtype, expected=expected
            )

    def rows(self, num_rows: int) -> RankRows:
        """The rank's rows of a global batch; if rows are left over, the first ranks get one
        more."""
        share, rest = divmod(num_rows, self.world_size)
        first = self.rank * share + min(self.rank, rest)
        return RankRows(num_rows, first, first + share + (self.rank < rest))


class Rows(NamedTuple):
    """Consecutive rows: inputs and targets as numpy or torch arrays, the number of the first row in
    the stream, and the source and window of each row."""

    inputs: Any
    targets: Any
    first: int
    sources: np.ndarray
    windows: np.ndarray


def check_names(options: Iterable[str], known: Iterable[str] = ()) -> None:
    """Raise ConfigError for an option that neither `MemoryOptions` nor `known` has."""
    known = [*MemoryOptions.__annotations__, *known]
    for name in options:
        if name in KEYS and name not in known:
            raise ConfigError(
                "a setting of the run, not an argument of the loader",
                where=name,
                do=f'put it into the run: open_loader(read_config("run.toml") | {{"{name}": ...}})',
            )
        if name == "num_workers":
            do = "use open_loader, or a DataLoader of a StepDataset; or set prefetch"
            raise ConfigError("the loader reads in this process", where=name, do=do)
        if name not in known:
            raise unknown_name("argument", name, known, "loader")


class BatchReader:
    """Reads one rank's rows of any batch of a stream; the last batch ends at sequence `end`. Raises
    ConfigError if ranks must share rows of the last batch, but the type of the targets cannot hold
    -100, or the batch has fewer targets than ranks."""

    def __init__(self, plan: LoaderPlan, stream: Stream, end: int, options: ReadOptions) -> None:
        if options.device is not None:
            check_device(options.device)
        self._stream = stream
        self._end = end
        self._options = options
        self._batch_size = plan.batch_size
        self._seq_len = plan.seq_len
        self._wrap = _wrapper(options.backend)
        self._dtype = np.dtype(options.dtype)
        self._needs_documents = not set(options.extras).isdisjoint(OF_DOCUMENTS)
        if self._needs_documents and not stream.index.is_known:
            do = "build it with `nmoe regenerate-index`"
            raise ConfigError("a source has no document index", where="extras", do=do)
        self._own = options.rows(plan.batch_size)
        self._buffers = HeldBuffers(partial(np.empty, self._shape(self._own), self._dtype))
        size = end % plan.batch_size
        self._share = self._last_share(end - size, size) if 0 < size < options.world_size else None

    def read(self, step: int) -> Rows:
        """Rows of batch number `step`; a batch past the end raises StopIteration."""
        n = step * self._batch_size
        size = min(self._batch_size, self._end - n)
        if size <= 0:
            raise StopIteration
        rows = self._own if size == self._batch_size else self._options.rows(size)
        if rows is not self._own and self._share is not None:
            return self._read_shared(n, size, *self._share)
        if rows is self._own and not self._options.pin_memory:
            array = self._buffers.take()
            memory = self._wrap(array)
        else:
            array, memory = self._fresh(self._shape(rows))
        return _rows(memory, n + rows.first, *self._stream.read(n, rows, array))

    def read_rows(self, n: int, size: int) -> Rows:
        """Consecutive rows of the stream, from sequence `n` on."""
        rows = RankRows(size, 0, size)
        array, memory = self._fresh(self._shape(rows))
        return _rows(memory, n, *self._stream.read(n, rows, array))

    def pair(self, rows: Rows | Batch) -> tuple[Any, Any]:
        """Inputs and targets, on the device that the options name."""
        return self._placed(rows.inputs), self._placed(rows.targets)

    def form(self, rows: Rows) -> Any:
        """Rows in the form that the options name."""
        options = self._options
        if options.form == "pair":
            return self.pair(rows)
        has_documents = options.form == "batch" or self._needs_documents
        batch = self.batch(rows, has_documents)
        scales = None
        if "lr_scale" in options.extras:
            scales = np.array([self._lr_scale(n) for n in batch.sequence_index.tolist()])
        return formed(batch, options.form, options.extras, scales)

    def batch(self, rows: Rows, has_documents: bool = True) -> Batch:
        """Rows and their origin. Raises FormatError if an index is missing or does not match its
        file (E-INDEX-...)."""
        stream = self._stream
        numbers = rows.first + np.arange(len(rows.sources))
        inputs, targets = self.pair(rows)
        return Batch(
            inputs=inputs,
            targets=targets,
            source_index=rows.sources.copy(),
            source_names=stream.source_names,
            document_spans=stream.spans(rows.sources, rows.windows) if has_documents else None,
            lr_scale=self._lr_scale(rows.first),
            sequence_index=numbers,
            global_sequence_index=rows.first - rows.first % self._batch_size,
            stage_index=stream.schedule.stages(numbers),
        )

    def _lr_scale(self, n: int) -> float:
        """Factor of the learning rate at the step of sequence `n`."""
        return self._stream.schedule.lr_scale(n - n % self._batch_size)

    def _placed(self, part: Any) -> Any:
        device = self._options.device
        ahead = self._options.pin_memory
        return part if device is None else part.to(device, non_blocking=ahead)

    def _read_shared(self, n: int, size: int, row: int, part: int, num_parts: int) -> Rows:
        array, memory = self._fresh((2, 1, self._seq_len))
        sources, windows = self._stream.read(n, RankRows(size, row, row + 1), array)
        targets = array[1, 0]
        counted = np.flatnonzero(targets != IGNORE_INDEX)
        begin, end = (len(counted) * i // num_parts for i in (part, part + 1))
        targets[counted[:begin]] = targets[counted[end:]] = IGNORE_INDEX
        return _rows(memory, n + row, sources, windows)

    def _shape(self, rows: RankRows) -> tuple[int, ...]:
        return self._stream.shape(rows.last - rows.first, self._options.contiguous)

    def _fresh(self, shape: tuple[int, ...]) -> tuple[np.ndarray, Any]:
        """A new numpy array to fill, and a numpy or torch array over the same memory."""
        if self._options.pin_memory:
            pinned = pinned_tensor(shape, self._dtype)
            return pinned.numpy(), pinned
        array = np.empty(shape, self._dtype)
        return array, self._wrap(array)

    def _last_share(self, n: int, size: int) -> tuple[int, int, int]:
        """For the batch at sequence `n` with fewer rows (`size`) than ranks: the row that this rank
        reads, the part of the row's targets that it keeps, and the number of parts. Ranks are
        assigned one by one, each to the row with the most targets per rank."""
        world_size = self._options.world_size
        rank = self._options.rank
        if self._options.dtype == "uint32":
            raise ConfigError(
                f"{world_size} ranks share the {size} rows of the last batch, so targets hold"
                f" {IGNORE_INDEX}",
                where="dtype",
                found="uint32",
                expected="int64 or int32",
            )
        counts = [self._seq_len] * size
        if self._stream.has_padding:  # only such rows have fewer targets than tokens
            row = np.empty((2, 1, self._seq_len), np.int64)
            for i in range(size):
                self._stream.read(n, RankRows(size, i, i + 1), row)
                counts[i] = int((row[1] != IGNORE_INDEX).sum())
        if world_size > sum(counts):
            raise ConfigError(
                "the last batch has fewer targets than there are ranks",
                where="world_size",
                found=world_size,
                expected=f"at most the {sum(counts)} targets of its {size} rows",
                do="set another batch_size, or evaluate on fewer ranks",
            )
        ranks = [min(1, count) for count in counts]
        for _ in range(world_size - sum(ranks)):
            ranks[max(range(size), key=lambda i: counts[i] / max(1, ranks[i]))] += 1
        own = next(i for i in range(size) if rank < sum(ranks[: i + 1]))
        return own, rank - sum(ranks[:own]), ranks[own]


def _rows(memory: Any, first: int, sources: np.ndarray, windows: np.ndarray) -> Rows:
    parts = memory if memory.ndim == 3 else (memory[:, :-1], memory[:, 1:])
    return Rows(parts[0], parts[1], first, sources, windows)


def _wrapper(backend: str) -> Callable[[np.ndarray], Any]:
    """A function that turns a numpy array into the backend's array type without copying it. Raises
    ConfigError."""
    if backend == "numpy":
        return np.asarray
    try:
        import torch
    except ImportError:
        if backend == "auto":
            return np.asarray
        raise ConfigError(
            "torch is not installed", where="backend", do='install torch, or set backend = "numpy"'
        ) from None
    return torch.from_numpy


def _is_count(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
