import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import loader.order.packing
from loader import (
    IGNORE_INDEX,
    DeterministicLoader,
    PlanSettings,
    Stage,
    StageSource,
    build_plan,
    open_loader,
)
from loader.order.packing import BLOCK_DOCUMENTS, best_fit_decreasing, pack
from loader.plan.check import check_plan
from tests.refusals import refused


def packed_plan(tree, names=("web", "code"), seq_len=64, num_tokens=12_800, batch_size=8, **chosen):
    stages = [Stage("all", "m", num_tokens, tuple(StageSource(n, 1.0) for n in names))]
    settings = PlanSettings(seq_len=seq_len, batch_size=batch_size, packing="best_fit", **chosen)
    manifests = {n: tree.root / n / "train" / "manifest.json" for n in names}
    valid = {n: tree.root / n / "valid" / "manifest.json" for n in names}
    valid = {n: p for n, p in valid.items() if p.exists()}
    return build_plan(stages, manifests, settings, root=tree.root, plan_id="x", valid=valid)


@pytest.fixture
def packed_tree(tree):
    for name in ("web", "code"):
        tree.add(name, 9000, num_files=5)
        tree.add(name, 700, split="valid", num_files=2)
    return tree


@pytest.mark.parametrize("split", ["train", "valid"])
@pytest.mark.parametrize("block", [BLOCK_DOCUMENTS, 16])  # 16: blocks begin inside files
def test_rows_hold_documents_whole_and_predict_the_next_token_of_the_same(
    packed_tree, lib, split, block, monkeypatch
):
    monkeypatch.setattr("loader.order.packing.BLOCK_DOCUMENTS", block)
    loader = DeterministicLoader(packed_plan(packed_tree), split=split, backend="numpy")
    seen = {name: [] for name in loader.source_names}
    for _ in range(loader.num_steps):
        batch = loader.next_with_meta()
        for inputs, targets, spans, source in zip(*batch[:2], batch[4], batch.source_index):
            expected = np.full(64, IGNORE_INDEX)
            for start, end in spans.tolist():
                seen[batch.source_names[source]].append(tuple(inputs[start:end].tolist()))
                expected[start : end - 1] = inputs[start + 1 : end]
                assert inputs[end - 1] == lib.EOS
            np.testing.assert_array_equal(targets, expected)
            assert (inputs[spans[-1, 1] :] == lib.EOS).all()
    for name, documents in seen.items():
        tokens = packed_tree.tokens[name, split]
        ends = np.flatnonzero(tokens == lib.EOS) + 1
        own = Counter(tuple(tokens[a:b].tolist()) for a, b in zip([0, *ends[:-1]], ends))
        assert Counter(documents) <= own
        assert split == "train" or Counter(documents) == own  # an epoch has each once


def test_a_document_longer_than_a_row_is_predicted_over_its_rows(tree, lib):
    directory = tree.root / "web" / "train"
    tokens = np.arange(1, 151, dtype=np.uint32)
    tokens[[99, 149]] = lib.EOS
    entry = lib.write_shard(directory, "web", 0, tokens)
    lib.write_manifest(directory, "web", [entry])
    plan = packed_plan(tree, ["web"], 40, 160, batch_size=4)
    batch = DeterministicLoader(plan, backend="numpy").next_with_meta()
    predicted = np.concatenate([row[row != IGNORE_INDEX] for row in batch.targets])
    # All but the first token of each document, each once.
    assert sorted(predicted.tolist()) == sorted([*tokens[1:100].tolist(), *tokens[101:].tolist()])
    assert batch.targets[0, -1] == tokens[40]


def test_a_block_packed_again_is_the_block_packed_before(packed_tree, monkeypatch):
    monkeypatch.setattr(loader.order.packing, "BLOCK_DOCUMENTS", 16)
    plan = packed_plan(packed_tree)
    kept = [i.copy() for i, _ in DeterministicLoader(plan, backend="numpy")]
    monkeypatch.setattr(loader.order.packing, "MAX_KEPT_BLOCKS", 1)
    again = [i.copy() for i, _ in DeterministicLoader(plan, backend="numpy")]
    for a, b in itertools.zip_longest(kept, again):
        np.testing.assert_array_equal(a, b)


def test_impossible_settings_of_packed_rows_are_refused(packed_tree, tmp_path):
    plan = packed_plan(packed_tree)
    with pytest.raises(ValueError, match="-100"):
        DeterministicLoader(plan, dtype="uint32")
    targets = DeterministicLoader(plan, dtype="int32", backend="numpy").next()[1]
    assert targets.min() == IGNORE_INDEX
    packed = packed_tree.one(policy="least_consumed", packing="best_fit")
    with refused("E-PLAN-FORMAT", match="rows of best_fit have different numbers of tokens"):
        open_loader(packed)
    np.save(tmp_path / "a.npy", np.arange(5000, dtype=np.uint32))
    unindexed = {"data_path": tmp_path, "allow_unmanifested": True, "policy": "swrr"}
    with refused("E-INDEX-MISSING"):
        open_loader(packed | unindexed)
    source, *others = plan.stages[0].sources
    empty = replace(plan.stages[0], sources=(replace(source, num_tokens=0), *others))
    with refused(
        "E-PLAN-SHORT", naming=["'web' is too short", "found 0 windows", "at least 100 by"]
    ):
        check_plan(replace(plan, stages=(empty,)))


