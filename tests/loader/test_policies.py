"""Each policy against its plain definition, and what the definitions promise at any length.

The definitions draw one sequence after another, from integers of Python alone: no numpy, no
positions, no cached nodes. Leaves of an arrangement are made small so that its halving is seen.
"""

import itertools
import math
from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import loader.order.blocks
from loader import PlanError
from loader.order.least_consumed import LeastConsumed
from loader.order.policies import POLICIES, Shares, make_schedule, weight_unit
from loader.plan.mixture import quotas, weights_fixed_point

LEAF = 16
MASK = 2**64 - 1


def finalise(x: int) -> int:
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        x = (x ^ (x >> shift)) * factor & MASK
    return x


def key_of(*parts: int) -> int:
    key = 0
    for part in parts:
        key = finalise((key + 0x9E3779B97F4A7C15 + part) & MASK)
    return key


def hash_of(key: int, counter: int) -> int:
    return finalise((key + (counter + 1) * 0x9E3779B97F4A7C15) & MASK)


def marked_among(count: int, size: int, draws: int, normal: float, key: int) -> int:
    """Marked elements among `draws` of `size`, of which `count` are marked."""
    if 2 * count > size:
        return draws - marked_among(size - count, size, draws, -normal, key)
    if 2 * draws > size:
        return count - marked_among(count, size, size - draws, -normal, key)
    few, many = sorted((count, draws))
    if few <= 32:
        found = 0
        for j in range(few):
            found += (finalise(key + j) * (size - j)) >> 64 < many - found
        return found
    mean, rest = divmod(few * many, size)
    variance = few * many * (size - few) / size * ((size - many) / size) / (size - 1)
    return min(max(mean + math.floor(normal * math.sqrt(variance) + rest / size + 0.5), 0), few)


def arranged(counts: list[int], key: int) -> list[int]:
    """`counts[i]` times each source i in random order: halves, then a sort by hash."""
    size = sum(counts)
    if size <= LEAF:
        ordered = [i for i, count in enumerate(counts) for _ in range(count)]
        return [ordered[j] for j in sorted(range(size), key=lambda j: hash_of(key, j))]
    left, elements, draws = [], size, size // 2
    for i, count in enumerate(counts):
        words = [hash_of(key, 4 * i + word) for word in range(4)]
        fields = [word >> shift & 0xFFFF for word in words for shift in (0, 16, 32, 48)]
        normal = (sum(fields) - 16 * 0xFFFF / 2) / math.sqrt(16 * (2**32 - 1) / 12)
        part = marked_among(count, elements, draws, normal, key_of(key, i)) if count else 0
        left.append(part)
        elements, draws = elements - count, draws - part
    right = [count - part for count, part in zip(counts, left)]
    return arranged(left, key_of(key, 0)) + arranged(right, key_of(key, 1))


def paced(rates, period, offsets, block_size, key) -> Iterator[int]:
    """An endless stream: blocks, each of what the closed form gained since the last."""
    count, filler = len(rates), rates.index(max(rates))
    ahead = [Fraction(key_of(key, i), 2**64) + offset for i, offset in enumerate(offsets)]
    free = period - sum(rates) + rates[filler]
    size = max(1, block_size, period)
    if free > 0:
        margin = (count - 1) * (2 if any(offsets) else 1)
        size = max(1, block_size, math.ceil(margin * period / free))

    def counts(n: int) -> list[int]:
        if n == 0:
            return [0] * count
        own = [max(0, math.floor(n * r / period + a)) for r, a in zip(rates, ahead)]
        return [n - sum(own) + c if i == filler else c for i, c in enumerate(own)]

    start = 0
    for number in itertools.count():
        end = start + size
        if end % period == 0 or period - start % period < 2 * size:
            end = start - start % period + period  # a period's last block has its rest
        gained = [b - a for a, b in zip(counts(start), counts(end))]
        yield from arranged(gained, key_of(key, -1, number))
        start = end


def least_consumed(weights, targets, seq_len, key, tokens=None) -> list[int]:
    """Lowest tokens / weight; ties by a hash of the source's draw."""
    left, have, picks, stretch = list(targets), list(tokens or [0] * len(targets)), [], 0
    drawn = [0] * len(weights)
    while any(left):
        active = [i for i, quota in enumerate(left) if quota]
        lowest = min(Fraction(have[i], weights[i]) for i in active)
        tied = {
            hash_of(0, (key_of(key_of(key, stretch), k) + drawn[i]) & MASK): i
            for k, i in enumerate(active)
            if have[i] == lowest * weights[i]
        }
        k = tied[min(tied)]
        picks.append(k)
        have[k] += seq_len
        drawn[k] += 1
        left[k] -= 1
        if not left[k]:
            stretch, drawn = stretch + 1, [0] * len(weights)
    return picks


