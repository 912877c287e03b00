"""The stream through torch's data classes: order, states, passes over valid, and lengths."""

import itertools
import json
import os

import numpy as np
import pytest

from loader import ConfigError, FormatError, resolve_plan
from tests.loader.shared import open_loader, rows_of
from tests.planted import Planted
from tests.refusals import refused

pytest.importorskip("torch")

from torch.utils.data import DataLoader

from loader.torch_data import StepDataset, WorkerLoader

# Three workers on two cores, to see the order where the batches do not divide by them.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

PHASES = [{"start_step": 4, "dataset_weights": {"math": 4}, "lr_scale": 0.5}]
PACKED = {"packing": "best_fit", "shuffle": True, "phases": PHASES, "on_exhaust": "wrap"}


@pytest.mark.parametrize("split", ["train", "valid"])
@pytest.mark.parametrize("changes", [{}, PACKED], ids=["concat", "best_fit"])
@pytest.mark.parametrize(("before", "after"), [(2, 2), (3, 0), (0, 2)])
def test_state_of_a_worker_loader_is_the_consumers_at_any_number_of_workers(
    two_stages, split, changes, before, after
):
    cfg = two_stages.cfg | changes
    plain = open_loader(cfg, split=split)
    whole = rows_of(plain)
    with WorkerLoader(resolve_plan(cfg), split=split, num_workers=before) as loader:
        got = rows_of([loader.next() for _ in range(3)])
        state = json.loads(json.dumps(loader.state_dict()))
        assert loader.step == 3
    assert state["global_sequence_index"] == 36
    plain.load_state_dict(state)
    assert plain.metrics() == state["sources"]
    with WorkerLoader(resolve_plan(cfg), split=split, num_workers=after) as loader:
        loader.load_state_dict(state)
        np.testing.assert_array_equal(np.concatenate([got, rows_of(loader)]), whole)
        if split == "valid":  # the pass that was resumed is over
            np.testing.assert_array_equal(rows_of(loader), whole)
        with pytest.raises(StopIteration):
            loader.next()
        for step in (5, 3):
            loader.seek_step(step)
            np.testing.assert_array_equal(rows_of([loader.next()]), whole[step * 12 :][:12])


def test_plain_states_and_counts_of_another_run_start_all_workers_there(tree):
    for name in ("web", "code"):
        tree.add(name, 3000)
    cfg = {"datasets": tree.rows("web", "code"), "batch_size": 6, "seq_len": 16, "steps": 20}
    rows = [{"spec": "web", "row_offset": 31}, {"spec": "code", "row_offset": 5}]
    plain = open_loader(cfg)
    plain.seek_step(9)
    for state in (plain.state_dict(), {"datasets": rows}):
        plain.load_state_dict(state)
        first, whole = plain.step, rows_of(plain)
        assert (first, len(whole)) in ((9, 66), (0, 84))
        with WorkerLoader(resolve_plan(cfg), num_workers=2) as loader:
            loader.load_state_dict(state)
            got = rows_of([loader.next() for _ in range(5)])
            state = loader.state_dict()
        with WorkerLoader(resolve_plan(cfg), num_workers=0) as loader:
            loader.load_state_dict(json.loads(json.dumps(state)))
            assert loader.plan.plan_hash == plain.plan.plan_hash
            np.testing.assert_array_equal(np.concatenate([got, rows_of(loader)]), whole)


def test_a_worker_loader_continues_from_another_runs_counts_after_it_has_read(tree):
    tree.add("web", 3000)
    cfg = {"datasets": tree.rows("web"), "batch_size": 6, "seq_len": 16, "steps": 20}
    state, plain = {"datasets": [{"spec": "web", "row_offset": 31}]}, open_loader(cfg)
    plain.load_state_dict(state)
    whole = rows_of(plain)
    for num_workers in (0, 2):
        with WorkerLoader(resolve_plan(cfg), num_workers=num_workers) as loader:
            loader.next()
            loader.load_state_dict(state)
            np.testing.assert_array_equal(rows_of(loader), whole)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_worker_loader_gives_the_batch_of_its_position_after_a_skip_and_an_error(
    tree, num_workers
):
    tree.add("web", 3000)
    whole = rows_of(open_loader(tree.one())).reshape(-1, 2, 17)
    last = sorted(tree.root.rglob("*.npy"))[-1]
    away = last.with_suffix(".away")
    with WorkerLoader(resolve_plan(tree.one()), num_workers=num_workers) as loader:
        np.testing.assert_array_equal(rows_of([loader.next()]), whole[0])
        loader.skip()
        np.testing.assert_array_equal(rows_of([loader.next()]), whole[2])
        last.rename(away)
        # A worker may not have opened the files yet.
        with pytest.raises(FormatError, match=r"changed while it was in use|no such file"):
            rows_of(loader)
        away.rename(last)
        step = loader.step
        assert 3 <= step < len(whole)
        np.testing.assert_array_equal(rows_of(loader), whole[step:].reshape(-1, 17))
        loader.seek_step(1)
    with refused("E-STATE-CLOSED"):
        loader.next()


