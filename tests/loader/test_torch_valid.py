"""Lengths, passes over valid and the cost of a state, through torch's data classes."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

import loader.plan.check
from loader import StateError, build_loader
from tests.loader.shared import rows_of

pytest.importorskip("torch")

from torch.utils.data import DataLoader

from loader.torch_data import TokenDataset, WorkerLoader

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def valid_rows(cfg, *ranks) -> np.ndarray:
    return rows_of(build_loader(cfg, *ranks, split="valid", backend="numpy")[0])


def torch_passes(batches, num_passes: int) -> list[np.ndarray]:
    return [
        rows_of([(i.numpy().copy(), t.numpy().copy()) for i, t in batches])
        for _ in range(num_passes)
    ]


@pytest.mark.parametrize("num_workers", [0, 1, 2, 3])
@pytest.mark.parametrize("persistent", [False, True])
def test_dataset_and_worker_loader_give_every_pass_the_same_batches(
    two_stages, num_workers, persistent
):
    whole = valid_rows(two_stages.cfg, 1, 3)
    data = TokenDataset(two_stages.cfg, 1, 3, "valid")
    options = {"num_workers": num_workers, "persistent_workers": persistent and num_workers > 0}
    batches = DataLoader(data, batch_size=None, **options)
    first = [i.numpy().copy() for i, _ in itertools.islice(batches, 3)]  # a pass that is left
    np.testing.assert_array_equal(np.concatenate(first), whole[:12, :-1])
    for found in torch_passes(batches, 3):
        np.testing.assert_array_equal(found, whole)
    with WorkerLoader(two_stages.cfg, 1, 3, "valid", num_workers=num_workers) as loader:
        list(itertools.islice(loader, 3))
        for found in torch_passes(loader, 2):
            np.testing.assert_array_equal(found, whole)
        with pytest.raises(StopIteration):
            loader.next()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_worker_loader_resumed_inside_a_pass_of_valid_ends_it_and_then_begins_again(
    two_stages, num_workers
):
    loader = build_loader(two_stages.cfg, split="valid")[0]
    whole = valid_rows(two_stages.cfg)
    loader.seek_step(3)
    with WorkerLoader(two_stages.cfg, split="valid", num_workers=num_workers) as resumed:
        resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
        rest, again = torch_passes(resumed, 2)
        np.testing.assert_array_equal(rest, whole[36:])
        np.testing.assert_array_equal(again, whole)
        resumed.seek(93)
        with pytest.raises(StopIteration):
            resumed.next()


def test_dataset_resumed_inside_a_pass_of_valid_ends_it_here_and_is_refused_in_workers(two_stages):
    data = TokenDataset(two_stages.cfg, split="valid")
    whole = valid_rows(two_stages.cfg)
    list(itertools.islice(data, 3))
    state = json.loads(json.dumps(data.state_dict()))
    resumed = TokenDataset(two_stages.cfg, split="valid")
    resumed.load_state_dict(state)
    rest, again = torch_passes(DataLoader(resumed, batch_size=None), 2)
    np.testing.assert_array_equal(rest, whole[36:])
    np.testing.assert_array_equal(again, whole)
    resumed.load_state_dict(state["loader"])
    # Each pass begins with a copy of the dataset: the second would begin there too.
    with pytest.raises(StateError, match="WorkerLoader"):
        list(DataLoader(resumed, batch_size=None, num_workers=2))


@pytest.mark.parametrize("split", ["train", "valid"])
def test_lengths_are_the_batches_of_the_whole_stream_wherever_the_position_is(two_stages, split):
    loader = build_loader(two_stages.cfg, 1, 3, split)[0]
    expected = len(list(loader))
    assert expected == {"train": 33, "valid": 8}[split]
    assert len(loader) == expected
    loader.seek_step(5)
    assert len(loader) == expected
    data = TokenDataset(two_stages.cfg, 1, 3, split)
    assert len(data) == expected
    for num_workers in (0, 2, 3):
        batches = DataLoader(data, batch_size=None, num_workers=num_workers)
        assert len(batches) == len(list(batches)) == expected
        with WorkerLoader(two_stages.cfg, 1, 3, split, num_workers=num_workers) as worked:
            assert len(worked) == expected
            worked.seek_step(5)
            assert len(worked) == expected
            assert len(list(worked)) == expected - 5


def test_a_state_after_every_batch_opens_the_data_once(two_stages, monkeypatch):
    data, opened = TokenDataset(two_stages.cfg), []
    real = loader.plan.check.open_data
    monkeypatch.setattr(
        "loader.plan.check.open_data",
        lambda plan, source: opened.append(source.name) or real(plan, source),
    )
    states = [data.state_dict() for _ in data]
    assert opened == ["web", "code", "math"]
    assert [s["loader"]["global_sequence_index"] for s in states] == [12 * i for i in range(1, 34)]
    resumed = TokenDataset(data.plan)
    resumed.load_state_dict(states[-3])
    assert len(list(resumed)) == 2
    assert len(resumed) == 33
    assert len(opened) == 6
