"""The stream as data classes of torch: an `IterableDataset`, and a loader with worker processes.

Items are complete batches (`DataLoader(dataset, batch_size=None)`). Worker i of W makes every W-th
batch, and `DataLoader` takes batches from the workers in turn, so the order is the same as in one
process. The position of `WorkerLoader` is after the last returned batch, even if workers have read
ahead; its state is a state of `DeterministicLoader`, for any number of workers and ranks.
"""

from collections.abc import Iterator
from multiprocessing import get_all_start_methods
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
from torch.utils.data import ChainDataset, DataLoader, IterableDataset, get_worker_info

from loader.config import LoaderOptions
from loader.errors import StateError
from loader.files.spans import IGNORE_INDEX
from loader.forms import Batch, formed
from loader.loader import DeterministicLoader
from loader.map_data import BatchDataset, RowDataset, StepDataset, asking_fetcher
from loader.plan.tables import unknown_name
from loader.rows.children import safe_children
from loader.rows.stream import Split

__all__ = ["RowDataset", "StepDataset", "TokenDataset", "WorkerLoader"]
__all__ += ["targets_per_rank"]


class WorkerOptions(TypedDict, total=False):
    """dtype, contiguous, form, extras: see `loader.batches.MemoryOptions`. cache_dir, cache_bytes:
    see `loader.config.LoaderOptions`. pin_memory: page-locked tensors, copied by a thread of torch.
    prefetch_factor: number of batches that a worker may be ahead. multiprocessing_context: how
    workers start, "fork", "spawn" or "forkserver"; by default they are spawned if tokens come from
    a store in blocks, since its client does not survive a fork, and otherwise started as torch
    does."""

    dtype: str
    contiguous: bool
    form: str
    extras: tuple[str, ...]
    cache_dir: str | Path | None
    cache_bytes: int | None
    pin_memory: bool
    prefetch_factor: int
    multiprocessing_context: str | None


class TokenDataset(BatchDataset, IterableDataset[Any]):
    """Batches of a plan, for `DataLoader(dataset, batch_size=None, num_workers=W)`.

    Implements torchdata's `Stateful`: a state from a worker continues this worker, and a state of
    `DeterministicLoader` sets the position of all workers. Each process opens the data once.

    Args:
        cfg: See `build_loader`.
        rank, world_size, split: See `DeterministicLoader`.
        options: See `loader.config.LoaderOptions`.
    """

    def __init__(
        self,
        cfg: object,
        rank: int | None = None,
        world_size: int | None = None,
        split: Split = "train",
        **options: Unpack[LoaderOptions],
    ) -> None:
        super().__init__(cfg, split, options, rank, world_size)
        self._is_valid = split == "valid"
        self._start = 0
        self._is_set = False  # whether `_start` was set, and no pass has started after it
        self._is_loaded_here = False  # whether `load_state_dict` set `_start`, in the main process
        self._worker: tuple[int, int] | None = None  # the worker that saved the position `_start`

    def __len__(self) -> int:
        """Number of batches of the whole stream, over all workers. Raises ConfigError if
        Lightning's Trainer would begin the run again."""
        if not (self._is_set or self._start):
            self.check_resumed()
        return len(self._opened())

    def __iter__(self) -> Iterator[Any]:
        """This worker's batches: for train, from the current position on; for valid, as in
        `DeterministicLoader.__iter__`. Raises StateError (E-STATE-WORKER) if the position belongs
        to another worker, or to a pass of workers that the caller did not finish; or, for valid, if
        it was loaded in the main process, which cannot distinguish the first pass of workers from a
        second. Raises ConfigError if a `DataLoader` collects batches again."""
        fetcher = asking_fetcher()
        if fetcher is not None and isinstance(fetcher.dataset, TokenDataset | ChainDataset):
            self.check_complete(fetcher)
        worker = get_worker_info()
        place = (worker.id, worker.num_workers) if worker else (0, 1)
        loader = self._opened()
        if self._is_valid and (not self._is_set or self._start >= len(loader)):
            self._start = 0
            self._worker = None
        if worker is not None and self._worker is not None and not self._is_set:
            raise StateError(
                "workers have read ahead in a pass that the caller did not finish",
                where="persistent_workers",
                do="use WorkerLoader, or set persistent_workers = False and reload the position",
                code="E-STATE-WORKER",
            )
        self._check_place(place, worker is not None)
        step = self._start if self._worker == place else self._start + place[0]
        self._is_set = False
        while step < len(loader):
            loader.seek_step(step)
            batch = loader.next()
            step += place[1]
            self._start = step
            self._worker = place
            yield batch
            del batch
        self._start = 0
        self._worker = None

    def _check_place(self, place: tuple[int, int], is_worker: bool) -> None:
        if self._worker is not None and self._worker != place:
            raise StateError(
                "the state belongs to another worker",
                found=f"worker {self._worker}",
                expected=f"worker {place}",
                do="resume with the same number of workers, or from the state of a WorkerLoader",
                code="E-STATE-WORKER",
            )
        if self._is_valid and self._is_set and self._is_loaded_here and is_worker:
            raise StateError(
                "a position of valid was loaded in the main process, but workers read the batches",
                do="use WorkerLoader, or num_workers = 0",
                code="E-STATE-WORKER",
            )

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch that this worker made."""
        loader = self._opened()
        loader.seek(min(self._start * self.plan.batch_size, loader.num_sequences))
        return {"step": self._start, "worker": self._worker, "loader": loader.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state of this class or of `DeterministicLoader`. Raises StateError if the
        state is malformed or belongs to another plan."""
        own = state if "worker" in state else {"worker": None, "loader": state}
        worker = own["worker"]
        loader = self._opened()
        loader.load_state_dict(own["loader"])
        plan = loader.plan
        if worker is not None and own["loader"]["plan"]["batch_size"] != plan.batch_size:
            self._loader = None  # the loader already switched to the plan of the refused state
            raise StateError(
                "the state of one worker has another batch size",
                found=own["loader"]["plan"]["batch_size"],
                expected=plan.batch_size,
                do="resume from the state of a WorkerLoader",
                code="E-STATE-WORKER",
            )
        self._start = own["step"] if worker else loader.step
        self.plan = plan  # a state with another run's counts makes a new plan
        self._worker = None if worker is None else (worker[0], worker[1])
        self._is_set = True
        self._is_loaded_here = get_worker_info() is None

    def start_at(self, step: int) -> None:
        """Make `step` the first step of the next iteration, over all workers."""
        self._start = step
        self._worker = None
        self._is_set = True
        self._is_loaded_here = False


