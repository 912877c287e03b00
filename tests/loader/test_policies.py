from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loader import PlanError
from loader.order.least_consumed import LeastConsumed
from loader.order.policies import POLICIES, make_schedule, weight_unit
from loader.order.shuffle import hashes, key_of
from loader.plan.mixture import quotas, weights_fixed_point

RANDOM = ("block", "weighted_random", "epoch_weighted")


def swrr(weights, quotas, **options):
    return make_schedule("swrr", weights, quotas, **options)


def planned(policy, weights, num_sequences, **options):
    """A schedule as a plan makes it: quotas are the weights' shares."""
    fixed = weights_fixed_point(weights, weight_unit(policy))
    return make_schedule(policy, fixed, quotas(num_sequences, weights), **options)


def counts_of(picks, num_sources: int) -> list[int]:
    return np.bincount(picks, minlength=num_sources).tolist()


def test_picks_equal_brute_force_through_every_exhaustion(lib):
    weights = weights_fixed_point([5, 3, 2, 1.5, 0.1, 0.01])
    targets = [30_000, 25_000, 20_000, 15_000, 9_000, 1_000]
    schedule = swrr(weights, targets)
    expected = lib.swrr(weights, targets)
    assert len(expected) == schedule.num_sequences == 100_000
    assert schedule.sources(0, 100_000).tolist() == expected
    assert schedule.counts_before(100_000).tolist() == targets


@pytest.mark.parametrize("policy", POLICIES)
def test_light_source_with_an_equal_quota_is_read_to_its_end(lib, policy):
    schedule = make_schedule(policy, [990_000, 10_000], [50, 50])
    picks = schedule.sources(0, 100)
    assert counts_of(picks, 2) == [50, 50]
    assert counts_of(picks[:40], 2)[0] >= 36
    if policy == "swrr":
        assert picks.tolist() == lib.swrr([990_000, 10_000], [50, 50])


rows_of_any = st.lists(
    st.tuples(st.integers(1, 40), st.integers(0, 60)), min_size=1, max_size=6
).filter(lambda rows: any(quota for _, quota in rows))


@settings(max_examples=60)
@given(rows_of_any, st.data())
def test_any_range_and_count_agrees_with_replay(lib, rows, data):
    weights, targets = [w for w, _ in rows], [q for _, q in rows]
    expected = lib.swrr(weights, targets)
    schedule = swrr(weights, targets)
    a = data.draw(st.integers(0, len(expected)))
    b = data.draw(st.integers(a, len(expected)))
    assert schedule.sources(a, b).tolist() == expected[a:b]
    assert schedule.counts_before(b).tolist() == counts_of(expected[:b], len(rows))


@settings(max_examples=20)
@given(st.lists(st.floats(0.001, 1), min_size=2, max_size=8), st.integers(1, 400))
def test_prefixes_stay_within_one_sequence_of_their_share(weights, n):
    fixed = weights_fixed_point(weights)
    counts = swrr(fixed, [400] * len(fixed)).counts_before(n)
    ideal = n * np.array(fixed) / sum(fixed)
    assert np.abs(counts - ideal).max() < (1 if len(fixed) == 2 else len(fixed))