def by_definition(policy, shares, key, pass_sequences) -> list[int]:
    """All sequences of a stage under a paced policy; a source leaves when it has had its quota."""
    weights, quotas, owed = shares
    block_size = {"block": 2048, "epoch_weighted": pass_sequences}.get(policy, sum(quotas))
    left, picks, stretch = list(quotas), [], 0
    while any(left):
        active = [i for i, quota in enumerate(left) if quota]
        quota, weight = [left[i] for i in active], [weights[i] for i in active]
        has_begun = any(i in active for i in picks)
        due = [Fraction(0 if has_begun else owed[i], 10**6) for i in active]
        is_share = all(
            abs(q - own - Fraction(w * sum(quota), sum(weight))) <= 1
            for q, w, own in zip(quota, weight, due)
        )
        scale = max(1, math.ceil(block_size / sum(weight)))
        rates = [w * scale for w in weight]
        if is_share:
            rates = [q - own for q, own in zip(quota, due)]
        period = sum(quota) if is_share else sum(rates)
        for pick in paced(rates, period, due, block_size, key_of(key, stretch)):
            picks.append(active[pick])
            left[active[pick]] -= 1
            if not any(left) or (not is_share and not left[active[pick]]):
                break
        stretch += 1
    return picks


@pytest.fixture
def defined(lib, monkeypatch):
    """A schedule, and its sequences by definition."""
    monkeypatch.setattr(loader.order.blocks, "LEAF_SIZE", LEAF)

    def make(policy, weights, quotas, owed=(), key=11, pass_sequences=1500, seq_len=3):
        options = {"key": key, "pass_sequences": pass_sequences, "seq_len": seq_len}
        owed = owed or [0] * len(quotas)
        schedule = make_schedule(policy, Shares(weights, quotas, owed), **options)
        if policy == "swrr":
            return schedule, lib.swrr(weights, quotas, owed)
        if policy == "least_consumed":
            read = [Fraction(-own * seq_len, 10**6) for own in owed]
            return schedule, least_consumed(weights, quotas, seq_len, key, read)
        shares = Shares(weights, quotas, owed)
        return schedule, by_definition(policy, shares, key, pass_sequences)

    return make


def planned(policy, weights, num_sequences, **options):
    """A schedule as a plan makes it: quotas are the weights' shares."""
    fixed = weights_fixed_point(weights, weight_unit(policy))
    return make_schedule(policy, Shares(fixed, quotas(num_sequences, weights)), **options)


def counts_of(picks, num_sources: int) -> list[int]:
    return np.bincount(picks, minlength=num_sources).tolist()


owed_of_any = st.just(0) | st.integers(-(10**6), 10**6)
rows_of_any = st.lists(
    st.tuples(st.integers(1, 60), st.integers(0, 300), owed_of_any), min_size=1, max_size=7
).filter(lambda rows: any(quota for _, quota, _ in rows))


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows_of_any, st.integers(0, 2**63), st.integers(1, 200), st.integers(1, 50), st.data())
def test_any_range_and_count_of_a_policy_match_its_definition(
    policy, defined, rows, key, pass_sequences, seq_len, data
):
    weights, targets, owed = map(list, zip(*rows))
    schedule, expected = defined(policy, weights, targets, owed, key, pass_sequences, seq_len)
    assert counts_of(expected, len(rows)) == targets
    for _ in range(3):
        a = data.draw(st.integers(0, len(expected)))
        b = data.draw(st.integers(a, len(expected)))
        assert schedule.sources(a, b).tolist() == expected[a:b]
        assert schedule.counts_before(b).tolist() == counts_of(expected[:b], len(rows))
    assert schedule.sources(0, schedule.num_sequences).tolist() == expected


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("weights", "targets"),
    [
        *(
            ([6, 3, 1], targets)
            for targets in ([6000, 3000, 1000], [5000, 100, 1], [3, 9000, 2500])
        ),
        ([990_000, 10_000], [50, 50]),  # a light source with an equal quota
        ([1 + i % 3 for i in range(300)], [2] * 300),  # more than fit into a byte
        (weights_fixed_point([5, 3, 2, 1.5, 0.1, 0.01]), [3000, 2500, 2000, 1500, 900, 100]),
    ],
    ids=range(6),
)
def test_long_runs_and_many_sources_are_as_defined(policy, defined, weights, targets):
    schedule, expected = defined(policy, weights, targets)
    assert schedule.sources(0, sum(targets)).tolist() == expected
    assert schedule.counts_before(sum(targets)).tolist() == targets


