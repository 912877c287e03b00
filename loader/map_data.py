"""The stream as map-style data sets of torch: an index is a step or a row of the run."""

import inspect
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from types import FrameType
from typing import Any, Unpack

from torch.utils.data import Dataset, DistributedSampler, RandomSampler, Subset, get_worker_info
from torch.utils.data._utils.fetch import _IterableDatasetFetcher, _MapDatasetFetcher

from loader.batches import ReadOptions, check_names
from loader.config import CACHE_KEYS, LoaderOptions, resolve_plan
from loader.errors import ConfigError
from loader.loader import DeterministicLoader
from loader.plan.records import LoaderPlan
from loader.ranks import data_rank
from loader.rows.stream import Split


class PlanDataset(Dataset[Any]):
    """A plan as a data set; each process opens a loader on its first read."""

    def __init__(
        self,
        cfg: object,
        split: Split,
        options: Mapping[str, Any],
        rank: int | None,
        world_size: int | None,
    ) -> None:
        super().__init__()
        given = {**options}
        check_names(options, CACHE_KEYS)
        self._ranks = rank, world_size
        # Rank and number of ranks of the process that pickled this object.
        self._starter: tuple[int, int] | None = None
        self.plan = resolve_plan(cfg, *(given.pop(key, None) for key in CACHE_KEYS))
        self._options = {"backend": "torch", "split": split, **given}
        ReadOptions(*data_rank(rank, world_size), **self._options)  # refuses what is out of range
        self._loader: DeterministicLoader | None = None
        self._last = -1  # the last index that the current pass has requested
        self._pass: weakref.ref[_MapDatasetFetcher] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """State for another process: the plan and the position, without open files."""
        return self.__dict__ | {"_loader": None, "_pass": None, "_starter": self.own_rank()}

    def own_rank(self) -> tuple[int, int]:
        """Rank and number of ranks of this process, as `data_rank`. A spawned worker cannot detect
        them, so it uses the values of the process that pickled the data set."""
        found = data_rank(*self._ranks)
        is_alone = found[1] == 1 and get_worker_info() is not None
        return self._starter if is_alone and self._starter else found

    def read_plan(self, plan: LoaderPlan) -> None:
        """Switch to another plan."""
        self.plan = plan
        self._loader = None

    def check_resumed(self) -> None:
        """Raise ConfigError if Lightning's Trainer asks, goes on inside an epoch, and the
        `DataLoader` has no state: the epoch would start with the first batch of the plan again."""
        for frame in _callers():
            module = frame.f_globals.get("__name__", "")
            if frame.f_code.co_name != "setup_data" or not module.endswith("loops.fit_loop"):
                continue
            loop = frame.f_locals["self"]
            progress = loop.epoch_loop.batch_progress
            batches = frame.f_locals.get("dl")
            is_inside = progress.current.ready and not progress.is_last_batch
            if is_inside and not hasattr(batches, "load_state_dict"):
                raise ConfigError(
                    "a DataLoader has no state, so Lightning would read from the first batch again",
                    where="train_dataloader",
                    found=f"a run that continues after {progress.current.ready} batches",
                    do="return open_loader(...), or a StatefulDataLoader of a StepDataset",
                )
            return

    def _starts_pass(self, fetcher: _MapDatasetFetcher) -> bool:
        """Whether a fetcher requests its first index: each pass of a `DataLoader` has its own."""
        is_known = self._pass is not None and self._pass() is fetcher
        self._pass = weakref.ref(fetcher)
        return not is_known

    def _opened(self) -> DeterministicLoader:
        if self._loader is None:
            self._loader = DeterministicLoader(self.plan, *self._read_as(), **self._options)
        return self._loader

    def _read_as(self) -> tuple[int, int]:
        return self.own_rank()


