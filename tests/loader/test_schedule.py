import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loader.order.policies import POLICIES, weight_unit
from loader.order.shuffle import Permutation, key_of
from loader.plan.mixture import quotas, weights_fixed_point
from loader.plan.records import LoaderPlan, PlanSource, PlanStage
from loader.plan.schedule import PlanSchedule
from tests.refusals import refused


def plan_of(weights, num_sequences, **fields) -> LoaderPlan:
    """A plan without data, of one stage."""
    policy = fields.get("policy", "swrr")
    fixed = weights_fixed_point(weights, weight_unit(policy))
    sources = tuple(
        PlanSource(f"s{i}", f"s{i}/manifest.json", "0", 10**12, weight=w, quota_sequences=q)
        for i, (w, q) in enumerate(zip(fixed, quotas(num_sequences, weights)))
    )
    values = {"plan_id": "x", "tokenizer": "toy", "vocab_size": 1000, "eos_token_id": 999}
    values |= {"seq_len": 2048, "batch_size": 32, "policy": policy, "on_exhaust": "wrap"}
    return LoaderPlan(stages=(PlanStage("train", "m", sources),), **values | fields)


SHUFFLES = [{"shuffle": True}, {"shuffle_blocks": True, "seq_len": 2**18}]  # 16 windows a block


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("shuffle", [{}, *SHUFFLES], ids=str)
def test_any_range_is_part_of_one_stream(policy, shuffle):
    plan = plan_of([5, 3, 1], 900, policy=policy, **shuffle)
    capacities = [200, 77, 1000]
    sources, windows = PlanSchedule(plan, "train", capacities).locate(0, 900)
    for start, stop in ((0, 1), (449, 460), (880, 900), (17, 800), (5, 5)):
        schedule = PlanSchedule(plan, "train", capacities)
        found = schedule.locate(start, stop)
        np.testing.assert_array_equal(found, (sources[start:stop], windows[start:stop]))
        before = np.bincount(sources[:start], minlength=3)
        assert schedule.counts_before(start).tolist() == before.tolist()
    # A source's windows without shuffle are its own order, wrapped by tokens: counting on.
    for source in range(3):
        own = windows[sources == source]
        if not (shuffle or policy == "epoch_weighted"):
            assert own.tolist() == list(range(len(own)))
        else:
            assert (own < capacities[source]).all()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("shuffle", SHUFFLES, ids=str)
