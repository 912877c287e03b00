"""`window_fill` at its bounds: on the published cluster sizes, with fewer windows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.ordering.bounds import ceilings
from nmoe_core.curate.diversity.measure import measure
from nmoe_core.curate.order import golden, shuffle, stratified, window_fill
from nmoe_core.curate.order.sequencing import cancel, level

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


@pytest.mark.parametrize("is_sorted", [False, True])
@pytest.mark.parametrize("loader", ["concat", "flush"])
def test_every_window_is_at_the_bound_for_the_loader_it_is_made_for(loader, is_sorted):
    clusters, tokens = make(is_sorted=is_sorted)
    bound = ceilings(clusters, tokens, SEQ_LEN)
    order = window_fill(clusters, tokens, seq_len=SEQ_LEN, loader=loader)
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
    plain = measure(shuffle(clusters, tokens), clusters, tokens, SEQ_LEN, loader)
    assert found.wrap_tv_8 <= plain.wrap_tv_8
    assert found.discrepancy_max < 0.5 * plain.discrepancy_max


def test_the_default_and_the_greedy_are_where_they_were_measured():
    clusters, tokens = make()
    found = measure(golden(clusters, tokens), clusters, tokens, SEQ_LEN, "flush")
    greedy = measure(stratified(clusters, tokens), clusters, tokens, SEQ_LEN, "flush")
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
    order = window_fill(clusters, tokens, seq_len=SEQ_LEN, loader="flush")
    found = measure(order, clusters, tokens, SEQ_LEN, "flush")
    assert found.mean > 0.995 * bound.flush
    assert found.num_windows <= bound.num_windows + 1
    other = measure(golden(clusters, tokens), clusters, tokens, SEQ_LEN, "flush")
    assert found.mean > other.mean + 0.3


@pytest.mark.parametrize("offset", [1, 40_000, 100_000])
def test_windows_are_filled_from_where_the_stream_stands(offset):
    clusters, tokens = make()
    order = window_fill(clusters, tokens, seq_len=SEQ_LEN, offset=offset)
    # One document of another topic stands before: the stream of a source with several shards.
    before = np.concatenate([[30], clusters]), np.concatenate([[offset], tokens])
    found = measure(np.concatenate([[0], order + 1]), *before, SEQ_LEN)
    aligned = ceilings(clusters, tokens, SEQ_LEN)
    assert found.cut_documents < 0.5 * aligned.num_windows
    assert found.mean > 0.998 * aligned.flush
    ignored = window_fill(clusters, tokens, seq_len=SEQ_LEN)
    if offset == 40_000:
        worse = measure(np.concatenate([[0], ignored + 1]), *before, SEQ_LEN)
        assert worse.cut_documents > 0.9 * aligned.num_windows


@settings(max_examples=80)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 90)), min_size=1, max_size=80),
    st.integers(1, 60),
    st.integers(0, 59),
    st.sampled_from(["concat", "flush"]),
)
def test_any_documents_in_any_window_are_a_permutation(rows, seq_len, offset, loader):
    clusters, tokens = np.asarray(rows).T
    options = {"seq_len": seq_len, "offset": offset % seq_len, "loader": loader}
    order = window_fill(clusters, tokens, **options)
    assert sorted(order.tolist()) == list(range(len(rows)))


@settings(max_examples=80)
@given(st.lists(st.integers(-9, 9), max_size=40))
def test_errors_cancel_and_never_exceed_the_largest_one(errors):
    error = np.asarray(errors, np.int64)
    order = cancel(np.arange(len(error)), error)
    assert sorted(order.tolist()) == list(range(len(error)))
    running = np.cumsum(error[order])
    same_sign_left = abs(int(error.sum())) + 9
    assert np.abs(running).max(initial=0) <= same_sign_left
    if not any(errors):
        assert order.tolist() == list(range(len(error)))
    if errors and sum(errors) == 0:
        assert np.abs(running).max() <= max(map(abs, errors))
        assert running[-1] == 0


def test_levelling_keeps_prefix_sums_small_from_both_ends():
    rng = np.random.default_rng(0)
    surplus = rng.standard_normal((400, 5)).astype(np.float32)
    surplus -= surplus.mean(axis=0)
    order = level(np.arange(400), surplus, np.zeros(5), np.zeros(5))
    assert sorted(order.tolist()) == list(range(400))
    plain = np.abs(np.cumsum(surplus, axis=0)).max()
    levelled = np.abs(np.cumsum(surplus[order], axis=0))
    assert levelled.max() < 0.5 * plain
    assert levelled[:100].max() < 5
    assert levelled[-100:].max() < 5
