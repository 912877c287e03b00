"""Each row is read by one rank, also under the trainers that deal rows or steps to ranks."""

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from loader import open_loader, resolve_plan
from tests.loader.running import running
from tests.refusals import refused

pytest.importorskip("torch")

from torch.utils.data import DataLoader, DistributedSampler, Subset

from loader.torch_data import RowDataset, StepDataset

STEPS, ROWS = 8, 4
READS = Path(__file__).with_name("reads")
OWN = [[[4 * step + 2 * rank, 4 * step + 2 * rank + 1] for step in range(STEPS)] for rank in (0, 1)]


@dataclass
class Rank:
    """rows: the numbers of the rows of each batch. error: its text."""

    rows: list[list[int]]
    error: str | None


@pytest.fixture(scope="module")
def plan(lib, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """8 steps of 4 rows, and 21 rows of valid."""
    tree = lib.Tree(tmp_path_factory.mktemp("ranks"))
    tree.add("web", 2000)
    tree.add("web", 21 * 16 + 1, split="valid", num_files=1)
    path = tree.root / "plan.json"
    opened = resolve_plan(tree.one(batch_size=ROWS, steps=STEPS))
    path.write_text(opened.placed_in(path.parent).to_json())
    return path


@pytest.fixture(scope="module")
def read(plan, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., list[Any]]]:
    """What each rank reads in each of these ways, which are those of `reads.Way`."""
    with running(plan, STEPS, "accelerate", "lightning") as examples:

        def ranks(ways: list[dict[str, Any]], ranks: int = 2) -> list[list[Rank]]:
            place = tmp_path_factory.mktemp("ways")
            examples.run(str(READS), place, json.dumps(ways), ranks=ranks)
            files = [place / f"{rank}.json" for rank in range(ranks)]
            found = [[Rank(**way) for way in json.loads(file.read_text())] for file in files]
            return [list(of_way) for of_way in zip(*found, strict=True)]

        yield ranks


def needs(name: str, *values: Any) -> Any:
    marks = [pytest.mark.skipif(not find_spec(name), reason=f"{name} is not installed")]
    marks += [pytest.mark.slow] * (name == "lightning")  # seconds to import
    return pytest.param(*values, marks=marks)


KINDS = ("open_loader", "num_workers", "DeterministicLoader", "WorkerLoader", "step")


@pytest.mark.parametrize("trainer", ["plain", "environment"])
def test_all_that_open_a_plan_find_out_the_rank(read, trainer):
    for kind, found in zip(KINDS, read([{"trainer": trainer, "data": kind} for kind in KINDS])):
        assert [rank.rows for rank in found] == OWN, kind


@pytest.mark.slow  # workers import torch
def test_workers_that_are_spawned_have_the_rank_of_their_trainer(read):
    keys = {"num_workers": 2, "multiprocessing_context": "spawn"}
    ways = [{"trainer": "plain", "data": "step", "keys": keys}]
    for found in read(ways):
        assert [rank.rows for rank in found] == OWN


EARLY = {"early": True}


@pytest.mark.parametrize("kind", ["open_loader", "WorkerLoader", "step"])
def test_a_loader_that_was_made_before_the_ranks_were_up_reads_their_rows_or_none(read, kind):
    for rank, own in zip(read([{"trainer": "plain", "data": kind, "options": EARLY}])[0], OWN):
        if kind == "step":
            assert rank.rows == own
        else:
            assert (
                rank.rows,
                "before torch.distributed or JAX was initialised" in str(rank.error),
            ) == ([], True)


def with_workers(way: dict[str, Any]) -> list[dict[str, Any]]:
    keys = way.pop("keys", {})
    alone = {key: value for key, value in keys.items() if key != "persistent_workers"}
    return [way | {"keys": alone}, way | {"keys": keys | {"num_workers": 2}}]


ORDER = "steps must be read in order"


def test_steps_that_a_sampler_draws_or_deals_are_refused_at_every_rank(read):
    dealt = [{"shuffle": True}, {"shuffle": False}, {"shuffle": False, "first": 1}]
    ways = [{"trainer": "plain", **way} for way in ({"keys": {"shuffle": True}}, *dealt)]
    every = [made for way in ways for made in with_workers(way)]
    for found, way in zip(read([{**way, "data": "step"} for way in every]), every):
        for rank in found:
            assert ORDER in str(rank.error), way
            assert "use_distributed_sampler = False" in str(rank.error)
            assert len(rank.rows) <= max(1, way["keys"].get("num_workers", 0))


