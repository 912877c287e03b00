from __future__ import annotations

import itertools
import json
import pickle

import numpy as np
import pytest

from loader import build_loader, document_ids
from tests.refusals import refused

pytest.importorskip("torch")

from torch.utils.data import DataLoader

from loader.torch_data import TokenDataset, WorkerLoader, attention_mask

# Three workers on two cores, to see the order where the batches do not divide by them.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def all_inputs(batches) -> list[np.ndarray]:
    return [np.asarray(inputs).copy() for inputs, _ in batches]


def expected(two_stages, *args) -> list[np.ndarray]:
    return all_inputs(build_loader(two_stages.cfg, *args, backend="numpy")[0])


def test_dataset_gives_meta_and_can_be_pickled(two_stages):
    data = pickle.loads(pickle.dumps(TokenDataset(two_stages.cfg, with_meta=True)))
    plain = build_loader(two_stages.cfg, backend="numpy")[0]
    for batch in itertools.islice(data, 3):
        other = plain.next_with_meta()
        assert batch.source_names == other.source_names
        np.testing.assert_array_equal(batch.targets.numpy(), other.targets)
        np.testing.assert_equal(batch.document_spans, other.document_spans)


@pytest.mark.parametrize(("before", "after"), [(2, 2), (3, 0), (0, 2)])
def test_state_of_a_worker_loader_is_the_consumers_at_any_number_of_workers(
    two_stages, before, after
):
    whole = expected(two_stages)
    with WorkerLoader(two_stages.cfg, num_workers=before) as loader:
        got = [loader.next()[0].numpy().copy() for _ in range(13)]
        state = json.loads(json.dumps(loader.state_dict()))
        assert loader.step == 13
    assert state["global_sequence_index"] == 13 * 12
    plain = build_loader(two_stages.cfg, backend="numpy")[0]
    plain.load_state_dict(state)
    assert plain.metrics() == state["sources"]
    with WorkerLoader(two_stages.cfg, num_workers=after) as loader:
        loader.load_state_dict(state)
        got += all_inputs(loader)
        with pytest.raises(StopIteration):
            loader.next()
    np.testing.assert_array_equal(np.concatenate(got), np.concatenate(whole))


def test_worker_loader_seeks(two_stages):
    whole = expected(two_stages)
    with WorkerLoader(two_stages.cfg, num_workers=2) as loader:
        for step in (20, 3, 32):
            loader.seek_step(step)
            np.testing.assert_array_equal(loader.next()[0].numpy(), whole[step])


def test_state_of_one_worker_continues_that_worker(two_stages, monkeypatch):
    """What a StatefulDataLoader does in each of its processes."""
    whole, got = expected(two_stages), {}
    for worker in range(2):
        place = type("Info", (), {"id": worker, "num_workers": 2})()
        monkeypatch.setattr("loader.torch_data.get_worker_info", lambda place=place: place)
        data = TokenDataset(two_stages.cfg)
        batches = all_inputs(itertools.islice(data, 5))
        state = pickle.loads(pickle.dumps(data.state_dict()))
        again = TokenDataset(two_stages.cfg)
        again.load_state_dict(state)
        got[worker] = batches + all_inputs(again)
    for step, inputs in enumerate(whole):
        np.testing.assert_array_equal(got[step % 2][step // 2], inputs)
    monkeypatch.setattr("loader.torch_data.get_worker_info", lambda: None)
    other = TokenDataset(two_stages.cfg)
    other.load_state_dict(state)
    with refused("E-STATE-WORKER"):
        next(iter(other))


def test_state_of_a_plain_loader_starts_the_dataset_there(two_stages):
    plain = build_loader(two_stages.cfg, backend="numpy")[0]
    plain.seek_step(9)
    data = TokenDataset(two_stages.cfg)
    data.load_state_dict(plain.state_dict())
    got = all_inputs(DataLoader(data, batch_size=None, num_workers=2))
    np.testing.assert_array_equal(np.concatenate(got), np.concatenate(expected(two_stages)[9:]))


def test_counts_of_another_run_are_continued_by_workers_too(tree):
    for name in ("web", "code"):
        tree.add(name, 3000)
    cfg = {"datasets": tree.rows("web", "code"), "batch_size": 6, "seq_len": 16, "steps": 20}
    counts = {"datasets": [{"spec": "web", "row_offset": 31}, {"spec": "code", "row_offset": 5}]}
    plain = build_loader(cfg, backend="numpy")[0]
    plain.load_state_dict(counts)
    whole = all_inputs(plain)
    assert len(whole) == 14
    with WorkerLoader(cfg, num_workers=2) as loader:
        loader.load_state_dict(counts)
        got = [loader.next()[0].numpy().copy() for _ in range(5)]
        state = loader.state_dict()
    with WorkerLoader(cfg, num_workers=0) as loader:
        loader.load_state_dict(json.loads(json.dumps(state)))
        assert loader.plan.plan_hash == plain.plan.plan_hash
        got += all_inputs(loader)
    np.testing.assert_array_equal(np.concatenate(got), np.concatenate(whole))
    data = TokenDataset(cfg)
    data.load_state_dict(counts)
    again = all_inputs(DataLoader(data, batch_size=None, num_workers=2))
    np.testing.assert_array_equal(np.concatenate(again), np.concatenate(whole))


def test_state_of_one_worker_is_refused_at_another_batch_size(two_stages):
    data = TokenDataset(two_stages.cfg)
    list(itertools.islice(data, 3))
    halved = two_stages.cfg | {"batch_size": 6}
    state = data.state_dict()
    with refused("E-STATE-WORKER", naming=["found 12, expected 6"]):
        TokenDataset(halved).load_state_dict(state)
    whole = all_inputs(build_loader(halved, backend="numpy")[0])
    with WorkerLoader(halved, num_workers=0) as loader:
        loader.load_state_dict(state["loader"])
        np.testing.assert_array_equal(loader.next()[0].numpy(), whole[6])


def test_attention_stays_inside_documents_and_looks_back_only():
    spans = [np.array([[0, 3], [3, 5]]), np.array([[0, 2]])]
    mask = attention_mask(document_ids(spans, 6))
    assert mask.shape == (2, 1, 6, 6)
    for row, owner in enumerate(([0, 0, 0, 1, 1, -1], [0, 0, -1, -1, -1, -1])):
        for i, j in itertools.product(range(6), range(6)):
            allowed = i == j or (j <= i and owner[i] == owner[j] != -1)
            assert mask[row, 0, i, j] == allowed
