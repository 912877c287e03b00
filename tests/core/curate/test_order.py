from __future__ import annotations

import hashlib
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nmoe_core.curate.diversity.measure import measure
from nmoe_core.curate.order import NEEDS, ORDERS, arrange
from tests.refusals import refused

documents = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 500)), max_size=60)


def needed(name: str, num_documents: int, seq_len: int = 400) -> dict:
    """Options that an order cannot do without, for any documents."""
    rows = np.random.default_rng(1).standard_normal((num_documents, 4)).astype(np.float32)
    have = {"seq_len": seq_len, "embeddings": rows}
    return {NEEDS[name]: have[NEEDS[name]]} if name in NEEDS else {}


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


def packing_reference(clusters: np.ndarray, tokens: np.ndarray, seq_len: int) -> list[int]:
    """Bin-packing by its definition, every candidate looked at in every step."""
    order = np.flatnonzero(tokens > seq_len).tolist()
    left = np.flatnonzero(tokens <= seq_len).tolist()
    held: dict[int, int] = {}
    room = seq_len
    while left:
        fits = [d for d in left if tokens[d] <= room]
        if not fits:
            held, room = {}, seq_len
            continue
        counts = np.bincount(clusters[left], minlength=10)
        best = min({int(clusters[d]) for d in fits}, key=lambda c: (held.get(c, 0), -counts[c], c))
        document = min((d for d in fits if clusters[d] == best), key=lambda d: (-tokens[d], d))
        left.remove(document)
        order.append(document)
        held[best] = held.get(best, 0) + int(tokens[document])
        room -= int(tokens[document])
    return order


# Orders decide the bytes of curated shards, so a change of one is a change of format.
DIGESTS = {
    "golden": "46566d77df32e4eb",
    "window_fill": "af5a47e88ba8b907",
    "count_stride": "5bae6a02fbe05954",
    "balance_tokens": "1a6c3c067e5ceb31",
    "insert_only": "b09c2f0c9dcecce4",
    "bin_packing": "c60db55392e2909c",
    "stratified": "e2724a535059d7cc",
    "round_robin": "bf685a7eb3d8f248",
    "shuffle": "d5dda2e53cbdbfce",
    "original": "e8c9ceaf5aacc63c",
}


@pytest.mark.parametrize("name", DIGESTS)
def test_every_order_is_the_one_that_earlier_versions_made(name: str):
    number = np.arange(3000)
    clusters, tokens = number**2 % 97 % 23, 20 + number**3 % 1409
    options = needed(name, len(number), 8192) | {"seed": 3, "epoch": 1}
    order = arrange(name, clusters, tokens, **options)
    assert hashlib.sha256(order.astype("<i8").tobytes()).hexdigest()[:16] == DIGESTS[name]


@settings(max_examples=60)
@given(documents, st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.integers(1, 600))
def test_every_order_is_a_permutation_and_the_same_again(rows, seed, epoch, seq_len):
    clusters, tokens = np.asarray(rows, np.int64).reshape(-1, 2).T
    for name in ORDERS:
        options = needed(name, len(rows), seq_len) | {"seed": seed, "epoch": epoch}
        order = arrange(name, clusters, tokens, **options)
        assert order.dtype == np.int64
        assert sorted(order.tolist()) == list(range(len(rows)))
        assert np.array_equal(order, arrange(name, clusters, tokens, **options))


@settings(max_examples=40)
@given(documents)
def test_stratified_is_the_published_greedy_with_exact_ties(rows: list[tuple[int, int]]):
    clusters, tokens = np.asarray(rows, np.int64).reshape(-1, 2).T
    assert arrange("stratified", clusters, tokens).tolist() == greedy_reference(clusters)


@settings(max_examples=60)
@given(documents, st.integers(1, 600))
def test_bin_packing_takes_what_a_search_of_all_candidates_takes(rows, seq_len):
    clusters, tokens = np.asarray(rows, np.int64).reshape(-1, 2).T
    found = arrange("bin_packing", clusters, tokens, seq_len=seq_len)
    assert found.tolist() == packing_reference(clusters, tokens, seq_len)