class WorkerLoader(DeterministicLoader):
    """A `DeterministicLoader` whose worker processes read the data and make the batches.

    Args:
        cfg, rank, world_size, split: As for `TokenDataset`.
        num_workers: Number of processes; 0 makes batches in this process.
        options: See `WorkerOptions`.
    """

    def __init__(
        self,
        cfg: object,
        rank: int | None = None,
        world_size: int | None = None,
        split: Split = "train",
        num_workers: int = 2,
        **options: Unpack[WorkerOptions],
    ) -> None:
        of_data: dict[str, Any] = {**options, "form": "batch", "extras": ()}
        pin_memory = of_data.pop("pin_memory", False)
        ahead = of_data.pop("prefetch_factor", 2)
        self._workers: dict[str, Any] = {"num_workers": num_workers, "pin_memory": pin_memory}
        context = of_data.pop("multiprocessing_context", None)
        if context not in (None, *(known := get_all_start_methods())):
            raise unknown_name("start method", str(context), known, "multiprocessing_context")
        self._data = TokenDataset(cfg, rank, world_size, split, **of_data)
        if num_workers:
            self._workers["prefetch_factor"] = ahead
            by_store = "spawn" if self._data.plan.store else None
            self._workers["multiprocessing_context"] = context or by_store
        self._batches: Iterator[Any] | None = None
        self._ahead = 0  # the step of the next batch from the workers
        of_batch = [key for key in ("dtype", "form", "extras") if key in options]
        memory: dict[str, Any] = {key: options[key] for key in of_batch}
        super().__init__(self._data.plan, rank, world_size, split, backend="numpy", **memory)

    def next(self) -> Any:
        """The next batch; see `DeterministicLoader.next`. Raises StopIteration at the end."""
        return formed(self.next_with_meta(), self._options.form, self._options.extras)

    def next_with_meta(self) -> Batch:
        """The next batch and its origin. Raises StopIteration at the end. After an error the
        workers are restarted, and batches that they had read ahead are read again."""
        self._open_stream()
        if self.step >= self.num_steps:
            raise StopIteration
        if self._batches is None or self._ahead != self.step:
            self._data.start_at(self.step)
            loader = DataLoader(self._data, batch_size=None, collate_fn=_same, **self._workers)
            with safe_children():
                self._batches = iter(loader)
        self._ahead = -1  # stays set if an error or an interrupt ends this call
        batch = next(self._batches)
        self._ahead = self.step + 1
        self.skip()
        return batch

    def __iter__(self) -> Iterator[Any]:
        """See `DeterministicLoader.__iter__`; workers are restarted for each pass over valid."""
        if self.split == "valid":
            self._batches = None
        return super().__iter__()

    def seek(self, n: int) -> None:
        """See `DeterministicLoader.seek`; workers are restarted."""
        super().seek(n)
        self._batches = None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was saved. Raises StateError."""
        super().load_state_dict(state)
        self._data.read_plan(self.plan)
        self._batches = None

    def close(self) -> None:
        """End the workers."""
        self._batches = None
        super().close()


def _same(batch: Any) -> Any:
    """The unchanged batch, so that numpy arrays are not converted. It is a module-level function,
    so that it can be pickled."""
    return batch


def targets_per_rank(targets: torch.Tensor, group: Any = None) -> torch.Tensor:
    """The number by which each rank must divide the sum of its token losses. Then the mean of
    gradients over ranks, which data parallelism computes, is the mean over all targets, even if
    ranks have different numbers of targets.

    A scalar: the targets of all ranks that are not -100, divided by the number of ranks; at least
    one target. If torch.distributed is initialised, this is a collective call. group: the
    data-parallel ranks.
    """
    count = (targets != IGNORE_INDEX).sum()
    ranks = torch.distributed
    if not (ranks.is_available() and ranks.is_initialized()):
        return count.clamp(min=1)
    ranks.all_reduce(count, group=group)
    return count.clamp(min=1) / ranks.get_world_size(group)