@pytest.mark.parametrize("policy", ["swrr", "block", "weighted_random", "epoch_weighted"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_counted_tokens_of_packed_rows_exclude_padding(tree, policy, shuffle):
    for name, num_tokens in (("web", 1500), ("code", 700)):
        tree.add(name, num_tokens)
    cfg = {"datasets": tree.rows("web", "code"), "batch_size": 6, "seq_len": 64, "steps": 20}
    cfg |= {"on_exhaust": "wrap", "packing": "best_fit", "policy": policy, "shuffle": shuffle}
    loader = open_loader(cfg, backend="numpy")
    again = open_loader(cfg, backend="numpy")
    counts = dict.fromkeys(loader.source_names, 0)
    at_step = [dict(counts)]
    for _ in range(20):
        batch = loader.next_with_meta()
        for spans, source in zip(batch.document_spans, batch.source_index):
            counts[batch.source_names[source]] += int((spans[:, 1] - spans[:, 0]).sum())
        found = {name: row["tokens"] for name, row in loader.metrics().items()}
        assert found == counts
        rows = loader.state_dict()["datasets"]
        assert {row["spec"]: row["token_offset"] for row in rows} == counts
        at_step.append(found)
    for step in np.random.default_rng(3).integers(0, 21, 60).tolist():  # asked for in any order
        again.seek_step(step)
        assert {name: row["tokens"] for name, row in again.metrics().items()} == at_step[step]
    assert sum(counts.values()) < 20 * 6 * 64
    # Counts of packed rows are a place in the order of rows, whatever they hold.
    half = open_loader(cfg, backend="numpy")
    half.seek_step(10)
    rest = open_loader(cfg | {"steps": 30}, backend="numpy")
    rest.load_state_dict({"datasets": half.state_dict()["datasets"]})
    if rest.step == 0:
        before, after = half.state_dict()["datasets"], rest.state_dict()["datasets"]
        assert before == after


# Which documents share a row


def spans_of(lengths) -> np.ndarray:
    ends = np.cumsum(lengths)
    return np.stack([ends - lengths, ends], axis=1)


def brute_force(lengths: list[int], capacity: int) -> list[int]:
    """Best fit decreasing by looking at every bin."""
    room: list[tuple[int, int]] = []  # room of each bin, and when it came to that room
    found = [0] * len(lengths)
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    for clock, item in enumerate(order):
        fits = [b for b, (left, _) in enumerate(room) if left >= lengths[item]]
        if fits:
            chosen = min(fits, key=lambda b: (room[b][0], -room[b][1]))
        else:
            room.append((capacity, 0))
            chosen = len(room) - 1
        room[chosen] = (room[chosen][0] - lengths[item], clock)
        found[item] = chosen
    return found


@settings(max_examples=200)
@given(st.lists(st.integers(1, 20), max_size=60), st.integers(20, 40))
def test_best_fit_is_that_of_a_search_over_all_bins(lengths, capacity):
    got = best_fit_decreasing(np.array(lengths, np.int64), capacity).tolist()
    assert got == brute_force(lengths, capacity)


@settings(max_examples=200)
@given(st.lists(st.integers(1, 100), max_size=50), st.integers(1, 40))
def test_every_token_is_packed_once_and_no_document_that_fits_is_cut(lengths, seq_len):
    spans = spans_of(np.array(lengths, np.int64))
    bins = pack(spans, seq_len)
    assert (bins.num_bins > 0) == bool(lengths)
    seen = np.concatenate(
        [np.arange(s, s + n) for s, n in zip(bins.starts, bins.lengths)] or [np.empty(0)]
    )
    assert sorted(seen.tolist()) == list(range(sum(lengths)))
    used = np.add.reduceat(bins.lengths, bins.rows[:-1]) if bins.num_bins else np.empty(0)
    assert (used <= seq_len).all()
    pieces = set(zip(bins.starts.tolist(), (bins.starts + bins.lengths).tolist()))
    assert all((s, e) in pieces for s, e in spans.tolist() if e - s <= seq_len)
    # Rows come in the order of their first document, a row's documents in the order of the data.
    assert (np.diff(bins.starts[bins.rows[:-1]]) > 0).all()
    assert all((np.diff(bins.starts[a:b]) > 0).all() for a, b in itertools.pairwise(bins.rows))
    ends = {e for _, e in spans.tolist()}
    assert bins.is_end.tolist() == [s + n in ends for s, n in zip(bins.starts, bins.lengths)]
    # A document that is cut is cut at whole rows only.
    for start, end in spans.tolist():
        sizes = [n for s, n in zip(bins.starts, bins.lengths) if start <= s < end]
        assert sum(n < seq_len for n in sizes) <= 1


@pytest.mark.parametrize("seq_len", [512, 2048, 8192])
@pytest.mark.parametrize(("mean", "sigma"), [(6.0, 1.2), (7.0, 1.0), (6.5, 1.5)])
def test_padding_is_below_one_percent_on_log_normal_lengths(seq_len, mean, sigma):
    rng = np.random.default_rng(0)
    lengths = np.maximum(1, rng.lognormal(mean, sigma, BLOCK_DOCUMENTS).astype(np.int64))
    bins = pack(spans_of(lengths), seq_len)
    assert 1 - lengths.sum() / (bins.num_bins * seq_len) < 0.01
