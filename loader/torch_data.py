"""The stream as torch's data classes: an `IterableDataset`, and a loader with worker processes.

Batches come whole (`DataLoader(dataset, batch_size=None)`). Worker i of W makes every W-th batch
and `DataLoader` takes them in turn, so the order is that of one process. `WorkerLoader` keeps the
position of the last batch it returned, whatever the workers have read ahead, and its state is the
loader's own: it moves between any number of workers, ranks, and none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from loader.config import resolve_plan
from loader.errors import StateError
from loader.loader import Batch, DeterministicLoader
from loader.stream import Split


class TokenDataset(IterableDataset[Any]):
    """Batches of a plan, for `DataLoader(dataset, batch_size=None, num_workers=W)`.

    Has torchdata's `Stateful` shape: a state taken in a worker continues that worker, and one of
    `DeterministicLoader` starts all workers from its position.

    Args:
        cfg: What `build_loader` takes.
        rank, world_size, split, dtype: See `DeterministicLoader`.
        with_meta: Give `Batch` records instead of `(inputs, targets)`.
    """

    def __init__(
        self,
        cfg: object,
        rank: int = 0,
        world_size: int = 1,
        split: Split = "train",
        *,
        dtype: str = "int64",
        with_meta: bool = False,
    ) -> None:
        super().__init__()
        self.plan = resolve_plan(cfg)
        self._arguments = (rank, world_size, split)
        self._dtype, self.with_meta = dtype, with_meta
        self._start = 0
        self._worker: tuple[int, int] | None = None  # whose position `_start` is
        self._loader: DeterministicLoader | None = None

    def __iter__(self) -> Iterator[Any]:
        """This worker's share of the batches, from the current position on."""
        worker = get_worker_info()
        place = (worker.id, worker.num_workers) if worker else (0, 1)
        step = self._start if self._worker == place else self._start + place[0]
        if self._worker is not None and self._worker != place:
            raise StateError(
                "state of another worker",
                found=f"worker {self._worker}",
                expected=f"worker {place}",
                do="resume with as many workers, or from the state of a WorkerLoader",
                code="E-STATE-WORKER",
            )
        with self._open() as loader:
            self._loader = loader
            while step < loader.num_steps:
                loader.seek_step(step)
                batch = loader.next_with_meta() if self.with_meta else loader.next()
                step += place[1]
                self._start, self._worker = step, place
                yield batch
                del batch
        self._start, self._worker, self._loader = 0, None, None

    def state_dict(self) -> dict[str, Any]:
        """The position of this worker, after the last batch it made."""
        with self._open() as loader:
            loader.seek(min(self._start * self.plan.batch_size, loader.num_sequences))
            state = loader.state_dict()
        return {"step": self._start, "worker": self._worker, "loader": state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state of this class, or from one of `DeterministicLoader`.

        Raises:
            StateError: It is of another plan, or malformed.
        """
        own = "worker" in state
        worker = state["worker"] if own else None
        with self._open() as loader:
            loader.load_state_dict(state["loader"] if own else state)
            start, plan = state["step"] if worker else loader.step, loader.plan
        if worker is not None and state["loader"]["plan"]["batch_size"] != plan.batch_size:
            raise StateError(
                "state of one worker at another batch size",
                found=state["loader"]["plan"]["batch_size"],
                expected=plan.batch_size,
                do="resume from the state of a WorkerLoader",
                code="E-STATE-WORKER",
            )
        self._start, self.plan = start, plan  # counts of another run make a plan of their own
        self._worker = None if worker is None else (worker[0], worker[1])

    def start_at(self, step: int) -> None:
        """Make `step` the first of the next iteration, over all workers."""
        self._start, self._worker = step, None

    def _open(self) -> DeterministicLoader:
        rank, world_size, split = self._arguments
        return DeterministicLoader(
            self.plan, rank, world_size, split, backend="torch", dtype=self._dtype
        )


class WorkerLoader:
    """`DeterministicLoader` whose batches are made in worker processes.

    Args:
        cfg, rank, world_size, split, dtype: As for `TokenDataset`.
        num_workers: Processes; 0 makes batches in this one.
        pin_memory: Page-locked tensors, copied by torch's own thread.
        prefetch_factor: Batches that a worker may be ahead.
    """

    def __init__(
        self,
        cfg: object,
        rank: int = 0,
        world_size: int = 1,
        split: Split = "train",
        *,
        num_workers: int = 2,
        dtype: str = "int64",
        pin_memory: bool = False,
        prefetch_factor: int = 2,
    ) -> None:
        self._data = TokenDataset(cfg, rank, world_size, split, dtype=dtype, with_meta=True)
        self._options: dict[str, Any] = {"num_workers": num_workers, "pin_memory": pin_memory}
        if num_workers:
            self._options["prefetch_factor"] = prefetch_factor
        self.plan = self._data.plan
        # Holds the position and answers for it; reads nothing.
        self._position = DeterministicLoader(self.plan, rank, world_size, split, backend="numpy")
        self.source_names = self._position.source_names
        self._batches: Iterator[Any] | None = None

    @property
    def num_steps(self) -> int:
        """Batches from the start of the stream to its end."""
        return self._position.num_steps

    @property
    def step(self) -> int:
        """Batches before the next one."""
        return self._position.step

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The next batch; see `DeterministicLoader.next`. Raises StopIteration at the end."""
        batch = self.next_with_meta()
        return batch.inputs, batch.targets

    def next_with_meta(self) -> Batch:
        """The next batch and what it is made of. Raises StopIteration at the end."""
        if self._batches is None:
            self._data.start_at(self.step)
            loader = DataLoader(self._data, batch_size=None, collate_fn=_same, **self._options)
            self._batches = iter(loader)
        batch = next(self._batches)
        self._position.skip()
        return batch

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Batches from the current position to the end."""
        return self

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        """See `next`."""
        return self.next()

    def seek(self, n: int) -> None:
        """See `DeterministicLoader.seek`; workers start again."""
        self._position.seek(n)
        self._batches = None

    def seek_step(self, step: int) -> None:
        """`seek(step * batch_size)`."""
        self.seek(step * self.plan.batch_size)

    def state_dict(self) -> dict[str, Any]:
        """The state of a `DeterministicLoader` after the last batch returned."""
        return self._position.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was saved. Raises StateError."""
        self._position.load_state_dict(state)
        self.plan = self._data.plan = self._position.plan
        self._batches = None

    def metrics(self) -> dict[str, dict[str, float]]:
        """See `DeterministicLoader.metrics`."""
        return self._position.metrics()

    def lr_scale(self, step: int | None = None) -> float:
        """See `DeterministicLoader.lr_scale`."""
        return self._position.lr_scale(step)

    def close(self) -> None:
        """End the workers."""
        self._batches = None
        self._position.close()

    def __enter__(self) -> Self:
        """The loader itself; leaving the block closes it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()


def _same(batch: Any) -> Any:
    """A batch as it is; arrays of numpy stay what they are. In a module, so that it pickles."""
    return batch


def attention_mask(document_ids: np.ndarray) -> torch.Tensor:
    """Which tokens may attend to which: bool `[num_rows, 1, seq_len, seq_len]`, causal and inside
    one document. From `loader.spans.document_ids`; padding attends to itself alone."""
    ids = torch.from_numpy(document_ids)
    same = ids[:, None, :, None] == ids[:, None, None, :]
    seq_len = ids.shape[1]
    causal = torch.ones(seq_len, seq_len, dtype=torch.bool).tril()
    own = torch.eye(seq_len, dtype=torch.bool)
    return (same & causal & (ids != -1)[:, None, None, :]) | own
