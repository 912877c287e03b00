"""The stream as data sets of torch, and a loader with worker processes."""

from collections.abc import Iterator
from typing import Any, Unpack

import torch
from torch.utils.data import DataLoader, Subset

from loader.batches import MemoryOptions
from loader.files.spans import IGNORE_INDEX
from loader.loader import DeterministicLoader
from loader.map_data import RowDataset, StepDataset
from loader.plan.records import LoaderPlan
from loader.rows.children import safe_children
from loader.rows.forms import Batch, formed
from loader.rows.stream import Split

# Options of what workers read; the others are for the process that trains.
_OF_DATA = ("dtype", "contiguous")

__all__ = ["RowDataset", "StepDataset", "WorkerLoader", "row_losses", "targets_per_rank"]


class WorkerLoader(DeterministicLoader):
    """A `DeterministicLoader` whose worker processes read the data and make the batches: worker i
    of W makes every W-th batch. The position is after the last returned batch, even if workers have
    read ahead; the state is a state of `DeterministicLoader`, for any number of workers and ranks.

    Args:
        plan, rank, world_size, split: See `DeterministicLoader`.
        num_workers, multiprocessing_context: See `loader.opening.OpenOptions`.
        memory: See `loader.batches.MemoryOptions`; `prefetch` is the number of batches that each
            worker may be ahead, by default 2.
    """

    def __init__(
        self,
        plan: LoaderPlan,
        rank: int | None = None,
        world_size: int | None = None,
        split: Split = "train",
        num_workers: int = 2,
        multiprocessing_context: str | None = None,
        **memory: Unpack[MemoryOptions],
    ) -> None:
        ahead = memory.pop("prefetch", 0) or 2
        of_data: dict[str, Any] = {k: v for k, v in memory.items() if k in _OF_DATA}
        self._data = StepDataset(plan, rank, world_size, split, form="batch", **of_data)
        self._workers: dict[str, Any] = {"pin_memory": memory.get("pin_memory", False)}
        if num_workers:
            by_store = "spawn" if plan.store else None
            self._workers |= {"num_workers": num_workers, "prefetch_factor": ahead}
            self._workers["multiprocessing_context"] = multiprocessing_context or by_store
        self._batches: Iterator[Any] | None = None
        self._ahead = 0  # the step of the next batch from the workers
        super().__init__(plan, rank, world_size, split, "torch", **memory)

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
            steps = Subset(self._data, range(self.step, self.num_steps))
            loader = DataLoader(steps, batch_size=None, collate_fn=_same, **self._workers)
            with safe_children():
                self._batches = iter(loader)
        self._ahead = -1  # stays set if an error or an interrupt ends this call
        batch = next(self._batches)
        self._ahead = self.step + 1
        self.skip()
        inputs, targets = self._reader.pair(batch)
        return batch._replace(inputs=inputs, targets=targets)

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


def row_losses(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean loss of each row over its targets, without gradient: float32 `[num_rows]`, for
    `loader.LossLog`. logits: `[num_rows, seq_len, vocab_size]`. targets: int64
    `[num_rows, seq_len]`, as from the loader; a row without a target has the loss 0."""
    with torch.no_grad():
        losses = torch.nn.functional.cross_entropy(
            logits.detach().flatten(0, 1).float(), targets.flatten(), reduction="none"
        )
        counts = (targets != IGNORE_INDEX).sum(1).clamp(min=1)
        return losses.view(targets.shape).sum(1) / counts