@pytest.mark.parametrize(
    ("trainer", "first"),
    [needs("lightning", *way) for way in (("trainer", 0), ("trainer", 2), ("fabric", 0))],
)
def test_steps_that_lightning_deals_are_refused(read, trainer, first):
    found = read([{"trainer": trainer, "data": "step", "first": first}])[0]
    assert any(ORDER in str(rank.error) for rank in found)
    assert all(rank.error and len(rank.rows) < 4 for rank in found)


UNDEALT = {"data": "step", "options": {"use_distributed_sampler": False}}


@pytest.mark.parametrize(
    ("trainer", "ways"),
    [
        (
            "plain",
            [
                {"data": "step", "passes": 2},
                {"data": "step", "passes": 2, "keys": {"persistent_workers": True}},
            ],
        ),
        needs("lightning", "trainer", [UNDEALT]),
        needs("lightning", "trainer", [{"data": "open_loader"}]),
        needs("lightning", "fabric", [UNDEALT]),
    ],
)
def test_steps_in_order_are_each_ranks_own(read, trainer, ways):
    every = [made for way in ways for made in with_workers({**way, "trainer": trainer})]
    if trainer != "plain":  # it takes its ranks down at the end
        every = every[-1:]
    for found, way in zip(read(every), every):
        for rank, own in zip(found, OWN):
            assert (rank.rows, rank.error) == (own * way.get("passes", 1), None), way


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.skipif(not find_spec("accelerate"), reason="accelerate is not installed")
def test_rows_of_valid_that_accelerate_repeats_are_refused(read, ranks):
    ways = []
    for split_batches, batch_size in itertools.product((False, True), (1, 2, 3, 4, 5, 6, 7, 21)):
        if split_batches and batch_size % ranks:
            continue  # which accelerate refuses itself
        options = {"split_batches": split_batches}
        way = {"trainer": "accelerate", "data": "row", "split": "valid", "options": options}
        both = with_workers({**way, "batch_size": batch_size})
        ways += both if batch_size == 3 else both[:1]
    for found, way in zip(read(ways, ranks), ways):
        rows = sorted(chain.from_iterable(chain(*(rank.rows for rank in found))))
        errors = [rank.error for rank in found if rank.error]
        dealt = way["batch_size"] * (1 if way["options"]["split_batches"] else ranks)
        if 21 % dealt == 0:
            assert (rows, errors) == (list(range(21)), []), way
        else:
            assert errors, way
            for text in errors:
                assert "the first row is read by two ranks" in text or "no row twice" in text


@pytest.mark.skipif(not find_spec("accelerate"), reason="accelerate is not installed")
def test_rows_of_one_rank_that_accelerate_sends_to_the_others_are_refused(read):
    options = {"dispatch_batches": True}
    ways = [
        {
            "trainer": "accelerate",
            "data": "row",
            "split": split,
            "batch_size": 4,
            "options": options,
        }
        for split in ("train", "valid")
    ]
    for rank in chain(*read(ways)):
        assert rank.rows == []
        assert "leave dispatch_batches unset" in str(rank.error)


