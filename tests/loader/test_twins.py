"""Each paced policy against its plain definition, element by element.

The twins draw one sequence after another, from integers of Python alone: no numpy, no positions, no
cached nodes. Leaves of an arrangement are made small so that its halving is seen.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import loader.order.arrangement
from loader.order.policies import make_schedule

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


def paced(shares: list[int], block_size: int, key: int) -> Iterator[int]:
    """An endless stream: blocks, each of what the closed form gained since the last."""
    total, filler = sum(shares), shares.index(max(shares))
    size = max(1, block_size, math.ceil((len(shares) - 1) * total / shares[filler]))
    offsets = [key_of(key, i) * total >> 64 for i in range(len(shares))]

    def counts(n: int) -> list[int]:
        own = [(n * share + offset) // total for share, offset in zip(shares, offsets)]
        return [n - sum(own) + c if i == filler else c for i, c in enumerate(own)]

    start = 0
    for number in itertools.count():
        end = start + size
        if end % total == 0 or total - start % total < 2 * size:
            end = start - start % total + total  # a period's last block has its rest
        gained = [b - a for a, b in zip(counts(start), counts(end))]
        yield from arranged(gained, key_of(key, -1, number))
        start = end


def by_definition(policy, weights, quotas, key, pass_sequences) -> list[int]:
    """All sequences of a stage; a source leaves when it has had its quota."""
    block_size = {"block": 2048, "epoch_weighted": pass_sequences}.get(policy, sum(quotas))
    left, picks, stretch = list(quotas), [], 0
    while any(left):
        active = [i for i, quota in enumerate(left) if quota]
        quota, weight = [left[i] for i in active], [weights[i] for i in active]
        is_share = all(
            abs(q * sum(weight) - w * sum(quota)) <= sum(weight) for q, w in zip(quota, weight)
        )
        scale = max(1, math.ceil(block_size / sum(weight)))
        shares = quota if is_share else [w * scale for w in weight]
        for pick in paced(shares, block_size, key_of(key, stretch)):
            picks.append(active[pick])
            left[active[pick]] -= 1
            if not any(left) or (not is_share and not left[active[pick]]):
                break
        stretch += 1
    return picks


rows_of_any = st.lists(
    st.tuples(st.integers(1, 60), st.integers(0, 300)), min_size=1, max_size=7
).filter(lambda rows: any(quota for _, quota in rows))


@pytest.fixture
def small_leaves(monkeypatch):
    monkeypatch.setattr(loader.order.arrangement, "LEAF_SIZE", LEAF)


@pytest.mark.parametrize("policy", ["block", "weighted_random", "epoch_weighted"])
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=rows_of_any, pass_sequences=st.integers(1, 200), key=st.integers(0, 2**63))
def test_policy_is_its_sequential_definition(policy, small_leaves, rows, pass_sequences, key):
    weights, quotas = [w for w, _ in rows], [q for _, q in rows]
    schedule = make_schedule(policy, weights, quotas, key=key, pass_sequences=pass_sequences)
    expected = by_definition(policy, weights, quotas, key, pass_sequences)
    assert schedule.sources(0, sum(quotas)).tolist() == expected


@pytest.mark.parametrize("policy", ["block", "weighted_random", "epoch_weighted"])
@pytest.mark.parametrize("quotas", [[6000, 3000, 1000], [5000, 100, 1], [3, 9000, 2500]])
def test_long_runs_cross_blocks_and_epochs_as_defined(policy, small_leaves, quotas):
    schedule = make_schedule(policy, [6, 3, 1], quotas, key=11, pass_sequences=1500)
    expected = by_definition(policy, [6, 3, 1], quotas, 11, 1500)
    assert schedule.sources(0, sum(quotas)).tolist() == expected