def test_each_epoch_is_a_permutation_and_no_two_are_equal(policy, shuffle):
    plan = plan_of([1, 1], 1000, policy=policy, **shuffle)
    sources, windows = PlanSchedule(plan, "train", [100, 60]).locate(0, 1000)
    for source, capacity in ((0, 100), (1, 60)):
        own = windows[sources == source]
        epochs = own[: len(own) // capacity * capacity].reshape(-1, capacity)
        assert len(epochs) >= 5
        for epoch in epochs:
            assert sorted(epoch.tolist()) == list(range(capacity))
        assert len({epoch.tobytes() for epoch in epochs}) == len(epochs)
        if "shuffle_blocks" in shuffle:  # each block at once, in any order, and the short one last
            whole = epochs[:, : capacity // 16 * 16].reshape(len(epochs), -1, 16)
            assert (whole // 16 == whole[..., :1] // 16).all()
            assert len({tuple(order) for order in (whole[..., 0] // 16).tolist()}) > 2
            assert (np.diff(whole) < 0).any(axis=2).all()


def test_order_of_a_source_depends_on_the_seed_and_not_on_the_other_sources():
    def order(plan, source):
        schedule = PlanSchedule(plan, "train", [90] * len(plan.sources))
        sources, windows = schedule.locate(0, schedule.num_sequences)
        return windows[sources == source][:60].tolist()

    plan = plan_of([1, 1, 1], 300, shuffle=True)
    stage = plan.stages[0]
    fewer = replace(plan, stages=(replace(stage, sources=stage.sources[1:]),))
    assert order(fewer, 0) == order(plan, 1)
    assert order(replace(plan, seed=43), 1) != order(plan, 1)


def test_positions_outside_the_stream_are_refused():
    schedule = PlanSchedule(plan_of([1, 1], 10), "train", [9, 9])
    for start, stop in ((0, 11), (-1, 3), (5, 4), (11, 11)):
        with pytest.raises(IndexError):
            schedule.locate(start, stop)


def test_epochs_count_windows_where_windows_wrap_and_tokens_where_tokens_do():
    plan = plan_of([1, 1], 1000, shuffle=True)
    schedule = PlanSchedule(plan, "train", [100, 250])
    np.testing.assert_allclose(schedule.epochs_before(1000), [5, 2])
    schedule = PlanSchedule(replace(plan, shuffle=False), "train", [100, 250])
    np.testing.assert_allclose(schedule.epochs_before(1000), 500 * 2048 / 1e12)


@pytest.mark.parametrize(
    ("change", "capacities", "found"),
    [
        ({"on_exhaust": "all_exhausted"}, [499, 500], "499 windows"),
        ({"on_exhaust": "all_exhausted", "max_epochs": 2}, [249, 250], "249 windows in each of 2"),
        ({"on_exhaust": "wrap", "max_epochs": 3, "shuffle": True}, [166, 167], "166 windows"),
        ({"on_exhaust": "wrap", "shuffle": True}, [0, 500], "0 windows"),
    ],
)
def test_source_with_too_few_windows_is_refused_by_name(change, capacities, found):
    plan = plan_of([1, 1], 1000, packing="best_fit", **change)
    with refused("E-PLAN-SHORT", naming=["source 's0'", found]):
        PlanSchedule(plan, "train", capacities)
    enough = [max(1, capacity + 1) for capacity in capacities]
    assert PlanSchedule(plan, "train", enough).num_sequences == 1000


@pytest.mark.parametrize(
    ("policy", "num_sources"),
    [
        *((policy, 2) for policy in POLICIES),
        ("block", 500),
        pytest.param("weighted_random", 500, marks=pytest.mark.slow),
        pytest.param("least_consumed", 500, marks=pytest.mark.slow),
        pytest.param("swrr", 500, marks=pytest.mark.slow),  # a table of 10^6 picks, traced
    ],
)
def test_memory_is_flat_in_run_length_and_small(policy, num_sources):
    weights = [7.0, 3.0] if num_sources == 2 else [1.0 + i % 7 for i in range(num_sources)]
    peaks = []
    for num_tokens in (10**10, 10**12):
        tracemalloc.start()
        plan = plan_of(weights, num_tokens // 2048, policy=policy, shuffle=True)
        schedule = PlanSchedule(plan, "train", [10**6] * num_sources)
        for position in (0.1, 0.5, 0.3):
            n = int(schedule.num_sequences * position)
            schedule.locate(n, n + 4096)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 50e6
    assert peaks[1] < 1.3 * peaks[0] + 2e5


@pytest.mark.parametrize("policy", POLICIES)
def test_opening_and_seeking_to_1e9_goes_through_no_sequence_before(lib, policy):
    plan = plan_of([0.7, 0.3], 2 * 10**9, policy=policy, shuffle=True)

    def once() -> None:
        PlanSchedule(plan, "train", [10**6, 10**6]).locate(10**9, 10**9 + 32)

    once()  # a table of `swrr` is made once
    assert lib.calls_of(once) < 10_000


# Permutations


@settings(max_examples=90)
@given(st.integers(1, 5000) | st.integers(1, 2**62), st.integers(0, 2**64 - 1), st.data())
def test_any_part_of_a_permutation_is_computed_without_the_rest_at_any_size(size, key, data):
    some = st.lists(st.integers(0, size - 1), max_size=20, unique=True)
    elements = np.arange(size) if size <= 5000 else np.array(data.draw(some), np.int64)
    order = Permutation(size, key)
    placed = order(elements)
    assert ((placed >= 0) & (placed < size)).all()
    assert len(set(placed.tolist())) == len(elements)
    alone = [int(order(np.array([e]))[0]) for e in elements[:20].tolist()]
    assert alone == placed[:20].tolist()


def test_keys_give_different_orders_without_fixed_structure():
    orders = [Permutation(1000, key_of(1, epoch))(np.arange(1000)) for epoch in range(50)]
    assert len({order.tobytes() for order in orders}) == 50
    together = np.stack(orders)
    # Where an element goes has the mean and spread of a uniform choice, and neighbours part.
    assert abs(together.mean(axis=0) - 499.5).max() < 200
    assert (np.abs(np.diff(together)) == 1).mean() < 0.01
    assert abs((together == np.arange(1000)).sum(axis=1).mean() - 1) < 0.6


def test_orders_are_the_same_on_every_machine():
    assert Permutation(10, 7)(np.arange(10)).tolist() == [3, 4, 2, 9, 8, 6, 5, 0, 7, 1]
    assert key_of(42, 1, 2) == 17067043885969552613


def test_an_element_of_a_trillion_costs_what_one_of_ten_costs(lib):
    few, many = Permutation(10, 3), Permutation(10**12, 3)
    cost = lib.calls_of(lambda: few(np.arange(10)))
    assert lib.calls_of(lambda: many(np.arange(10**11, 10**11 + 100_000))) <= 2 * cost
