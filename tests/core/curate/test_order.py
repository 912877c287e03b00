import hashlib
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.ordering.bounds import ceilings
from nmoe_core.curate.diversity.measure import measure
from nmoe_core.curate.order import NEEDS, ORDERS, arrange
from tests.refusals import refused

documents = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 500)), max_size=80)
turns = st.integers(0, 2**32 - 1)


def needed(name: str, num_documents: int, seq_len: int = 400) -> dict:
    """Options that an order cannot do without, for any documents."""
    rows = np.random.default_rng(1).standard_normal((num_documents, 4)).astype(np.float32)
    have = {"seq_len": seq_len, "embeddings": rows}
    return {NEEDS[name]: have[NEEDS[name]]} if name in NEEDS else {}


SEQ_LEN = 131_072
# Relative sizes of the 30 clusters of the published figure; three are smaller than the windows.
SIZES = [376, 643, 874, 1340, 1399, 1399, 1480, 1513, 1566, 1658, 1679, 1698, 1765, 1856, 1880]
SIZES += [1904, 1987, 1987, 2086, 2086, 2238, 2285, 2337, 2499, 2881, 2881, 2978, 3624, 4206, 11054]


def make(num_documents: int = 9000, is_sorted: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Log-normal lengths of mean 2,297 below a window, topics in runs or wholly sorted."""
    rng = np.random.default_rng(7)
    sizes = np.asarray(SIZES) * num_documents // sum(SIZES)
    clusters = np.repeat(np.arange(30), sizes)
    mean = rng.normal(0, 0.35, 30)
    tokens = np.exp(rng.normal(mean[clusters], 0.9))
    tokens = np.clip(tokens * 2297 / tokens.mean(), 16, 70_000).astype(np.int64)
    if is_sorted:
        order = np.lexsort((-tokens, clusters))
    else:
        order = np.lexsort((rng.random(len(tokens)), rng.integers(0, 40, 30)[clusters] // 2))
    return clusters[order], tokens[order]


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
    "stratified": "ca6a9f7018d2ca74",
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


def test_tight_windows_are_filled_as_earlier_versions_filled_them():
    digest = hashlib.sha256()
    for i in range(30):
        number = np.arange(60 + 11 * i)
        clusters, tokens = number**2 % 97 % (2 + i % 7), 1 + (7 * number**3 + i) % (9 + 5 * i)
        for loader in ("concat", "flush"):
            options = {"seq_len": 100 + 40 * i, "loader": loader}
            digest.update(arrange("window_fill", clusters, tokens, **options).astype("<i8"))
    assert digest.hexdigest()[:16] == "5b2e7fe483bf25c4"


@settings(max_examples=60)
@given(documents, turns, turns, st.integers(1, 600), st.integers(0, 599))
def test_every_order_is_a_permutation_for_all_types(rows, seed, epoch, seq_len, offset):
    clusters, tokens = np.asarray(rows, np.int64).reshape(-1, 2).T
    for name in ORDERS:
        options = needed(name, len(rows), seq_len) | {"seed": seed, "epoch": epoch}
        if name == "window_fill":
            options |= {"offset": offset % seq_len, "loader": ("concat", "flush")[seed % 2]}
        order = arrange(name, clusters, tokens, **options)
        assert order.dtype == np.int64
        assert sorted(order.tolist()) == list(range(len(rows)))
        other_types = clusters.astype(np.uint16), tokens.astype(np.uint64)
        assert np.array_equal(order, arrange(name, *other_types, **options))


@settings(max_examples=40)
@given(documents)
def test_stratified_is_the_published_greedy_with_exact_ties(rows: list[tuple[int, int]]):
    clusters, tokens = np.asarray(rows, np.int64).reshape(-1, 2).T
    assert arrange("stratified", clusters, tokens).tolist() == greedy_reference(clusters)


@settings(max_examples=60)
@given(documents, st.integers(1, 600))
def test_bin_packing_takes_what_a_search_of_all_candidates_takes(rows, seq_len):
    clusters, tokens = np.asarray(rows, np.int64).reshape(-1, 2).T
    found = arrange("bin-packing", clusters, tokens, seq_len=seq_len)
    assert found.tolist() == packing_reference(clusters, tokens, seq_len)


def test_golden_deals_another_attribute_evenly_when_asked():
    clusters, tokens = make(is_sorted=True)
    quality = np.random.default_rng(3).random(len(clusters))
    by_quality = quality[arrange("golden", clusters, tokens, by=quality)]
    parts = [part.mean() for part in np.array_split(by_quality, 60)]
    shuffled = [part.mean() for part in np.array_split(quality, 60)]
    assert np.std(parts) < 0.5 * np.std(shuffled)


def test_near_duplicates_are_spread_over_the_epoch():
    clusters, tokens = make(is_sorted=True)
    rng, groups, num_groups = np.random.default_rng(5), np.full(len(clusters), -1), 0
    for topic in range(30):
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
    assert measure(order, clusters, tokens, SEQ_LEN).percent_of_ceiling > 99


@pytest.mark.parametrize(
    "name", ["golden", "count_stride", "insert_only", "window_fill", "shuffle"]
)
def test_seed_and_epoch_give_other_orders_as_good(name):
    clusters, tokens = make(is_sorted=True)
    settings = [{}, {"seed": 1}, {"epoch": 1}, {"seed": 1, "epoch": 1}]
    options = needed(name, len(clusters), SEQ_LEN)
    orders = [arrange(name, clusters, tokens, **options, **each) for each in settings]
    assert len({order.tobytes() for order in orders}) == len(orders)
    for order in orders:
        found = measure(order, clusters, tokens, SEQ_LEN)
        assert found.percent_of_ceiling > (99 if name == "golden" else 70)


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("by", ["quality", "length", None])
def test_count_stride_is_a_curriculum_inside_every_topic(by, descending):
    clusters, tokens = make(2000, is_sorted=True)
    quality = np.random.default_rng(4).integers(0, 50, len(clusters)) / 50
    column = {"quality": quality, "length": tokens, None: None}[by]
    order = arrange("count_stride", clusters, tokens, by=column, descending=descending)
    values = np.arange(len(clusters)) if column is None else column
    for topic in range(30):
        members = order[clusters[order] == topic]
        steps = np.diff(values[members])
        assert np.all(steps <= 0 if descending else steps >= 0)
        if column is not None:
            assert np.all(np.diff(members)[steps == 0] > 0)  # ties by document number
    found = measure(order, clusters, tokens, SEQ_LEN)
    assert found.percent_of_ceiling > (95 if by == "quality" else 80)  # lengths drift else


def test_balance_tokens_keeps_every_prefix_at_the_topics_shares():
    clusters, tokens = make(is_sorted=True)
    by_tokens, by_count = (
        measure(arrange(name, clusters, tokens), clusters, tokens, SEQ_LEN).discrepancy_max
        for name in ("balance_tokens", "stratified")
    )
    # No prefix is off by more than half of the longest document, as one ordered by counts is.
    assert by_tokens * SEQ_LEN < tokens.max() / 2 < by_count * SEQ_LEN


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


def test_related_cuts_a_topic_that_is_longer_than_a_block_along_its_main_direction():
    angles = np.random.default_rng(0).permutation(np.linspace(0, 1.2, 40))
    rows = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    clusters, tokens = np.zeros(40, np.int64), np.ones(40, np.int64)
    above, exact, cut, alone = (
        arrange("related", clusters, tokens, embeddings=rows, block=block)
        for block in (41, 40, 10, 1)
    )
    assert exact.tolist() == above.tolist()
    assert angles[alone].tolist() in (sorted(angles), sorted(angles, reverse=True))
    quarter = angles.argsort().argsort()[cut] // 10
    assert [len(set(part)) for part in np.split(quarter, 4)] == [1, 1, 1, 1]


@pytest.mark.parametrize(("seed", "epoch"), [(0, 0), (1, 0), (0, 1), (2, 2), (1, 5)])
def test_related_begins_with_the_first_document_of_the_topic_of_its_seed_and_epoch(seed, epoch):
    rows = np.random.default_rng(0).standard_normal((12, 4))
    rows = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
    clusters, tokens = np.arange(12) % 3, np.ones(12, np.int64)
    order = arrange("related", clusters, tokens, embeddings=rows, seed=seed, epoch=epoch)
    assert order[0] == (seed + epoch) % 3
    for topic in range(1, 3):  # each next topic begins with its document nearest to the last one
        first, before = order[4 * topic], order[4 * topic - 1]
        others = np.flatnonzero(clusters == clusters[first])
        assert first == others[(rows[others] @ rows[before]).argmax()]


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
        ("related", [0], {"embeddings": np.ones((1, 3)), "block": 0}),
        *(("related", [0], {"embeddings": e}) for e in (np.ones((2, 3)), np.full((1, 3), np.inf))),
    ],
)
def test_bad_input_to_an_order_is_refused(name, clusters, options):
    with refused("E-CURATION-ORDER"):
        arrange(name, np.asarray(clusters), np.ones(1, np.int64), **options)


@pytest.mark.parametrize("is_sorted", [False, True])
@pytest.mark.parametrize("loader", ["concat", "flush"])
def test_every_window_is_at_the_bound_for_the_loader_it_is_made_for(loader, is_sorted):
    clusters, tokens = make(is_sorted=is_sorted)
    bound = ceilings(clusters, tokens, SEQ_LEN)
    order = arrange("window_fill", clusters, tokens, seq_len=SEQ_LEN, loader=loader)
    found = measure(order, clusters, tokens, SEQ_LEN, loader)
    assert found is not None
    assert found.num_windows == bound.num_windows
    assert found.mean > 0.999 * bound.flush
    assert found.min_full >= bound.min_flush - 1
    assert found.last >= bound.min_flush - 1
    assert found.std < bound.best_std_flush + 0.05
    if loader == "concat":
        assert found.cut_documents < 0.25 * bound.num_windows
    else:
        assert found.padding * found.num_windows < 1  # less than one window in all
    plain = measure(arrange("shuffle", clusters, tokens), clusters, tokens, SEQ_LEN, loader)
    assert found.wrap_tv_8 <= plain.wrap_tv_8
    assert found.discrepancy_max < 0.5 * plain.discrepancy_max


def test_the_default_and_the_greedy_are_where_they_were_measured():
    clusters, tokens = make()
    found = measure(arrange("golden", clusters, tokens), clusters, tokens, SEQ_LEN, "flush")
    greedy = measure(arrange("stratified", clusters, tokens), clusters, tokens, SEQ_LEN, "flush")
    assert found.percent_of_ceiling > 99.4
    assert found.min_full >= 22
    assert found.min_over_alignments >= 21
    assert found.std < greedy.std
    assert found.wrap_tv_8 < greedy.wrap_tv_8
    assert found.length_drift < 1.1


def test_longer_documents_than_a_window_do_not_spoil_the_other_windows():
    rng = np.random.default_rng(1)
    clusters, tokens = make()
    long = rng.choice(len(tokens), 12, replace=False)
    tokens[long] = rng.integers(SEQ_LEN, 5 * SEQ_LEN, 12)
    bound = ceilings(clusters, tokens, SEQ_LEN)
    order = arrange("window_fill", clusters, tokens, seq_len=SEQ_LEN, loader="flush")
    found = measure(order, clusters, tokens, SEQ_LEN, "flush")
    assert found.mean > 0.995 * bound.flush
    assert found.num_windows <= bound.num_windows + 1
    other = measure(arrange("golden", clusters, tokens), clusters, tokens, SEQ_LEN, "flush")
    assert found.mean > other.mean + 0.3


@pytest.mark.parametrize("offset", [1, 40_000, 100_000])
def test_windows_are_filled_from_where_the_stream_stands(offset):
    clusters, tokens = make()
    order = arrange("window_fill", clusters, tokens, seq_len=SEQ_LEN, offset=offset)
    # One document of another topic stands before: the stream of a source with several shards.
    before = np.concatenate([[30], clusters]), np.concatenate([[offset], tokens])
    found = measure(np.concatenate([[0], order + 1]), *before, SEQ_LEN)
    aligned = ceilings(clusters, tokens, SEQ_LEN)
    assert found.cut_documents < 0.5 * aligned.num_windows
    assert found.mean > 0.998 * aligned.flush
    ignored = arrange("window_fill", clusters, tokens, seq_len=SEQ_LEN)
    if offset == 40_000:
        worse = measure(np.concatenate([[0], ignored + 1]), *before, SEQ_LEN)
        assert worse.cut_documents > 0.9 * aligned.num_windows