@pytest.mark.parametrize("num_workers", [0, 1, 2, 3])
@pytest.mark.parametrize("persistent", [False, True])
def test_dataset_and_worker_loader_give_every_pass_the_same_batches(
    two_stages, num_workers, persistent
):
    whole = rows_of(open_loader(two_stages.cfg, 1, 3, "valid"))
    data = StepDataset(two_stages.cfg, 1, 3, "valid")
    options = {"num_workers": num_workers, "persistent_workers": persistent and num_workers > 0}
    batches = DataLoader(data, batch_size=None, **options)
    with WorkerLoader(
        resolve_plan(two_stages.cfg), 1, 3, "valid", num_workers=num_workers
    ) as loader:
        for passes in (batches, loader):
            first = rows_of(itertools.islice(passes, 3))  # a pass that is left
            np.testing.assert_array_equal(first, whole[:12])
            for _ in range(3):
                np.testing.assert_array_equal(rows_of(passes), whole)
        with pytest.raises(StopIteration):
            loader.next()


def test_a_pass_over_train_that_was_left_begins_again_with_persistent_workers(two_stages):
    data, whole = StepDataset(two_stages.cfg), rows_of(open_loader(two_stages.cfg))
    batches = DataLoader(data, batch_size=None, num_workers=2, persistent_workers=True)
    for _ in range(2):
        np.testing.assert_array_equal(rows_of(batches), whole)
    list(itertools.islice(batches, 3))
    np.testing.assert_array_equal(rows_of(batches), whole)


@pytest.mark.parametrize(("split", "expected"), [("train", 33), ("valid", 8)])
def test_lengths_are_the_batches_of_the_whole_stream_wherever_the_position_is(
    two_stages, split, expected
):
    data = StepDataset(two_stages.cfg, 1, 3, split)
    assert len(data) == expected
    loaders = [open_loader(two_stages.cfg, 1, 3, split)]
    for num_workers in (0, 2, 3):
        batches = DataLoader(data, batch_size=None, num_workers=num_workers)
        assert len(batches) == len(list(batches)) == expected
        loaders.append(
            WorkerLoader(resolve_plan(two_stages.cfg), 1, 3, split, num_workers=num_workers)
        )
    for loader in loaders:
        with loader:
            assert len(loader) == expected
            loader.seek_step(5)
            assert len(loader) == expected
            assert len(list(loader)) == expected - 5


def test_a_way_to_start_workers_that_there_is_not_is_refused_by_name(two_stages):
    with pytest.raises(ConfigError, match=r"spawn; did you mean 'spawn'") as caught:
        open_loader(two_stages.cfg, backend="torch", num_workers=1, multiprocessing_context="spwan")
    assert "multiprocessing_context" in str(caught.value)


def test_options_of_workers_without_workers_are_refused(two_stages):
    with refused("E-CONFIG", naming=["multiprocessing_context needs num_workers"]):
        open_loader(two_stages.cfg, backend="torch", multiprocessing_context="spawn")
    with refused("E-CONFIG", naming=["num_workers needs torch"]):
        open_loader(two_stages.cfg, num_workers=2)


@pytest.mark.parametrize("start", ["spawn", "forkserver"])
def test_clean_workers_execute_no_file_of_the_working_directory(
    two_stages, tmp_path, monkeypatch, start
):
    planted = Planted(tmp_path)
    monkeypatch.chdir(tmp_path)
    with WorkerLoader(
        resolve_plan(two_stages.cfg), num_workers=1, multiprocessing_context=start
    ) as loader:
        assert loader.next_with_meta().source_names
    assert planted.ran() == []
    assert not os.environ.get("PYTHONSAFEPATH")  # of the user's own processes
