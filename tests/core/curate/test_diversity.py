import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.ordering.bounds import ceilings
from nmoe_core.curate.diversity.measure import (
    compare,
    compare_orders,
    diversity_ceiling,
    measure,
    scales,
    window_topics,
)
from nmoe_core.curate.windows import cut_windows
from tests.refusals import refused

documents = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 40)), min_size=1, max_size=40)


def concat_windows(rows: list[tuple[int, int]], seq_len: int) -> list[list[int]]:
    """Topic of every token, cut every `seq_len`."""
    stream = [topic for topic, length in rows for _ in range(length)]
    return [stream[i : i + seq_len] for i in range(0, len(stream), seq_len)]


def flush_windows(rows: list[tuple[int, int]], seq_len: int) -> list[list[int]]:
    """Topic of every token, in windows that close when a document does not fit."""
    windows: list[list[int]] = []
    current: list[int] = []
    for topic, length in rows:
        if current and len(current) + length > seq_len:
            windows.append(current)
            current = []
        current = current + [topic] * length
        while len(current) > seq_len or (len(current) == seq_len and length >= seq_len):
            windows.append(current[:seq_len])
            current = current[seq_len:]
    return [*windows, current] if current else windows


FILL = {"concat": concat_windows, "flush": flush_windows}


def test_ceilings_are_what_the_smallest_topics_and_the_longest_documents_allow():
    # 4 windows of 10; topic 1 has one document of 2 tokens, topic 0 is everywhere.
    clusters, tokens = np.array([0] * 19 + [1]), np.full(20, 2)
    assert diversity_ceiling(clusters, tokens, 10, "flush") == (4 + 1) / 4
    assert diversity_ceiling(clusters, tokens, 10, "concat") == pytest.approx((4 + 1.1) / 4)
    bound = ceilings(clusters, tokens, 10)
    assert (bound.num_windows, bound.flush, bound.min_flush) == (4, 1.25, 1)
    assert bound.best_std_flush == pytest.approx(math.sqrt(0.25 * 0.75))
    # 25 tokens fill two windows alone and open a third; 10 tokens end on the edge of their own.
    clusters, tokens = np.array([0, 1, 2, 2]), np.array([25, 10, 2, 3])
    assert diversity_ceiling(clusters, tokens, 10, "flush") == (3 + 1 + 1) / 4
    longer = ceilings(np.array([0, 1, 0, 1]), np.array([12, 2, 2, 8]), 10)
    assert longer.min_flush == 1  # a document of a window or more is alone in one
    assert ceilings(np.array([0, 1]), np.array([19, 9]), 10).min_concat == 1


def test_documents_across_edges_may_pass_the_concat_ceiling_but_not_twice_their_windows() -> None:
    clusters, tokens = np.array([0, 0, 1]), np.array([3, 3, 4])
    found = measure(np.array([0, 2, 1]), clusters, tokens, 5)
    assert found is not None
    assert (found.mean, found.ceiling) == (2, pytest.approx(1.8))
    touched = np.bincount(clusters, weights=1 + np.ceil((tokens - 1) / 5))
    assert found.mean <= np.minimum(found.num_windows, touched).sum() / found.num_windows


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 20)), min_size=1, max_size=60))
def test_no_order_of_short_documents_passes_the_flush_ceiling(rows):
    clusters, tokens = np.asarray(rows).T
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(len(rows))
        found = measure(order, clusters, tokens, 20, "flush")
        bound = np.minimum(found.num_windows, np.bincount(clusters)).sum() / found.num_windows
        assert found.mean <= bound + 1e-9


def test_no_document_means_no_windows():
    empty = np.empty(0, np.int64)
    assert measure(empty, empty, empty, 10) is None
    assert set(compare_orders(empty, empty, empty, 10)["flush"].values()) == {None}
    assert len(window_topics(empty, empty, 10, "flush")) == 0


@pytest.mark.parametrize(
    ("loader", "pairs", "last", "num_full"),
    [
        ("concat", [(0, 0, 4), (1, 0, 1), (1, 1, 5), (2, 0, 2)], [0, 1, 2], 2),
        ("flush", [(0, 0, 4), (1, 1, 5), (2, 0, 3)], [0, 1, 2], 2),
    ],
)
def test_tokens_before_the_first_document_take_room_in_its_window(loader, pairs, last, num_full):
    found = cut_windows(np.array([0, 1, 0]), np.array([4, 5, 3]), 6, loader, offset=2)
    assert list(zip(*(a.tolist() for a in (found.window, found.topic, found.tokens)))) == pairs
    assert (found.last.tolist(), found.num_full()) == (last, num_full)
    assert found.last_fill == pairs[-1][2]


@pytest.mark.parametrize(("tokens", "seq_len"), [([0], 10), ([1, 1], 10), ([1], 0)])
def test_windows_that_cannot_be_filled_are_refused(tokens, seq_len):
    with refused("E-CURATION-WINDOWS"):
        window_topics(np.zeros(1, np.int64), np.asarray(tokens), seq_len)


def beginning(rows, num_tokens):
    """The share of each topic in the first documents that hold so many tokens."""
    held = Counter()
    for topic, length in rows:
        if held.total() < num_tokens:
            held[topic] += length
    return Counter({topic: count / held.total() for topic, count in held.items()})