def test_far_position_equals_the_same_place_in_the_first_period(lib):
    weights = weights_fixed_point([0.61, 0.28, 0.11])
    period = sum(weights) // np.gcd.reduce(weights)
    schedule, far = swrr(weights, [10**9] * 3), 10_000_000 * int(period)
    # A period of 100 picks, not of a million.
    assert lib.calls_of(lambda: schedule.counts_before(far)) < 1000
    np.testing.assert_array_equal(schedule.sources(far + 5, far + 305), schedule.sources(5, 305))
    assert schedule.counts_before(far).tolist() == [far // 100 * w for w in (61, 28, 11)]


def test_a_table_of_a_million_picks_is_made_once_and_then_looked_up(lib):
    rng = np.random.default_rng(3)
    weights = weights_fixed_point(rng.random(24).tolist())
    assert np.gcd.reduce(weights) == 1
    schedule = swrr(weights, quotas(2 * 10**9, weights))
    assert lib.calls_of(lambda: schedule.counts_before(10**9)) < 3 * 10**6
    counts = schedule.counts_before(10**9 + 12_345)
    assert lib.calls_of(lambda: schedule.counts_before(10**9 + 12_345)) < 100
    assert lib.calls_of(lambda: schedule.sources(10**9, 10**9 + 4096)) < 100
    assert counts.sum() == 10**9 + 12_345


def test_more_than_256_sources_keep_their_numbers(lib):
    weights = [1 + i % 3 for i in range(300)]
    targets = [2] * 300
    assert swrr(weights, targets).sources(0, 600).tolist() == lib.swrr(weights, targets)
    for policy in POLICIES:
        assert counts_of(make_schedule(policy, weights, targets).sources(0, 600), 300) == targets


@pytest.mark.parametrize("policy", POLICIES)
def test_quota_without_weight_is_refused(policy):
    with pytest.raises(PlanError, match="source 1"):
        make_schedule(policy, [1, 0], [5, 5])


@settings(max_examples=120)
@given(st.sampled_from(POLICIES), rows_of_any, st.integers(1, 90), st.integers(0, 2**63), st.data())
def test_every_policy_reads_any_range_as_one_stream_and_meets_every_quota(
    policy, rows, pass_sequences, key, data
):
    weights, targets = [w for w, _ in rows], [q for _, q in rows]

    def opened():
        return make_schedule(policy, weights, targets, key=key, pass_sequences=pass_sequences)

    whole = opened().sources(0, sum(targets))
    assert counts_of(whole, len(rows)) == targets
    schedule = opened()
    for _ in range(3):
        a = data.draw(st.integers(0, len(whole)))
        b = data.draw(st.integers(a, len(whole)))
        assert schedule.sources(a, b).tolist() == whole[a:b].tolist()
        assert schedule.counts_before(b).tolist() == counts_of(whole[:b], len(rows))


any_weights = st.lists(st.floats(-12, 12).map(lambda power: 10.0**power), min_size=1, max_size=500)


@settings(max_examples=25)
@given(st.sampled_from((*RANDOM, "least_consumed")), any_weights, st.integers(1, 10**12), st.data())
def test_weights_over_24_decades_meet_their_quotas_at_any_length(policy, weights, n, data):
    schedule = planned(policy, weights, n, pass_sequences=10**6)
    shares = quotas(n, weights)
    assert schedule.num_sequences == n
    at = data.draw(st.integers(0, n))
    if policy == "least_consumed" and len(weights) > 50:
        at = min(at, n // 2)  # each source that leaves costs a stretch
    counts = schedule.counts_before(at)
    assert counts.sum() == at
    assert (counts >= 0).all()
    assert (counts <= shares).all()
    stop = min(n, at + 50)
    picks = schedule.sources(at, stop)
    after = schedule.counts_before(stop)
    assert (after - counts).tolist() == counts_of(picks, len(weights))


# block


@settings(max_examples=40)
@given(any_weights, st.integers(1, 10**12), st.data())
def test_block_keeps_every_source_within_one_of_its_share_at_block_ends(weights, n, data):
    shares = quotas(n, weights)
    schedule = planned("block", weights, n)
    filler = int(np.argmax(shares))
    least = -(-(sum(1 for s in shares if s) - 1) * n // shares[filler])
    size = max(2048, least)
    at = min(n, size * data.draw(st.integers(0, max(1, n // size) - 1)))
    for i, (count, share) in enumerate(zip(schedule.counts_before(at).tolist(), shares)):
        off = abs(Fraction(count) - Fraction(at * share, n))
        assert off < (1 if i != filler else len(weights))


def test_block_gives_a_weight_of_1e_8_its_share_of_a_run_of_1e12():
    schedule = planned("block", [0.5, 0.3, 0.2 - 1e-8, 1e-8], 10**12)
    assert schedule.counts_before(10**12).tolist()[3] == 10_000
    halfway = schedule.counts_before(2048 * 244_140_625)  # a block's end at 5 * 10^11
    assert abs(int(halfway[3]) - 5_000) <= 1
    early = schedule.counts_before(2048 * 48_829)
    assert abs(int(early[3]) - 1) <= 1


def test_blocks_hold_the_same_counts_in_different_orders():
    schedule = planned("block", [3, 1], 2048 * 20)
    blocks = [schedule.sources(2048 * i, 2048 * (i + 1)) for i in range(20)]
    assert {tuple(counts_of(block, 2)) for block in blocks} == {(1536, 512)}
    assert len({block.tobytes() for block in blocks}) == 20


# weighted_random


def test_weighted_random_is_drawing_without_replacement():
    # Over many seeds every arrangement of a small multiset is as frequent as any other.
    frequency: dict[bytes, int] = {}
    for seed in range(6000):
        schedule = make_schedule("weighted_random", [2, 1, 1], [2, 1, 1], key=key_of(seed))
        drawn = schedule.sources(0, 4).astype(np.uint8).tobytes()
        frequency[drawn] = frequency.get(drawn, 0) + 1
    assert len(frequency) == 12
    expected = 6000 / 12
    chi_square = sum((n - expected) ** 2 / expected for n in frequency.values())
    assert chi_square < 31.3  # 0.1 % point of 11 degrees of freedom


def test_weighted_random_counts_follow_the_law_at_every_scale():
    stats = pytest.importorskip("scipy.stats")
    weights, n = [0.6, 0.3, 0.1], 3_000_000
    for at in (100, 16_000, 400_000, 1_499_999):
        counts = [
            planned("weighted_random", weights, n, key=key_of(seed)).counts_before(at)
            for seed in range(150)
        ]
        for i, weight in enumerate(weights):
            found = np.array([count[i] for count in counts])
            law = stats.hypergeom(n, round(n * weight), at)
            p = stats.kstest((found - law.mean()) / law.std(), "norm").pvalue
            assert p > 1e-4, (at, i, p)
            assert abs(found.std() / law.std() - 1) < 0.25


def test_weighted_random_neighbours_are_independent():
    schedule = planned("weighted_random", [0.5, 0.5], 10**9)
    picks = schedule.sources(123_456_789, 123_456_789 + 200_000)
    pairs = counts_of(picks[:-1] * 2 + picks[1:], 4)
    chi_square = sum((n - 50_000) ** 2 / 50_000 for n in pairs)
    assert chi_square < 21.1  # 0.01 % point of 3 degrees of freedom


# epoch_weighted


def test_epoch_weighted_takes_the_rounded_share_of_every_epoch():
    # Targets of an epoch: round(p x total), as the mixing document's sampler has them.
    schedule = planned("epoch_weighted", [0.55, 0.3, 0.15], 10_000, pass_sequences=1_000)
    for epoch in range(10):
        picks = schedule.sources(1_000 * epoch, 1_000 * (epoch + 1))
        np.testing.assert_allclose(counts_of(picks, 3), [550, 300, 150], atol=1)


# least_consumed


def least_consumed(weights, targets, seq_len, key, tokens=None) -> list[int]:
    """By definition: lowest tokens / weight; ties by a hash of the source's draw."""
    left, have, picks, stretch = list(targets), list(tokens or [0] * len(targets)), [], 0
    drawn = [0] * len(weights)
    while any(left):
        active = [i for i, quota in enumerate(left) if quota]
        keys = {i: key_of(key_of(key, stretch), k) for k, i in enumerate(active)}

        def order(i, keys=keys, drawn=drawn):
            counter = np.array([keys[i] + drawn[i] & 2**64 - 1], np.uint64).astype(np.int64)
            return Fraction(have[i], weights[i]), int(hashes(0, counter)[0])

        k = min(active, key=order)
        picks.append(k)
        have[k] += seq_len
        drawn[k] += 1
        left[k] -= 1
        if not left[k]:
            stretch, drawn = stretch + 1, [0] * len(weights)
    return picks


@settings(max_examples=80)
@given(rows_of_any, st.integers(1, 50), st.integers(0, 2**40))
def test_least_consumed_is_its_sequential_definition(rows, seq_len, key):
    weights, targets = [w for w, _ in rows], [q for _, q in rows]
    schedule = make_schedule("least_consumed", weights, targets, key=key, seq_len=seq_len)
    expected = least_consumed(weights, targets, seq_len, key)
    assert schedule.sources(0, len(expected)).tolist() == expected


def test_source_with_fewest_tokens_is_read_until_it_has_caught_up():
    # The golden order of the token-balance document: counters 0 and 100, samples of 40 tokens.
    stream = LeastConsumed([1, 1], [0, 100], seq_len=40, key=0)
    assert stream.sources(0, 6).tolist() == [0, 0, 0, 1, 0, 1]


def test_ties_go_to_each_source_as_often_and_depend_on_the_seed():
    firsts = np.zeros(4)
    for seed in range(400):
        schedule = make_schedule("least_consumed", [1] * 4, [9] * 4, key=key_of(seed))
        firsts[schedule.sources(0, 1)[0]] += 1
    assert ((firsts - 100) ** 2 / 100).sum() < 16.3  # 0.1 % point of 3 degrees of freedom


def test_chunks_of_clocks_beyond_63_bits_are_exact():
    # The heavy source is far ahead, so the light ones alone move clocks by 10^17 sequences' worth.
    weights, tokens = [10**17, 1, 2], [10**20, 0, 0]
    stream = LeastConsumed(weights, tokens, seq_len=1, key=key_of(0, 0))
    expected = least_consumed(weights, [500] * 3, 1, 0, tokens)
    assert stream.sources(0, 125).tolist() == expected[:125]
