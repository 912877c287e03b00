from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loader.order.packing import BLOCK_DOCUMENTS, best_fit_decreasing, pack


def spans_of(lengths) -> np.ndarray:
    ends = np.cumsum(lengths)
    return np.stack([ends - lengths, ends], axis=1)


def brute_force(lengths: list[int], capacity: int) -> list[int]:
    """Best fit decreasing by looking at every bin."""
    room: list[tuple[int, int]] = []  # room of each bin, and when it came to that room
    found = [0] * len(lengths)
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    for clock, item in enumerate(order):
        fits = [b for b, (left, _) in enumerate(room) if left >= lengths[item]]
        if fits:
            chosen = min(fits, key=lambda b: (room[b][0], -room[b][1]))
        else:
            room.append((capacity, 0))
            chosen = len(room) - 1
        room[chosen] = (room[chosen][0] - lengths[item], clock)
        found[item] = chosen
    return found


@settings(max_examples=200)
@given(st.lists(st.integers(1, 20), max_size=60), st.integers(20, 40))
def test_best_fit_is_that_of_a_search_over_all_bins(lengths, capacity):
    got = best_fit_decreasing(np.array(lengths, np.int64), capacity).tolist()
    assert got == brute_force(lengths, capacity)


@settings(max_examples=200)
@given(st.lists(st.integers(1, 100), max_size=50), st.integers(1, 40))
def test_every_token_is_packed_once_and_no_document_that_fits_is_cut(lengths, seq_len):
    spans = spans_of(np.array(lengths, np.int64))
    bins = pack(spans, seq_len)
    assert (bins.num_bins > 0) == bool(lengths)
    seen = np.concatenate(
        [np.arange(s, s + n) for s, n in zip(bins.starts, bins.lengths)] or [np.empty(0)]
    )
    assert sorted(seen.tolist()) == list(range(sum(lengths)))
    used = np.add.reduceat(bins.lengths, bins.rows[:-1]) if bins.num_bins else np.empty(0)
    assert (used <= seq_len).all()
    pieces = set(zip(bins.starts.tolist(), (bins.starts + bins.lengths).tolist()))
    assert all((s, e) in pieces for s, e in spans.tolist() if e - s <= seq_len)
    ends = {e for _, e in spans.tolist()}
    assert bins.is_end.tolist() == [s + n in ends for s, n in zip(bins.starts, bins.lengths)]
    # A document that is cut is cut at whole rows only.
    for start, end in spans.tolist():
        sizes = [n for s, n in zip(bins.starts, bins.lengths) if start <= s < end]
        assert sum(n < seq_len for n in sizes) <= 1


@pytest.mark.parametrize("seq_len", [512, 2048, 8192])
@pytest.mark.parametrize(("mean", "sigma"), [(6.0, 1.2), (7.0, 1.0), (6.5, 1.5)])
def test_padding_is_below_one_percent_on_log_normal_lengths(seq_len, mean, sigma):
    rng = np.random.default_rng(0)
    lengths = np.maximum(1, rng.lognormal(mean, sigma, BLOCK_DOCUMENTS).astype(np.int64))
    bins = pack(spans_of(lengths), seq_len)
    assert 1 - lengths.sum() / (bins.num_bins * seq_len) < 0.01


def test_rows_come_in_the_order_of_their_first_document():
    rng = np.random.default_rng(1)
    lengths = rng.integers(1, 30, 500)
    bins = pack(spans_of(lengths), 64)
    first = bins.starts[bins.rows[:-1]]
    assert (np.diff(first) > 0).all()
    for a, b in zip(bins.rows, bins.rows[1:]):
        assert (np.diff(bins.starts[a:b]) > 0).all()