def test_golden_follows_its_definition_step_by_step():
    clusters, tokens = np.array([1, 0, 1, 1, 0, 1]), np.array([5, 9, 7, 7, 2, 1])
    g, keys = 0.6180339887498949, {}
    for c in (0, 1):
        members = sorted(np.flatnonzero(clusters == c), key=lambda d: (-tokens[d], d))
        place = {d: (r * g + (c + 0.5) / 2) % 1 for r, d in enumerate(members)}
        for rank, d in enumerate(sorted(members, key=lambda d: place[d])):
            keys[d] = (rank + c * g % 1) / len(members)
    assert arrange("golden", clusters, tokens).tolist() == sorted(keys, key=lambda d: (keys[d], d))


def test_golden_deals_another_attribute_evenly_when_asked():
    clusters, tokens = seedlike()
    quality = np.random.default_rng(3).random(len(clusters))
    by_quality = quality[arrange("golden", clusters, tokens, by=quality)]
    parts = [part.mean() for part in np.array_split(by_quality, 60)]
    shuffled = [part.mean() for part in np.array_split(quality, 60)]
    assert np.std(parts) < 0.5 * np.std(shuffled)


def test_near_duplicates_are_spread_over_the_epoch():
    clusters, tokens = seedlike()
    rng, groups, num_groups = np.random.default_rng(5), np.full(len(clusters), -1), 0
    for topic in range(20):
        members = rng.permutation(np.flatnonzero(clusters == topic))
        for first in range(0, len(members) // 6, 6):
            groups[members[first : first + 6]] = num_groups
            num_groups += 1

    def least_gap(**options) -> float:
        place = np.argsort(arrange("golden", clusters, tokens, **options))
        return min(
            np.diff(np.sort(place[groups == group])).min(initial=len(clusters))
            for group in range(num_groups)
        ) / len(clusters)

    # Six neighbours in rank are at least about 1 / (sqrt(5) * 6) of the epoch apart.
    assert least_gap(groups=groups) > 0.07
    assert least_gap() < 0.01
    order = arrange("golden", clusters, tokens, groups=groups)
    assert measure(order, clusters, tokens, 32_768).percent_of_ceiling > 99


@pytest.mark.parametrize(
    "name", ["golden", "count_stride", "insert_only", "window_fill", "shuffle"]
)
def test_seed_and_epoch_give_other_orders_as_good(name):
    clusters, tokens = seedlike()
    settings = [{}, {"seed": 1}, {"epoch": 1}, {"seed": 1, "epoch": 1}]
    options = needed(name, len(clusters), 32_768)
    orders = [arrange(name, clusters, tokens, **options, **each) for each in settings]
    assert len({order.tobytes() for order in orders}) == len(orders)
    for order in orders:
        found = measure(order, clusters, tokens, 32_768)
        assert found.percent_of_ceiling > (99 if name == "golden" else 70)


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("by", ["quality", "length", None])
def test_count_stride_is_a_curriculum_inside_every_topic(by, descending):
    clusters, tokens = seedlike(2000)
    quality = np.random.default_rng(4).integers(0, 50, len(clusters)) / 50
    column = {"quality": quality, "length": tokens, None: None}[by]
    order = arrange("count_stride", clusters, tokens, by=column, descending=descending)
    values = np.arange(len(clusters)) if column is None else column
    for topic in range(20):
        members = order[clusters[order] == topic]
        steps = np.diff(values[members])
        assert np.all(steps <= 0 if descending else steps >= 0)
        if column is not None:
            assert np.all(np.diff(members)[steps == 0] > 0)  # ties by document number
    found = measure(order, clusters, tokens, 32_768)
    assert found.percent_of_ceiling > (95 if by == "quality" else 80)  # lengths drift else


def test_round_robin_cycles_over_topics_and_skips_exhausted_ones():
    clusters = np.array([2, 2, 2, 0, 1, 1])
    order = arrange("round_robin", clusters, np.ones(6, np.int64))
    assert clusters[order].tolist() == [0, 1, 2, 1, 2, 2]
    assert order.tolist() == [3, 4, 0, 5, 1, 2]


def test_balance_tokens_keeps_every_prefix_at_the_topics_shares():
    clusters, tokens = seedlike()
    orders = {name: arrange(name, clusters, tokens) for name in ("balance_tokens", "stratified")}
    found = {k: measure(order, clusters, tokens, 32_768) for k, order in orders.items()}
    assert found["balance_tokens"].discrepancy_max < 0.5 * found["stratified"].discrepancy_max
    # No prefix is off by more than the longest document of a topic.
    assert found["balance_tokens"].discrepancy_max * 32_768 < tokens.max()


@settings(max_examples=60)
@given(documents, documents)
def test_insert_only_keeps_the_order_of_all_old_documents(old, new):
    clusters, tokens = np.asarray([*old, *new], np.int64).reshape(-1, 2).T
    before = arrange("insert_only", clusters[: len(old)], tokens[: len(old)])
    after = arrange("insert_only", clusters, tokens)
    assert np.array_equal(after[after < len(old)], before)


def test_related_chains_each_document_to_its_nearest_one_left():
    rng = np.random.default_rng(0)
    angles = rng.permutation(np.linspace(0, 3, 40))
    rows = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    clusters, tokens = np.zeros(40, np.int64), np.ones(40, np.int64)
    order = arrange("related", clusters, tokens, embeddings=rows)
    left = set(range(40)) - {int(order[0])}
    for previous, document in pairwise(order):
        nearest = max(left, key=lambda d: (float(rows[d] @ rows[previous]), -d))
        assert rows[document] @ rows[previous] == pytest.approx(rows[nearest] @ rows[previous])
        left.remove(int(document))


def test_related_puts_neighbours_together_in_blocks_of_bounded_size():
    rng = np.random.default_rng(2)
    clusters, tokens = rng.integers(0, 8, 3000), np.ones(3000, np.int64)
    rows = rng.standard_normal((8, 32))[clusters] + 0.8 * rng.standard_normal((3000, 32))
    rows = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)

    def cosine(order: np.ndarray) -> float:
        return float((rows[order[1:]] * rows[order[:-1]]).sum(axis=1).mean())

    few, many = (
        cosine(arrange("related", clusters, tokens, embeddings=rows, block=block))
        for block in (100, 2048)
    )
    assert many > few > cosine(np.argsort(clusters, kind="stable")) + 0.02