class StepDataset(PlanDataset):
    """This rank's batches by step, for `DataLoader(dataset, batch_size=None)`: a trainer that saves
    the number of its next step needs no other state. A `DataLoader` must request the steps in
    order; `dataset[step]` works for any step.

    Args:
        cfg: See `open_loader`.
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

    def __len__(self) -> int:
        """Batches of the whole stream. Raises ConfigError if a sampler asks that shuffles steps or
        distributes them over ranks, or Lightning's Trainer would begin the run again."""
        sampler: Any = sys._getframe(1).f_locals.get("self")
        is_dealt = isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1
        if is_dealt or isinstance(sampler, RandomSampler):
            raise _unordered(f"a {type(sampler).__name__}", "the default sampler")
        self.check_resumed()
        return len(self._opened())

    def __getitem__(self, step: int) -> Any:
        """The batch of a step. Raises IndexError, and ConfigError if a sampler skips steps or
        changes their order, because it shuffles or distributes steps over ranks, or a `DataLoader`
        collects batches again."""
        loader = self._opened()
        if not 0 <= step < len(loader):
            raise IndexError(f"step {step} of {len(loader)}")
        if isinstance(fetcher := asking_fetcher(), _MapDatasetFetcher):
            if fetcher.auto_collation:
                text = "the data set returns complete batches"
                do = "set batch_size = None, or give a trainer that collects batches a RowDataset"
                raise ConfigError(text, where="DataLoader", do=do)
            worker = get_worker_info()
            expected = self._last + (worker.num_workers if worker else 1)
            if not self._starts_pass(fetcher) and step != expected:
                raise _unordered(f"step {step} after step {self._last}", f"step {expected}")
            self._last = step
        loader.seek_step(step)
        return loader.next()

    def set_epoch(self, _: int) -> None:
        """Called by the loaders of accelerate, and so by transformers' Trainer, which distribute
        batches over ranks. Raises ConfigError if there are several ranks, or batches are to be
        skipped."""
        sampler = getattr(sys._getframe(1).f_locals.get("self"), "batch_sampler", None)
        if sampler is not None and getattr(sampler, "batch_sampler", sampler) is None:
            raise ConfigError(
                "skip_first_batches cannot skip batches that a data set has made",
                where="accelerate",
                do="give the DataLoader Subset(data, range(next_step, len(data))), or a RowDataset",
            )
        if (found := data_rank()[1]) > 1:
            raise ConfigError(
                "accelerate would split the batches of this rank among all ranks again",
                where="accelerate",
                found=f"{found} ranks",
                do="do not `prepare` this loader, or give it a RowDataset",
            )


