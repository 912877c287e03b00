from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nmoe_core.curate.diversity import (
    compare_orders,
    diversity_ceiling,
    window_diversity,
    window_topics,
)
from nmoe_core.errors import CurationError

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


@pytest.mark.parametrize("metric", ["concat", "flush"])
@settings(max_examples=150, deadline=None)
@given(documents, st.integers(1, 50))
def test_windows_equal_a_token_by_token_count(metric, rows, seq_len):
    clusters, tokens = np.asarray(rows).T
    windows = FILL[metric](rows, seq_len)
    counts = [len(set(window)) for window in windows]
    assert window_topics(clusters, tokens, seq_len, metric).tolist() == counts
    found = window_diversity(clusters, tokens, seq_len, metric)
    full = [n for n, window in zip(counts, windows) if len(window) == seq_len]
    if metric == "flush":
        full = counts[:-1] + [counts[-1]] * (len(windows[-1]) == seq_len)
    assert found.num_windows == len(counts)
    assert found.last == counts[-1]
    assert found.min_full == min(full or counts[:1])
    assert found.mean == pytest.approx(np.mean(counts))
    assert found.std == pytest.approx(np.std(counts))


def test_a_document_longer_than_a_window_fills_windows_alone_under_flush():
    clusters, tokens = np.array([0, 1, 2]), np.array([3, 25, 4])
    assert window_topics(clusters, tokens, 10, "flush").tolist() == [1, 1, 1, 2]
    assert window_topics(clusters, tokens, 10, "concat").tolist() == [2, 1, 2, 1]


def test_ceiling_is_what_the_smallest_topics_allow():
    # 4 windows of 10; topic 1 has one document of 2 tokens, topic 0 is everywhere.
    clusters, tokens = np.array([0] * 19 + [1]), np.full(20, 2)
    assert diversity_ceiling(clusters, tokens, 10, "flush") == (4 + 1) / 4
    assert diversity_ceiling(clusters, tokens, 10, "concat") == pytest.approx((4 + 1.1) / 4)


def test_ceiling_counts_windows_that_one_document_fills():
    # 25 tokens fill two windows alone and open a third; 10 tokens end on the edge of their own.
    clusters, tokens = np.array([0, 1, 2, 2]), np.array([25, 10, 2, 3])
    assert diversity_ceiling(clusters, tokens, 10, "flush") == (3 + 1 + 1) / 4


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 20)), min_size=1, max_size=60))
def test_no_order_of_short_documents_passes_the_flush_ceiling(rows):
    clusters, tokens = np.asarray(rows).T
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(len(rows))
        found = window_diversity(clusters[order], tokens[order], 20, "flush")
        bound = np.minimum(found.num_windows, np.bincount(clusters)).sum() / found.num_windows
        assert found.mean <= bound + 1e-9


def test_compare_orders_reports_both_metrics_before_and_after():
    clusters, tokens = np.repeat(np.arange(4), 10), np.full(40, 5)
    order = np.arange(40).reshape(4, 10).T.ravel()
    found = compare_orders(clusters, tokens, order, 20)
    assert found["seq_len"] == 20
    for metric in ("concat", "flush"):
        assert found[metric]["before"]["mean"] < 1.5
        assert found[metric]["after"]["mean"] == 4
        assert found[metric]["after"]["percent_of_ceiling"] == pytest.approx(100, abs=1)


def test_no_document_means_no_windows():
    empty = np.empty(0, np.int64)
    assert window_diversity(empty, empty, 10) is None
    assert compare_orders(empty, empty, empty, 10)["flush"] == {"before": None, "after": None}
    assert len(window_topics(empty, empty, 10, "flush")) == 0


@pytest.mark.parametrize(("tokens", "seq_len"), [([0], 10), ([1, 1], 10), ([1], 0)])
def test_windows_that_cannot_be_filled_are_refused(tokens, seq_len):
    with pytest.raises(CurationError) as caught:
        window_topics(np.zeros(1, np.int64), np.asarray(tokens), seq_len)
    assert caught.value.code == "E-CURATION-WINDOWS"