def test_a_table_of_a_million_picks_is_made_once_and_then_looked_up(lib):
    rng = np.random.default_rng(3)
    weights = weights_fixed_point(rng.random(24).tolist())
    assert np.gcd.reduce(weights) == 1
    schedule = make_schedule("swrr", Shares(weights, quotas(2 * 10**9, weights)))
    assert lib.calls_of(lambda: schedule.counts_before(10**9)) < 3 * 10**6
    counts = schedule.counts_before(10**9 + 12_345)
    assert lib.calls_of(lambda: schedule.counts_before(10**9 + 12_345)) < 100
    assert lib.calls_of(lambda: schedule.sources(10**9, 10**9 + 4096)) < 100
    assert counts.sum() == 10**9 + 12_345


@pytest.mark.parametrize("policy", POLICIES)
def test_quota_without_weight_is_refused(policy):
    with pytest.raises(PlanError, match="source 1"):
        make_schedule(policy, Shares([1, 0], [5, 5]))


any_weights = st.lists(st.floats(-12, 12).map(lambda power: 10.0**power), min_size=1, max_size=500)


@settings(max_examples=25)
@given(st.sampled_from(POLICIES[1:]), any_weights, st.integers(1, 10**12), st.data())
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


@settings(max_examples=60)
@given(st.sampled_from([2048, 1000]), any_weights, st.integers(1, 10**12), st.data())
def test_every_source_is_within_one_of_its_share_at_the_ends_of_blocks_and_epochs(
    size, weights, n, data
):
    policy = "block" if size == 2048 else "epoch_weighted"
    shares = quotas(n, weights)
    schedule = planned(policy, weights, n, pass_sequences=size)
    filler = int(np.argmax(shares))
    least = -(-(sum(1 for s in shares if s) - 1) * n // shares[filler])
    size = max(size, least)
    at = min(n, size * data.draw(st.integers(0, max(1, n // size) - 1)))
    for i, (count, share) in enumerate(zip(schedule.counts_before(at).tolist(), shares)):
        off = abs(Fraction(count) - Fraction(at * share, n))
        assert off < (1 if i != filler else len(weights))


def test_weighted_random_is_drawing_without_replacement():
    # Over many seeds every arrangement of a small multiset is as frequent as any other.
    frequency: dict[bytes, int] = {}
    for seed in range(6000):
        schedule = make_schedule("weighted_random", Shares([2, 1, 1], [2, 1, 1]), key=key_of(seed))
        drawn = schedule.sources(0, 4).astype(np.uint8).tobytes()
        frequency[drawn] = frequency.get(drawn, 0) + 1
    assert len(frequency) == 12
    chi_square = sum((n - 500) ** 2 / 500 for n in frequency.values())
    assert chi_square < 31.3  # 0.1 % point of 11 degrees of freedom


def test_weighted_random_counts_follow_the_law_at_every_scale():
    stats = pytest.importorskip("scipy.stats")
    weights, n = [0.6, 0.3, 0.1], 3_000_000
    for at in (100, 16_000, 400_000, 1_499_999):
        counts = [
            planned("weighted_random", weights, n, key=key_of(seed)).counts_before(at)
            for seed in range(150)
        ]
        for weight, found in zip(weights, np.array(counts).T):
            law = stats.hypergeom(n, round(n * weight), at)
            p = stats.kstest((found - law.mean()) / law.std(), "norm").pvalue
            assert p > 1e-4, (at, weight, p)
            assert abs(found.std() / law.std() - 1) < 0.25


def test_source_with_fewest_tokens_is_read_until_it_has_caught_up():
    # The golden order of the token-balance document: counters 0 and 100, samples of 40 tokens.
    stream = LeastConsumed([1, 1], [0, 100], seq_len=40, key=0)
    assert stream.sources(0, 6).tolist() == [0, 0, 0, 1, 0, 1]
    # The heavy source is far ahead, so the light ones alone move clocks by 10^17 sequences' worth:
    # chunks of clocks beyond 63 bits are exact.
    weights, tokens = [10**17, 1, 2], [10**20, 0, 0]
    stream = LeastConsumed(weights, tokens, seq_len=1, key=key_of(0, 0))
    expected = least_consumed(weights, [500] * 3, 1, 0, tokens)
    assert stream.sources(0, 125).tolist() == expected[:125]


def test_ties_go_to_each_source_as_often_and_depend_on_the_seed():
    firsts = np.zeros(4)
    for seed in range(400):
        schedule = make_schedule("least_consumed", Shares([1] * 4, [9] * 4), key=key_of(seed))
        firsts[schedule.sources(0, 1)[0]] += 1
    assert ((firsts - 100) ** 2 / 100).sum() < 16.3  # 0.1 % point of 3 degrees of freedom