class RowDataset(PlanDataset):
    """Rows by their number in the global stream, for trainers that collect batches and distribute
    them over ranks. Set a sequential sampler: a random sampler would ignore the plan's order. The
    default of `form` is `dict`. rank and world_size, by default detected by
    `loader.ranks.data_rank`, decide whether this process may read the first row: pass the
    data-parallel values, or 0 and 1 if it reads all rows on purpose."""

    def __init__(
        self,
        cfg: object,
        split: Split = "train",
        *,
        rank: int | None = None,
        world_size: int | None = None,
        **options: Unpack[LoaderOptions],
    ) -> None:
        if (found := options.get("form")) == "batch" or "cu_seqlens" in options.get("extras", ()):
            raise ConfigError(
                "it describes a batch, not a row",
                where="form" if found == "batch" else "extras",
                found=f"form = {found!r}" if found == "batch" else "cu_seqlens",
                do='use StepDataset or open_loader; a row has form = "dict" and other extras',
            )
        super().__init__(cfg, split, {"form": "dict", **options}, rank, world_size)

    def __len__(self) -> int:
        """Number of rows of all complete batches. Raises ConfigError if Lightning's Trainer would
        begin the run again."""
        self.check_resumed()
        return self._opened().num_sequences

    def __getitem__(self, row: int) -> Any:
        """A row. Raises as `__getitems__` does if a `DataLoader` requests it."""
        if isinstance(asking_fetcher(), _MapDatasetFetcher):
            self._check_order([row])
        return self._read([row])[0]

    def __getitems__(self, rows: Sequence[int]) -> list[Any]:
        """The rows of a batch. Raises IndexError, and ConfigError if a sampler draws them at
        random, or a trainer gives the same rows to several ranks, to fill up a batch or because it
        does not distribute them."""
        self._check_order(rows)
        return self._read(rows) if len(rows) else []

    def set_epoch(self, _: int) -> None:
        """Called by the loaders of accelerate. Raises ConfigError if rank 0 would read all rows and
        send them to the others, filled up with rows of the first batch."""
        caller = sys._getframe(1).f_locals.get("self")
        if type(caller).__name__ == "DataLoaderDispatcher" and data_rank()[1] > 1:
            raise ConfigError(
                "accelerate fills up batches that rank 0 sends to the others with rows read before",
                where="dispatch_batches",
                do="leave dispatch_batches unset",
            )

    def state_dict(self) -> dict[str, int]:
        """The number of ranks, which torchdata's StatefulDataLoader saves beside its position."""
        return {"world_size": self.own_rank()[1]}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Raise ConfigError if other ranks saved the position, which counts the rows of one."""
        if (found := self.own_rank()[1]) != (saved := state["world_size"]):
            raise ConfigError(
                "the position was saved by another number of ranks",
                where="world_size",
                found=found,
                expected=saved,
                do="begin with Subset(data, range(first_row, len(data))), or use open_loader, whose"
                " state loads at any number of ranks",
            )

    def _read_as(self) -> tuple[int, int]:
        return 0, 1

    def _check_order(self, rows: Sequence[int]) -> None:
        fetcher = asking_fetcher()
        is_first = not isinstance(fetcher, _MapDatasetFetcher) or self._starts_pass(fetcher)
        if any(a >= b for a, b in pairwise([-1 if is_first else self._last, *rows])):
            raise ConfigError(
                "rows are not read in the order of the plan",
                where="sampler",
                found=f"a batch of rows {', '.join(map(str, rows[:6]))}",
                expected="a sequential sampler, and no row twice to fill up a batch",
                do='set train_sampling_strategy = "sequential" or shuffle = False; under Lightning,'
                " and for an incomplete last batch of valid, use open_loader",
            )
        # Trainers use the first rows to fill up a batch, or to add complete batches. The first row
        # belongs to rank 0, so if another rank gets it, the row is read twice.
        first = _first_row(fetcher.dataset) if fetcher is not None else 0
        if len(rows) and rows[0] == first and self.own_rank()[0]:
            raise ConfigError(
                "the first row is read by two ranks",
                where="sampler",
                found="rank {} of {}".format(*self.own_rank()),
                expected="each row on one rank, and no row twice to fill up a batch",
                do="let the trainer prepare the DataLoader; read valid with open_loader; if this"
                " process shares a rank, or reads all rows, pass rank and world_size",
            )
        if len(rows):
            self._last = rows[-1]

    def _read(self, rows: Sequence[int]) -> list[Any]:
        """Rows by number; consecutive rows are read in one call."""
        found: list[Any] = []
        cuts = [i for i, (a, b) in enumerate(pairwise(rows), 1) if b != a + 1]
        for first, stop in pairwise([0, *cuts, len(rows)]):
            part = self._opened().read_rows(rows[first], rows[first] + stop - first)
            if isinstance(part, dict):
                found += [dict(zip(part, row)) for row in zip(*part.values())]
            else:
                found += zip(*part)
        return found


def asking_fetcher() -> _MapDatasetFetcher | _IterableDatasetFetcher | None:
    """The fetcher of the `DataLoader` that requests an item, also through another data set; None if
    the caller reads the data set directly. Torch passes only the index, so the fetcher is found on
    the call stack."""
    fetches = (_MapDatasetFetcher.fetch.__code__, _IterableDatasetFetcher.fetch.__code__)
    return next((f.f_locals["self"] for f in _callers() if f.f_code in fetches), None)


def _first_row(data: Any) -> int:
    """The first index of a data set that is asked for the rest of its rows: 0, or a `Subset`'s."""
    rows = data.indices if isinstance(data, Subset) else (0,)
    return rows[0] if len(rows) and rows[-1] - rows[0] == len(rows) - 1 else 0


def _callers() -> Iterator[FrameType]:
    frame = inspect.currentframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


def _unordered(found: str, expected: str) -> ConfigError:
    return ConfigError(
        "steps must be read in order",
        where="sampler",
        found=found,
        expected=expected,
        do="leave out shuffle and sampler; under Lightning and Fabric give open_loader, or"
        " set use_distributed_sampler = False",
    )
