"""A run that ends with longer sequences: a second plan goes on from the counts of the first."""

import json
from collections import Counter

import numpy as np
import pytest

from loader import resolve_plan
from tests.loader.shared import open_loader
from tests.refusals import refused

SHORT, LONG = 16, 64


@pytest.fixture(scope="module")
def tree(lib, tmp_path_factory):
    tree = lib.Tree(tmp_path_factory.mktemp("longer"))
    for name, num_tokens in (("web", 9000), ("code", 5000)):
        tree.add(name, num_tokens)
    return tree


def cfg_of(tree, **changes) -> dict:
    given = {"datasets": tree.rows(web=2.0, code=1.0), "batch_size": 8, "seq_len": SHORT}
    return given | {"steps": 40} | changes


def starts_of(tree, loader) -> dict[str, list[int]]:
    """Where in its source each row that is left of a loader begins."""
    found: dict[str, list[int]] = {name: [] for name in loader.source_names}
    texts = {name: tree.tokens[name, "train"].astype("<i8").tobytes() for name in found}
    for _ in range(loader.step, loader.num_steps):
        batch = loader.next_with_meta()
        for row, source in zip(batch.inputs, batch.source_index):
            name = batch.source_names[source]
            at = texts[name].find(row.astype("<i8").tobytes())
            assert at % 8 == 0
            found[name].append(at // 8)
    return found


@pytest.mark.parametrize("stop", [40, 23])
@pytest.mark.parametrize("policy", ["swrr", "block", "weighted_random"])
def test_a_longer_plan_reads_on_after_the_last_row_of_the_shorter_one(tree, policy, stop):
    shorter = open_loader(cfg_of(tree, policy=policy))
    shorter.seek_step(stop)
    state = json.loads(json.dumps(shorter.state_dict()))
    read = {name: row["tokens"] for name, row in shorter.metrics().items()}
    assert sum(read.values()) == stop * 8 * SHORT
    # Of the same number of tokens in a step, so steps count on.
    phase = {"start_step": 50, "dataset_weights": {"code": 4.0}, "lr_scale": 0.1}
    cfg = cfg_of(tree, policy=policy, batch_size=2, seq_len=LONG, steps=60, phases=[phase])
    counts = {"datasets": state["datasets"]}
    longer = open_loader(cfg)
    longer.load_state_dict(counts)
    assert 60 - stop - 1 <= longer.num_steps <= 60 - stop
    first = 60 - longer.num_steps
    assert [longer.lr_scale(step - first) for step in (49, 50)] == [1.0, 0.1]
    starts = starts_of(tree, longer)
    for name, own in starts.items():
        begin = -(-int(read[name]) // LONG) * LONG  # the next window; what is before it is not read
        assert sorted(own) == list(range(begin, begin + LONG * len(own), LONG))
    assert sum(map(len, starts.values())) == 2 * longer.num_steps
    # The second plan has states of its own, at any number of ranks.
    longer.seek_step(3)
    again = json.loads(json.dumps(longer.state_dict()))
    ranks = [open_loader(cfg, rank, 2) for rank in range(2)]
    rest = [np.stack(batch) for batch in longer]
    for loader in ranks:
        loader.load_state_dict(again)
    dealt = [np.concatenate(both, axis=1) for both in zip(*map(list, ranks), strict=True)]
    assert Counter(map(bytes, dealt)) == Counter(map(bytes, rest))
    np.testing.assert_array_equal(dealt, rest)


@pytest.mark.parametrize("key", ["seq_len", "batch_size"])
def test_another_shape_in_a_phase_is_refused_with_the_way_round(tree, key):
    phases = [{"start_step": 20, "dataset_weights": {"web": 1.0}, key: 64}]
    words = [f"phases[0].{key}", "another plan", 'load_state_dict({"datasets"']
    with refused("E-CONFIG", naming=words):
        resolve_plan(cfg_of(tree, phases=phases))


def test_a_state_of_another_length_is_refused_with_the_way_round(tree):
    shorter = open_loader(cfg_of(tree))
    shorter.seek_step(20)
    longer = open_loader(cfg_of(tree, seq_len=LONG, batch_size=2))
    words = ["plan.seq_len differs", 'load {"datasets": state["datasets"]}']
    with refused("E-STATE-PLAN", naming=words) as error:
        longer.load_state_dict(shorter.state_dict())
    assert "remix" not in str(error.value)


@pytest.mark.parametrize("way", [{"shuffle": True}, {"packing": "best_fit"}])
def test_windows_that_no_count_of_tokens_describes_are_not_counted_at_another_length(tree, way):
    shorter = open_loader(cfg_of(tree, **way))
    shorter.seek_step(20)
    counts = {"datasets": shorter.state_dict()["datasets"]}
    longer = open_loader(cfg_of(tree, seq_len=LONG, batch_size=2, **way))
    with refused("E-STATE-DATA", naming=["another reading order", "seq_len"]):
        longer.load_state_dict(counts)
