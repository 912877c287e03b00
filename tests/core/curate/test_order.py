from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nmoe_core.curate.diversity import window_diversity
from nmoe_core.curate.order import ORDERS, arrange
from nmoe_core.errors import CurationError

documents = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 500)), max_size=60)


def seedlike(num_documents: int = 6000) -> tuple[np.ndarray, np.ndarray]:
    """Topics of unequal sizes, source sorted by topic, log-normal lengths longest first."""
    rng = np.random.default_rng(0)
    sizes = rng.dirichlet(np.full(20, 2.0)) * num_documents
    clusters = np.repeat(np.arange(20), np.maximum(1, sizes.astype(int)))
    tokens = np.exp(rng.normal(6.0, 0.9, len(clusters))).astype(np.int64) + 1
    by_length = np.lexsort((-tokens, clusters))
    return clusters[by_length], tokens[by_length]


def greedy_reference(clusters: np.ndarray) -> list[int]:
    """The published greedy with exact fractions, O(N K)."""
    from fractions import Fraction

    pools = {int(k): np.flatnonzero(clusters == k).tolist() for k in np.unique(clusters)}
    placed = dict.fromkeys(pools, 0)
    order: list[int] = []
    for t in range(len(clusters)):
        left = len(clusters) - t
        gap = {
            k: Fraction(len(pool), left) - Fraction(placed[k], max(t, 1))
            for k, pool in pools.items()
            if pool
        }
        best = min(k for k in gap if gap[k] == max(gap.values()))
        order.append(pools[best].pop(0))
        placed[best] += 1
    return order


@settings(max_examples=60, deadline=None)
@given(documents, st.integers(0, 2**32 - 1))
def test_every_order_is_a_permutation(rows: list[tuple[int, int]], seed: int):
    clusters, tokens = np.asarray(rows, np.int64).reshape(-1, 2).T
    for name in ORDERS:
        order = arrange(name, clusters, tokens, seed=seed)
        assert order.dtype == np.int64
        assert sorted(order.tolist()) == list(range(len(rows)))
        assert np.array_equal(order, arrange(name, clusters, tokens, seed=seed))


@settings(max_examples=40, deadline=None)
@given(documents)
def test_stratified_is_the_published_greedy_with_exact_ties(rows: list[tuple[int, int]]):
    clusters, tokens = np.asarray(rows, np.int64).reshape(-1, 2).T
    assert arrange("stratified", clusters, tokens).tolist() == greedy_reference(clusters)


def test_golden_follows_its_definition_step_by_step():
    clusters, tokens = np.array([1, 0, 1, 1, 0, 1]), np.array([5, 9, 7, 7, 2, 1])
    g, keys = 0.6180339887498949, {}
    for c in (0, 1):
        members = sorted(np.flatnonzero(clusters == c), key=lambda d: (-tokens[d], d))
        place = {d: (r * g + (c + 0.5) / 2) % 1 for r, d in enumerate(members)}
        for rank, d in enumerate(sorted(members, key=lambda d: place[d])):
            keys[d] = (rank + c * g % 1) / len(members)
    assert arrange("golden", clusters, tokens).tolist() == sorted(keys, key=lambda d: (keys[d], d))


def test_golden_nears_the_ceiling_on_a_source_sorted_by_topic_and_length():
    clusters, tokens = seedlike()
    scores = {}
    for name in ORDERS:
        order = arrange(name, clusters, tokens)
        scores[name] = window_diversity(clusters[order], tokens[order], 32_768, "flush")
    golden, plain = scores["golden"], scores["original"]
    assert golden.percent_of_ceiling > 99
    assert plain.percent_of_ceiling < 15
    assert golden.mean > scores["shuffle"].mean > plain.mean
    assert golden.mean > scores["stratified"].mean > scores["round_robin"].mean
    assert golden.std < 0.5 * scores["stratified"].std


def test_golden_deals_lengths_evenly_over_the_epoch():
    clusters, tokens = seedlike()
    tokens = tokens[arrange("golden", clusters, tokens)]
    ends = np.cumsum(tokens)
    tenths = np.searchsorted(ends, ends[-1] * np.arange(11) / 10)
    assert np.diff(tenths).max() / np.diff(tenths).min() < 1.1


def test_seed_and_epoch_give_other_orders_of_the_same_evenness():
    clusters, tokens = seedlike()
    options = [{}, {"seed": 1}, {"epoch": 1}, {"seed": 42}, {"seed": 1, "epoch": 1}]
    orders = [arrange("golden", clusters, tokens, **option) for option in options]
    assert len({order.tobytes() for order in orders}) == len(orders)
    for order in orders:
        found = window_diversity(clusters[order], tokens[order], 32_768)
        assert found.percent_of_ceiling > 99
    assert not np.array_equal(*(arrange("shuffle", clusters, tokens, seed=s) for s in (0, 1)))


def test_count_stride_keeps_source_order_inside_topics():
    clusters, tokens = seedlike(500)
    order = arrange("count_stride", clusters, tokens)
    for topic in range(20):
        members = order[clusters[order] == topic]
        assert np.all(np.diff(members) > 0)


def test_round_robin_cycles_over_topics_and_skips_exhausted_ones():
    clusters = np.array([2, 2, 2, 0, 1, 1])
    order = arrange("round_robin", clusters, np.ones(6, np.int64))
    assert clusters[order].tolist() == [0, 1, 2, 1, 2, 2]
    assert order.tolist() == [3, 4, 0, 5, 1, 2]


def test_input_types_do_not_change_the_order():
    clusters, tokens = seedlike(400)
    plain = arrange("golden", clusters, tokens)
    assert np.array_equal(plain, arrange("golden", clusters.astype(np.uint16), tokens))
    assert np.array_equal(plain, arrange("golden", clusters, tokens.astype(np.uint64)))


@pytest.mark.parametrize(
    ("name", "clusters", "tokens", "seed"),
    [
        ("alphabetical", [0], [1], 0),
        ("golden", [0, 1], [1], 0),
        ("golden", [-1], [1], 0),
        ("golden", [0.5], [1], 0),
        ("golden", [0], [1], -1),
        ("golden", [0], [1], 2**32),
    ],
)
def test_bad_input_to_an_order_is_refused(name, clusters, tokens, seed):
    with pytest.raises(CurationError) as caught:
        arrange(name, np.asarray(clusters), np.asarray(tokens), seed=seed)
    assert caught.value.code == "E-CURATION-ORDER"
