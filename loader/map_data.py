"""The stream as torch's map-style data sets: an index is a step of the run, or a row of it."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Unpack

from torch.utils.data import Dataset

from loader.config import CACHE_KEYS, LoaderOptions, resolve_plan
from loader.errors import ConfigError
from loader.loader import DeterministicLoader
from loader.opening import data_rank
from loader.plan.records import LoaderPlan
from loader.rows.stream import Split

# A sampler in order begins few passes: one at the start, and one where a run was resumed. A random
# sampler seems to begin a new pass at every second row.
_MOST_STARTS = 4


class PlanDataset(Dataset[Any]):
    """A plan that each process opens for itself, when it first reads."""

    def __init__(self, cfg: object, split: Split, options: Mapping[str, Any], **ranks: int) -> None:
        super().__init__()
        given = {**options}
        self.plan = resolve_plan(cfg, *(given.pop(key, None) for key in CACHE_KEYS))
        self._options = {"backend": "torch", "split": split, **ranks, **given}
        self._loader: DeterministicLoader | None = None

    def __getstate__(self) -> dict[str, Any]:
        """State for another process: the plan and the position, without open files."""
        return self.__dict__ | {"_loader": None}

    def read_plan(self, plan: LoaderPlan) -> None:
        """Read another plan from now on."""
        self.plan, self._loader = plan, None

    def _opened(self) -> DeterministicLoader:
        if self._loader is None:
            self._loader = DeterministicLoader(self.plan, **self._options)
        return self._loader


class BatchDataset(PlanDataset):
    """Whole batches of one rank."""

    def set_epoch(self, _: int) -> None:
        """Called by accelerate's loaders, and so by transformers' Trainer, which deal batches to
        ranks themselves. Raises ConfigError where there are several ranks."""
        if (found := data_rank()[1]) > 1:
            raise ConfigError(
                "a rank's own batches would be dealt to all ranks again",
                where="accelerate",
                found=f"{found} ranks",
                do="do not `prepare` this loader, or give it a RowDataset",
            )


class StepDataset(BatchDataset):
    """This rank's batches by step, for `DataLoader(dataset, batch_size=None)`: a trainer that saves
    the number of its next step needs no other state. Arguments as those of `TokenDataset`; options:
    `loader.config.LoaderOptions`."""

    def __init__(
        self,
        cfg: object,
        rank: int = 0,
        world_size: int = 1,
        split: Split = "train",
        **options: Unpack[LoaderOptions],
    ) -> None:
        super().__init__(cfg, split, options, rank=rank, world_size=world_size)

    def __len__(self) -> int:
        """Batches of the whole stream."""
        return len(self._opened())

    def __getitem__(self, step: int) -> Any:
        """The batch of a step. Raises IndexError."""
        loader = self._opened()
        if not 0 <= step < len(loader):
            raise IndexError(f"step {step} of {len(loader)}")
        loader.seek_step(step)
        return loader.next()

    def __getitems__(self, _: Sequence[int]) -> list[Any]:
        """Called by a `DataLoader` that makes batches. Raises ConfigError."""
        do = "set batch_size = None"
        raise ConfigError("the batches of a plan are whole", where="DataLoader", do=do)


class RowDataset(PlanDataset):
    """Rows by their number in the global stream, for trainers that make batches and share them
    among ranks themselves. A random sampler drops the plan's order: set a sequential one. `form` is
    `dict` if left out."""

    def __init__(
        self, cfg: object, split: Split = "train", **options: Unpack[LoaderOptions]
    ) -> None:
        if "cu_seqlens" in options.get("extras", ()):
            do = "use StepDataset or open_loader"
            raise ConfigError(
                "cu_seqlens are those of a batch, not of a row", where="extras", do=do
            )
        super().__init__(cfg, split, {"form": "dict", **options})
        self._last, self._starts = -1, {0}  # the last row of a batch, and where passes began

    def __len__(self) -> int:
        """Rows of all whole batches."""
        return self._opened().num_sequences

    def __getitem__(self, row: int) -> Any:
        """A row. Raises IndexError."""
        return self._read([row])[0]

    def __getitems__(self, rows: Sequence[int]) -> list[Any]:
        """The rows of a batch. Raises IndexError, and ConfigError where a sampler draws them at
        random, or repeats rows to fill up a batch."""
        if len(rows) and rows[0] <= self._last:
            self._starts.add(rows[0])
        if any(a >= b for a, b in pairwise(rows)) or len(self._starts) > _MOST_STARTS:
            raise ConfigError(
                "rows are not read in the order of the plan",
                where="sampler",
                found=f"a batch of rows {', '.join(map(str, rows[:6]))}",
                expected="a sequential sampler, and no row twice to fill up a batch",
                do='set train_sampling_strategy = "sequential" or shuffle = False; open_loader'
                " reads a last batch of valid that is not whole",
            )
        if len(rows):
            self._last = rows[-1]
        return self._read(rows)

    def _read(self, rows: Sequence[int]) -> list[Any]:
        """Some rows; those that follow each other are read at once."""
        found: list[Any] = []
        cuts = [i for i, (a, b) in enumerate(pairwise(rows), 1) if b != a + 1]
        for first, stop in pairwise([0, *cuts, len(rows)]):
            part = self._opened().read_rows(rows[first], rows[first] + stop - first)
            if isinstance(part, dict):
                found += [dict(zip(part, row)) for row in zip(*part.values())]
            else:
                found += zip(*part)
        return found
