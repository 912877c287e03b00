"""Torch's `DataLoader` over a plan: samplers, collected batches, and data sets in between."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.refusals import refused

pytest.importorskip("torch")

import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset

from loader.torch_data import RowDataset, StepDataset


@pytest.fixture
def cfg(two_stages: Any) -> dict[str, Any]:
    return two_stages.cfg


class Wrapped(Dataset[Any]):
    """A data set of one's own around another one."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return self.data[index]


@pytest.mark.parametrize("wrap", [lambda rows: rows, Wrapped])
@pytest.mark.parametrize("batch_size", [None, 1, 4])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_rows_at_random_are_refused_within_some_batches(cfg, wrap, batch_size, num_workers):
    rows = RowDataset(cfg)
    for first in (8, 3, 8, 20, 1, 9, 0):  # passes, of which each ends early
        part = DataLoader(Subset(wrap(rows), range(first, 40)), batch_size, num_workers=num_workers)
        for batch, _ in zip(part, range(5)):
            assert batch["labels"].shape[-1] == 16
    assert len(list(DataLoader(wrap(rows), batch_size))) == len(rows) // (batch_size or 1)
    assert (rows[3]["labels"] != rows[1]["labels"]).any()
    torch.manual_seed(0)
    drawn = DataLoader(wrap(rows), batch_size, num_workers=num_workers, shuffle=True)
    read = []
    with refused("E-CONFIG", naming=['train_sampling_strategy = "sequential"', "open_loader"]):
        read.extend(drawn)
    assert len(read) < 5


def test_a_row_that_fills_up_a_batch_is_refused(cfg):
    for rows in ([1, 1], [62, 63, 0], [4, 2]):
        with refused("E-CONFIG", naming=["not read in the order of the plan"]):
            RowDataset(cfg).__getitems__(rows)
    other = RowDataset(cfg, rank=1, world_size=2)
    for data in (other, Wrapped(other)):
        for batches in ([[20, 21], [22, 0]], [[20, 21], [0, 1]]):
            with refused("E-CONFIG", naming=["no row twice"]):
                list(DataLoader(data, batch_sampler=batches))


@pytest.mark.parametrize(("batch_size", "num_workers"), [(1, 0), (4, 0), (4, 1)])
def test_complete_batches_that_are_collected_again_are_refused(cfg, batch_size, num_workers):
    steps = StepDataset(cfg)
    of_steps = [steps, Subset(steps, range(8)), ConcatDataset([steps]), Wrapped(steps)]
    for data in of_steps:
        with refused("E-CONFIG", naming=["batch_size = None", "RowDataset"]):
            next(iter(DataLoader(data, batch_size, num_workers=num_workers)))


def test_rows_of_batches_may_be_collected_into_batches_of_ones_own(cfg):
    class Rows(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            for inputs, _ in map(StepDataset(cfg).__getitem__, range(4)):
                yield from inputs

    assert next(iter(DataLoader(Rows(), 5))).shape == (5, 16)
