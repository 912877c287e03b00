"""The valid split as evaluation reads it: pass after pass, over any number of ranks."""

import itertools
import json

import numpy as np
import pytest

from loader import IGNORE_INDEX, ConfigError, StateError
from tests.loader.shared import open_loader, rows_of


def open_valid(cfg, rank=None, world_size=None, **options):
    return open_loader(cfg, rank, world_size, "valid", **options)


@pytest.fixture
def run_of(tree):
    """A run whose valid split has a given number of windows of 16 tokens."""

    def make(num_windows: int, batch_size: int, **settings):
        tree.add("web", 2000)
        tree.add("web", num_windows * 16 + 1, split="valid", num_files=1)
        return {"data_path": tree.root / "web", "seq_len": 16, "batch_size": batch_size} | settings

    return make


def test_valid_is_each_source_once_unmixed_to_its_last_window(two_stages, lib):
    loader = open_valid(two_stages.cfg | {"on_exhaust": "wrap"})  # train wraps, valid never does
    names, rows = lib.reference_rows(two_stages.tree, loader.plan, "valid")
    assert len(names) == 3 * -(-499 // 16) == 96
    batches = [loader.next_with_meta() for _ in range(loader.num_steps)]
    assert [len(b.inputs) for b in batches] == [12] * 8
    drawn = [b.source_names[i] for b in batches for i in b.source_index]
    assert drawn == names == ["web"] * 32 + ["code"] * 32 + ["math"] * 32
    loader.seek(0)
    np.testing.assert_array_equal(rows_of(loader), rows)
    together = loader.per_source()
    assert list(together) == ["web", "code", "math"]
    for i, (name, alone) in enumerate(together.items()):
        np.testing.assert_array_equal(rows_of(alone), rows[32 * i : 32 * (i + 1)])
        assert set(alone.metrics()) == {name}
    with pytest.raises(ValueError, match="needs the valid split"):
        open_loader(two_stages.cfg).per_source()


# Pass after pass


@pytest.mark.parametrize("prefetch", [0, 2])
def test_every_pass_over_valid_begins_at_its_first_batch(two_stages, prefetch):
    """As nanoGPT evaluates: a few batches, then training goes on, then the same few again."""
    loader = open_valid(two_stages.cfg, prefetch=prefetch)
    whole = rows_of(loader)
    assert whole.shape == (96, 17)
    np.testing.assert_array_equal(rows_of(loader), whole)
    for _ in range(3):  # a pass that is left is not continued by the next
        np.testing.assert_array_equal(rows_of(itertools.islice(loader, 4)), whole[:48])
    np.testing.assert_array_equal(rows_of(loader), whole)
    for _ in range(2):  # `next` goes on from the position and ends
        with pytest.raises(StopIteration):
            next(loader)
    batches = iter(loader)
    np.testing.assert_array_equal(next(batches)[0], whole[:12, :-1])
    np.testing.assert_array_equal(rows_of(batches), whole[12:])


def test_valid_resumed_inside_a_pass_ends_that_pass_and_then_begins_again(two_stages):
    loader, resumed, at_end = (open_valid(two_stages.cfg) for _ in range(3))
    whole = rows_of(loader)
    list(itertools.islice(loader, 3))
    resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    np.testing.assert_array_equal(rows_of(resumed), whole[36:])
    np.testing.assert_array_equal(rows_of(resumed), whole)
    resumed.seek_step(7)
    np.testing.assert_array_equal(rows_of(resumed), whole[84:])
    at_end.load_state_dict(resumed.state_dict())
    np.testing.assert_array_equal(rows_of(at_end), whole)


def test_train_is_read_once_and_an_iteration_continues_from_the_position(two_stages):
    loader = open_loader(two_stages.cfg, backend="numpy")
    assert len(list(itertools.islice(loader, 5))) == 5
    assert len(list(loader)) == 33 - 5
    assert list(loader) == []


# Ranks and the last batch


def mean_of_targets(batch) -> tuple[float, int]:
    """A loss that each target has of its own, as its mean on a rank, and how many there were."""
    counted = batch.targets != IGNORE_INDEX
    losses = np.where(counted, 3 + np.sin(batch.targets + batch.inputs / 7), 0)
    with np.errstate(invalid="raise"):
        return losses.sum() / counted.sum(), int(counted.sum())


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
@pytest.mark.parametrize("num_windows", [1, 2, 3, 7, 8, 9, 12, 17])
def test_ranks_weighted_by_their_targets_have_the_mean_of_one_rank(run_of, num_windows, packing):
    cfg = run_of(num_windows, 8, packing=packing)
    alone = open_valid(cfg)
    expected = [mean_of_targets(alone.next_with_meta()) for _ in range(alone.num_steps)]
    short = expected[-1][1] if alone.num_sequences % 8 else 8
    for world_size in range(1, 9):
        if world_size > short:  # more ranks than targets: packed rows can hold a single one
            with pytest.raises(ConfigError, match="fewer targets than there are ranks"):
                open_valid(cfg, 0, world_size)
            continue
        ranks = [open_valid(cfg, rank, world_size) for rank in range(world_size)]
        for mean, count in expected:
            found = [mean_of_targets(rank.next_with_meta()) for rank in ranks]
            assert all(np.isfinite(own) for own, _ in found)
            assert sum(n for _, n in found) == count
            assert sum(own * n for own, n in found) / count == pytest.approx(mean, rel=1e-12)
        for rank in ranks:
            with pytest.raises(StopIteration):
                rank.next()


def test_ranks_in_order_give_the_rows_of_a_short_last_batch_that_has_enough(two_stages):
    cfg = two_stages.cfg | {"batch_size": 11}
    alone = rows_of(open_valid(cfg))
    ranks = [open_valid(cfg, r, 8) for r in range(8)]
    got = [rows_of([rank.next()]) for _ in range(9) for rank in ranks]
    assert [len(rows) for rows in got[-8:]] == [1] * 8
    np.testing.assert_array_equal(np.concatenate(got), alone)


@pytest.mark.parametrize("contiguous", [True, False])
def test_every_target_of_a_short_batch_is_on_one_rank_beside_its_whole_row(run_of, contiguous):
    cfg = run_of(11, 8)
    alone = open_valid(cfg)
    alone.seek_step(1)
    inputs, targets = alone.next()
    assert inputs.shape == (3, 16)
    seen = np.zeros_like(targets)
    for rank in range(8):
        loader = open_valid(cfg, rank, 8, contiguous=contiguous)
        loader.seek_step(1)
        batch = loader.next_with_meta()
        (row,) = batch.sequence_index - 8
        np.testing.assert_array_equal(batch.inputs[0], inputs[row])
        own = batch.targets[0] != IGNORE_INDEX
        assert own.any()
        np.testing.assert_array_equal(batch.targets[0][own], targets[row][own])
        assert batch.document_spans is not None
        assert len(batch.source_index) == len(batch.document_spans) == 1
        seen[row] += own
    np.testing.assert_array_equal(seen, np.ones_like(targets))


def test_integers_that_cannot_mark_a_target_are_refused_where_ranks_share_rows(run_of):
    cfg = run_of(9, 8)
    assert len(rows_of(open_valid(cfg, dtype="uint32"))) == 9
    with pytest.raises(ConfigError, match="uint32"):
        open_valid(cfg, 0, 2, dtype="uint32")
    assert len(rows_of(open_valid(cfg | {"batch_size": 3}, 0, 3, dtype="uint32"))) == 3


def test_more_ranks_than_targets_in_a_row_are_refused(tree):
    for name, num_tokens in (("web", 9), ("code", 3)):
        tree.add(name, 200)
        tree.add(name, num_tokens, split="valid", num_files=1)
    assert open_valid(tree.one("web", seq_len=2, batch_size=8), 7, 8).num_steps == 1
    cfg = tree.one("code", seq_len=2, batch_size=8)
    assert open_valid(cfg, 1, 2).num_steps == 1
    with pytest.raises(ConfigError, match="world_size"):
        open_valid(cfg, 2, 3)


def test_a_state_of_valid_moves_to_another_number_of_ranks_before_its_last_batch(run_of):
    cfg = run_of(11, 8)
    two = open_valid(cfg, 0, 2)
    two.next()
    state = json.loads(json.dumps(two.state_dict()))
    total = 0
    for rank in range(8):
        loader = open_valid(cfg, rank, 8)
        loader.load_state_dict(state)
        total += sum(int((t != IGNORE_INDEX).sum()) for _, t in loader)
        assert loader.metrics()["web"]["sequences"] == 11  # each once, whatever shares it
    assert total == 3 * 16
    with pytest.raises(StateError):
        two.seek(9)