def test_input_types_do_not_change_the_order():
    clusters, tokens = seedlike(400)
    for name in ORDERS:
        options = needed(name, len(clusters))
        plain = arrange(name, clusters, tokens, **options)
        assert np.array_equal(plain, arrange(name, clusters.astype(np.uint16), tokens, **options))
        assert np.array_equal(plain, arrange(name, clusters, tokens.astype(np.uint64), **options))


@pytest.mark.parametrize(
    ("name", "clusters", "options"),
    [
        ("alphabetical", [0], {}),
        *(("golden", clusters, {}) for clusters in ([0, 1], [-1], [0.5], [2**20])),
        ("golden", [0], {"seed": -1}),
        ("golden", [0], {"epoch": 2**32}),
        *(("golden", [0], {"by": by}) for by in ([1, 2], [float("nan")])),
        ("golden", [0], {"groups": ["a"]}),
        ("window_fill", [0], {}),
        ("window_fill", [0], {"seq_len": 0}),
        ("window_fill", [0], {"seq_len": 4, "offset": 4}),
        ("window_fill", [0], {"seq_len": 4, "loader": "pad"}),
        ("bin_packing", [0], {"seq_len": 0}),
        ("related", [0], {}),
        *(("related", [0], {"embeddings": e}) for e in (np.ones((2, 3)), np.full((1, 3), np.inf))),
    ],
)
def test_bad_input_to_an_order_is_refused(name, clusters, options):
    with refused("E-CURATION-ORDER"):
        arrange(name, np.asarray(clusters), np.ones(1, np.int64), **options)
