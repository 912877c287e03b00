from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loader import PlanError
from loader.mixture import quotas, weights_fixed_point
from loader.policies import Sequential, Swrr

OLMO = [4510.0, 805.0, 409.0, 151.0, 2.51]


def classical(weights: list[int], n: int) -> list[int]:
    """Smooth weighted round-robin without quotas."""
    acc, picks = [0] * len(weights), []
    for _ in range(n):
        acc = [a + w for a, w in zip(acc, weights)]
        k = max(range(len(acc)), key=lambda i: (acc[i], -i))
        acc[k] -= sum(weights)
        picks.append(k)
    return picks


def test_picks_are_the_classical_ones_while_no_quota_is_met():
    weights = weights_fixed_point(OLMO)
    schedule = Swrr(weights, [10**6] * 5)
    assert schedule.sources(0, 100_000).tolist() == classical(weights, 100_000)


def test_picks_equal_brute_force_through_every_exhaustion(lib):
    weights = weights_fixed_point([5, 3, 2, 1.5, 0.1, 0.01])
    targets = [30_000, 25_000, 20_000, 15_000, 9_000, 1_000]
    schedule = Swrr(weights, targets)
    expected = lib.swrr(weights, targets)
    assert len(expected) == schedule.num_sequences == 100_000
    assert schedule.sources(0, 100_000).tolist() == expected
    assert schedule.counts_before(100_000).tolist() == targets


def test_light_source_with_an_equal_quota_is_read_to_its_end(lib):
    schedule = Swrr([990_000, 10_000], [50, 50])
    assert schedule.sources(0, 100).tolist() == lib.swrr([990_000, 10_000], [50, 50])
    assert schedule.counts_before(100).tolist() == [50, 50]


def test_accumulators_start_again_when_a_source_leaves():
    # 0 leaves after pick 4 with 2 in debt; from zero, 1 and 2 take turns beginning with 1.
    assert Swrr([5, 3, 1], [2, 9, 9]).sources(0, 9).tolist() == [0, 1, 0, *classical2(6)]


def classical2(n: int) -> list[int]:
    return [i + 1 for i in classical([3, 1], n)]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 60)), min_size=1, max_size=6).filter(
        lambda rows: any(quota for _, quota in rows)
    ),
    st.data(),
)
def test_any_range_and_count_agrees_with_replay(lib, rows, data):
    weights, targets = [w for w, _ in rows], [q for _, q in rows]
    expected = lib.swrr(weights, targets)
    schedule = Swrr(weights, targets)
    a = data.draw(st.integers(0, len(expected)))
    b = data.draw(st.integers(a, len(expected)))
    assert schedule.sources(a, b).tolist() == expected[a:b]
    counts = np.bincount(expected[:b], minlength=len(rows))
    assert schedule.counts_before(b).tolist() == counts.tolist()


@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(0.001, 1), min_size=2, max_size=8), st.integers(1, 400))
def test_prefixes_stay_within_one_sequence_of_their_share(weights, n):
    fixed = weights_fixed_point(weights)
    counts = Swrr(fixed, [400] * len(fixed)).counts_before(n)
    ideal = n * np.array(fixed) / sum(fixed)
    assert np.abs(counts - ideal).max() < (1 if len(fixed) == 2 else len(fixed))


def test_far_position_equals_the_same_place_in_the_first_period():
    weights = weights_fixed_point([0.61, 0.28, 0.11])
    period = sum(weights) // np.gcd.reduce(weights)
    start = time.process_time()
    schedule = Swrr(weights, [10**9] * 3)
    far = 10_000_000 * int(period)
    schedule.counts_before(far)
    assert time.process_time() - start < 0.1  # a period of 100 picks, not of a million
    np.testing.assert_array_equal(schedule.sources(far + 5, far + 305), schedule.sources(5, 305))
    assert schedule.counts_before(far).tolist() == [far // 100 * w for w in (61, 28, 11)]


def test_table_of_a_million_picks_and_a_far_position_take_under_two_seconds():
    rng = np.random.default_rng(3)
    weights = weights_fixed_point(rng.random(24).tolist())
    assert np.gcd.reduce(weights) == 1
    start = time.process_time()
    schedule = Swrr(weights, quotas(2 * 10**9, weights))
    schedule.counts_before(10**9)
    assert time.process_time() - start < 2
    start = time.process_time()
    counts = schedule.counts_before(10**9 + 12_345)
    schedule.sources(10**9, 10**9 + 4096)
    assert time.process_time() - start < 0.05
    assert counts.sum() == 10**9 + 12_345


def test_more_than_256_sources_keep_their_numbers(lib):
    weights = [1 + i % 3 for i in range(300)]
    targets = [2] * 300
    assert Swrr(weights, targets).sources(0, 600).tolist() == lib.swrr(weights, targets)


def test_stop_at_first_ends_with_the_pick_that_meets_a_quota(lib):
    schedule = Swrr([3, 1], [30, 30], stop_at_first=True)
    picks = lib.swrr([3, 1], [30, 30])
    end = next(i + 1 for i in range(60) if picks[: i + 1].count(0) == 30)
    assert schedule.num_sequences == end
    assert schedule.sources(0, end).tolist() == picks[:end]
    with pytest.raises(IndexError):
        schedule.sources(0, end + 1)


def test_quota_without_weight_is_refused():
    with pytest.raises(PlanError):
        Swrr([1, 0], [5, 5])


def test_sequential_reads_each_source_whole():
    schedule = Sequential([2, 0, 3])
    assert schedule.sources(0, 5).tolist() == [0, 0, 2, 2, 2]
    assert [schedule.counts_before(n).tolist() for n in (0, 1, 4, 5)] == [
        [0, 0, 0],
        [1, 0, 0],
        [2, 0, 2],
        [2, 0, 3],
    ]