@pytest.mark.parametrize("loader", ["concat", "flush"])
@settings(max_examples=120)
@given(documents, st.integers(1, 50))
def test_every_metric_equals_a_token_by_token_count(loader, rows, seq_len):
    clusters, tokens = np.asarray(rows).T
    order = np.random.default_rng(len(rows)).permutation(len(rows))
    found = measure(order, clusters, tokens, seq_len, loader)
    arranged = [rows[i] for i in order]
    windows = FILL[loader](arranged, seq_len)
    counts = [len(set(window)) for window in windows]
    assert window_topics(clusters[order], tokens[order], seq_len, loader).tolist() == counts
    full = [n for n, window in zip(counts, windows) if len(window) == seq_len]
    if loader == "flush":
        full = counts[:-1] + [counts[-1]] * (len(windows[-1]) == seq_len)
    assert (found.num_windows, found.last) == (len(counts), counts[-1])
    assert found.min_full == min(full or counts[:1])
    assert (found.mean, found.std) == pytest.approx((np.mean(counts), np.std(counts)))
    total = Counter(topic for topic, length in arranged for _ in range(length))
    size = sum(total.values())
    kl = []
    for window in windows:
        share = {topic: count / len(window) for topic, count in Counter(window).items()}
        kl.append(sum(p * math.log(p / (total[t] / size)) for t, p in share.items()))
    assert found.kl_mean == pytest.approx(np.mean(kl), abs=1e-9)
    assert found.kl_p99 == pytest.approx(np.percentile(kl, 99), abs=1e-9)
    assert found.padding == pytest.approx(1 - size / (len(windows) * seq_len))
    ahead, worst = dict.fromkeys(total, 0.0), 0.0
    for topic, length in arranged:
        for each in ahead:
            ahead[each] += length * ((each == topic) - total[each] / size)
        worst = max(worst, max(map(abs, ahead.values())))
    assert found.discrepancy_max == pytest.approx(worst / seq_len, abs=1e-9)
    same = [a[0] == b[0] for a, b in pairwise(arranged)]
    assert found.adjacent_same == pytest.approx(np.mean(same) if same else 0)
    assert found.p1 == pytest.approx(np.percentile(full or counts[:1], 1))
    for wrap, num_tokens in ((found.wrap_tv_1, seq_len), (found.wrap_tv_8, 8 * seq_len)):
        head, tail = (beginning(rows, num_tokens) for rows in (arranged, arranged[::-1]))
        gaps = [abs(head[topic] - tail[topic]) for topic in total]
        assert wrap == pytest.approx(sum(gaps) / 2, abs=1e-9)
    ends = np.cumsum([length for _, length in arranged])
    parts = np.bincount([-(-20 * end // size) - 1 for end in ends.tolist()], minlength=20)
    assert found.length_drift == parts.max() / max(parts.min(), 1)
    if loader == "concat":
        starts = ends - [length for _, length in arranged]
        cut = [a // seq_len != (b - 1) // seq_len and b - a <= seq_len
               for a, b in zip(starts, ends)]  # fmt: skip
        assert found.cut_documents == sum(cut)
        least = []
        for offset in {seq_len * i // 8 for i in range(8)}:
            stream = [None] * offset + [t for t, length in arranged for _ in range(length)]
            parts = [stream[i : i + seq_len] for i in range(0, len(stream), seq_len)]
            full = [len(set(p)) for p in parts if len(p) == seq_len and None not in p]
            least += full or [len(set(parts[0]) - {None})]
        assert found.min_over_alignments == min(least)
    else:
        assert found.cut_documents == 0


def test_the_boundary_of_an_epoch_is_the_distance_of_its_ends():
    clusters, tokens = np.repeat([0, 1], 40), np.full(80, 5)
    apart = measure(np.arange(80), clusters, tokens, 20)
    assert (apart.wrap_tv_1, apart.wrap_tv_8) == (1.0, 1.0)
    even = measure(np.arange(80).reshape(2, 40).T.ravel(), clusters, tokens, 20)
    assert even.wrap_tv_8 < 0.05
    assert apart.length_drift == even.length_drift == 1


def test_comparisons_stand_beside_the_source_order_and_a_shuffle():
    clusters, tokens = np.repeat(np.arange(4), 10), np.full(40, 5)
    order = np.arange(40).reshape(4, 10).T.ravel()
    found = compare({"mine": order}, clusters, tokens, 20)
    assert set(found) == {"mine", "original", "shuffle"}
    by_loader = compare_orders(clusters, tokens, order, 20)
    for loader in ("concat", "flush"):
        original, shuffle, mine = (found[k][loader] for k in ("original", "shuffle", "mine"))
        assert original["mean"] < 1.5 < shuffle["mean"] < mine["mean"] == 4
        assert mine["percent_of_ceiling"] == pytest.approx(100, abs=1)
        assert by_loader[loader] == {"before": original, "after": mine, "shuffle": shuffle}
    assert set(scales(order, clusters, tokens)) == {2048, 8192, 32_768, 131_072}