@pytest.mark.skipif(not find_spec("accelerate"), reason="accelerate is not installed")
def test_rows_that_no_trainer_deals_are_refused_unless_the_rank_is_named(read, plan, monkeypatch):
    ways = [{"trainer": "plain", "data": "row", "batch_size": 2}]
    ways.append({**ways[0], "first": 8})  # as a resumed run that forgets to deal its rows
    dealt = {"trainer": "accelerate", "data": "row", "batch_size": 2}
    found = read([*ways, {**dealt, "passes": 2}, {**dealt, "first": 8}])
    for of_ranks in found[:2]:
        assert of_ranks[1].rows == []
        assert "the first row is read by two ranks" in str(of_ranks[1].error)
    assert [rank.rows for rank in found[2]] == [own * 2 for own in OWN]
    assert [rank.rows for rank in found[3]] == [own[2:] for own in OWN]
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with refused("E-CONFIG", naming=["rank 1 of 2", "pass rank and world_size"]):
        next(iter(DataLoader(RowDataset(plan), 2)))
    assert len(list(DataLoader(RowDataset(plan, rank=0, world_size=1), 2))) == 16
    own = Subset(RowDataset(plan), range(1, 32, 2))  # dealt by hand
    assert len(list(DataLoader(own, 2))) == 8


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.skipif(not find_spec("torchdata"), reason="torchdata is not installed")
def test_rows_left_by_another_number_of_ranks_are_refused(plan, monkeypatch, num_workers):
    from torchdata.stateful_dataloader import StatefulDataLoader

    def opened() -> Any:
        return StatefulDataLoader(RowDataset(plan, form="pair"), ROWS, num_workers=num_workers)

    made = opened()
    batches = iter(made)
    next(batches)
    state = made.state_dict()
    rest = list(batches)
    resumed = opened()
    resumed.load_state_dict(state)
    assert [b[0].tolist() for b in resumed] == [b[0].tolist() for b in rest]
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    again = opened()
    again.load_state_dict(state)
    with refused("E-CONFIG", naming=["other number of ranks", "found 2", "expected 1"]):
        next(iter(again))


def test_a_step_is_read_by_its_number_in_any_order(plan):
    data = StepDataset(plan)
    whole = list(open_loader(plan))
    for step in (7, 0, 3, 3, 1):
        assert (data[step][0] == whole[step][0]).all()
    for first in (5, 2, 6):  # each DataLoader is a pass of its own
        batches = list(DataLoader(Subset(data, range(first, 8)), batch_size=None))
        assert [int(b[0][0, 0]) for b in batches] == [int(b[0][0, 0]) for b in whole[first:]]
    with refused("E-CONFIG", naming=["after step", "leave out shuffle and sampler"]):
        list(DataLoader(data, batch_size=None, sampler=[0, 1, 3]))


@pytest.mark.parametrize("split", ["train", "valid"])
def test_a_sampler_that_deals_each_rank_one_step_is_refused(plan, split):
    data = StepDataset(plan, split=split)
    for keys in ({"shuffle": False}, {"shuffle": False, "drop_last": True}, {}):
        with refused("E-CONFIG", naming=[ORDER, "use_distributed_sampler = False"]):
            DistributedSampler(data, num_replicas=len(data), rank=3, **keys)
    with refused("E-CONFIG", naming=[ORDER]):
        DataLoader(data, batch_size=None, shuffle=True)
    alone = DistributedSampler(data, num_replicas=1, rank=0, shuffle=False)
    assert len(list(DataLoader(data, batch_size=None, sampler=alone))) == len(data)


@pytest.mark.parametrize(("rank", "world_size"), [(5, 2), (-1, 2), (0, 0), ("0", "2"), (True, 2)])
@pytest.mark.parametrize("kind", [RowDataset, StepDataset])
def test_a_rank_that_there_is_not_is_refused_before_a_row_is_read(plan, kind, rank, world_size):
    with refused("E-CONFIG", naming=["value is out of range"]):
        kind(plan, rank=rank, world_size=world_size)


@pytest.mark.skipif(not find_spec("accelerate"), reason="accelerate is not installed")
def test_batches_of_a_loader_cannot_be_skipped_by_accelerate_and_it_says_so(plan):
    from accelerate import Accelerator, skip_first_batches

    opened = open_loader(plan)
    assert not hasattr(opened, "dataset")
    with refused("E-CONFIG", naming=["skip_first_batches", "RowDataset", "seek_step"]):
        skip_first_batches(opened, 3)
    steps = Accelerator(cpu=True).prepare(DataLoader(StepDataset(plan), batch_size=None))
    assert len(list(steps)) == STEPS
    with refused("E-CONFIG", naming=["skip_first_batches", "RowDataset", "Subset"]):
        next(iter(skip_first_batches(steps, 3)))
    rows = DataLoader(RowDataset(plan, form="pair"), ROWS)
    resumed = [inputs for inputs, _ in skip_first_batches(rows, 3)]
    whole = [inputs for inputs, _ in opened]
    assert len(resumed) == STEPS - 3
    assert all((one == other).all() for one, other in zip(resumed, whole[3:]))
