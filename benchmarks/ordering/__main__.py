"""Scores the orders on the synthetic corpora and prints each target with its figure.

`python -m benchmarks.ordering [--seed 0] [--large]`; `--large` adds a million and ten million
documents. Figures of the published greedy on the same documents stand beside. Exits 1 if a target
is missed. Composition of windows is what is scored, not the loss of a model.
"""

from __future__ import annotations

import argparse
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from benchmarks.ordering.bounds import ceilings, deal
from benchmarks.ordering.profiles import make
from benchmarks.rounds import ROUNDS, seconds
from nmoe_core.curate.diversity.measure import Metrics, compare, measure
from nmoe_core.curate.order import golden, insert_only, stratified, window_fill
from nmoe_core.curate.windows import cut_windows

SEQ_LEN = 131_072
NUM_APPENDED = 8_159
Row = tuple[str, str, str, bool]  # what, figure, target, reached


def main() -> None:
    """Print every row; exit 1 if one is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--large", action="store_true")
    arguments = parser.parse_args()
    missed = 0
    for part in (windows, unknown_length, other_sources, increments, shards, speed):
        missed += _print(part(arguments.seed))
    if arguments.large:
        missed += _print(large(arguments.seed))
    _print_table(arguments.seed)
    sys.exit(missed > 0)


def windows(seed: int) -> Iterator[Row]:
    """`window_fill` on `seedlike`, for both loaders."""
    topics, tokens = make("seedlike", seed=seed)
    bound = ceilings(topics, tokens, SEQ_LEN)
    found = _fill(topics, tokens, "concat")
    mean = f"{found.mean:.3f} of {bound.flush:.3f}"
    yield "window_fill concat: mean", mean, "the ceiling", found.mean >= bound.flush - 0.005
    yield _at_least("window_fill concat: min", found.min_full, 27)
    yield _at_most("window_fill concat: cut documents", found.cut_documents, 40)
    found = _fill(topics, tokens, "flush")
    mean = f"{found.mean:.3f} of {bound.flush:.3f}"
    yield "window_fill flush: mean", mean, "the ceiling", found.mean >= bound.flush - 0.005
    yield _at_least("window_fill flush: min", found.min_full, 28)
    yield _at_least("window_fill flush: last", found.last, 28)
    yield _at_most("window_fill flush: std", found.std, 0.50)
    yield _at_most("window_fill flush: padding, %", 100 * found.padding, 0.05)


def unknown_length(seed: int) -> Iterator[Row]:
    """`golden` on `seedlike`: no window length is known."""
    topics, tokens = make("seedlike", seed=seed)
    found = _measured(golden(topics, tokens), topics, tokens, "flush")
    yield _at_least("golden flush: mean", found.mean, 28.475)
    yield _at_least("golden flush: min", min(found.min_full, found.last), 22)
    yield _at_most("golden flush: std", found.std, 0.935)
    yield _at_least("golden flush: min over 8 alignments", found.min_over_alignments, 22)
    greedy = _measured(stratified(topics, tokens), topics, tokens, "flush")
    yield _at_least("golden over the greedy: topics", found.mean - greedy.mean, 0.1)


def other_sources(seed: int) -> Iterator[Row]:
    """`window_fill` flush on the sorted source and on heavy tails."""
    found = _fill(*make("sorted", seed=seed), "flush")
    yield _at_least("sorted: mean", found.mean, 28.5)
    yield _at_least("sorted: min", found.min_full, 27)
    yield _at_most("sorted: std", found.std, 0.55)
    topics, tokens = make("heavy", seed=seed)
    found = _fill(topics, tokens, "flush")
    yield _at_least("heavy: mean", found.mean, 23.75)
    order = window_fill(topics, tokens, seq_len=SEQ_LEN, loader="flush")
    yield _at_least("heavy: min of shared windows", _least_shared(topics[order], tokens[order]), 15)


def increments(seed: int) -> Iterator[Row]:
    """The last documents of the source are appended to an order of the others."""
    topics, tokens = make("seedlike", seed=seed)
    num_old = len(topics) - NUM_APPENDED
    before = insert_only(topics[:num_old], tokens[:num_old])
    after = insert_only(topics, tokens)
    kept = float((after[after < num_old] == before).mean())
    yield _at_least("insert_only: old pairs kept, %", 100 * kept, 100)
    found = _measured(after, topics, tokens, "flush")
    yield _at_least("insert_only flush: mean", found.mean, 27.9)


def shards(seed: int) -> Iterator[Row]:
    """Sixteen shards, each ordered alone."""
    topics, tokens = make("seedlike", seed=seed)
    hashed = np.random.default_rng(seed).integers(0, 16, len(topics))
    for how, shard in (("rank", deal(topics, 16)), ("hash", hashed)):
        parts = [np.flatnonzero(shard == k) for k in range(16)]
        order = np.concatenate([part[golden(topics[part], tokens[part])] for part in parts])
        found = _measured(order, topics, tokens, "flush")
        yield _at_least(
            f"16 shards dealt by {how}: mean", found.mean, 28.40 if how == "rank" else 28.35
        )


def speed(seed: int) -> Iterator[Row]:
    """Seconds on this machine as it is, best of five."""
    topics, tokens = make("seedlike", seed=seed)
    yield _at_most("golden, 68k documents: s", _best_seconds(lambda: golden(topics, tokens)), 0.05)


def large(seed: int) -> Iterator[Row]:
    """A million documents, and the memory of ten million."""
    topics, tokens = make("seedlike", 1_000_000, seed)
    yield _at_most("golden, 1M documents: s", _best_seconds(lambda: golden(topics, tokens)), 0.8)
    for loader in ("concat", "flush"):
        order = partial(window_fill, topics, tokens, seq_len=SEQ_LEN, loader=loader)
        yield _at_most(f"window_fill {loader}, 1M documents: s", seconds(order), 10)
    topics, tokens = make("seedlike", 10_000_000, seed)
    for name, order in (
        ("golden", lambda: golden(topics, tokens)),
        ("window_fill", lambda: window_fill(topics, tokens, seq_len=SEQ_LEN)),
    ):
        tracemalloc.start()
        order()
        peak = tracemalloc.get_traced_memory()[1] / len(topics)
        tracemalloc.stop()
        yield _at_most(f"{name}, 10M documents: bytes a document", peak, 64)


def _fill(topics: np.ndarray, tokens: np.ndarray, loader) -> Metrics:
    order = window_fill(topics, tokens, seq_len=SEQ_LEN, loader=loader)
    return _measured(order, topics, tokens, loader)


def _measured(order: np.ndarray, topics: np.ndarray, tokens: np.ndarray, loader) -> Metrics:
    found = measure(order, topics, tokens, SEQ_LEN, loader)
    assert found is not None
    return found


def _least_shared(topics: np.ndarray, tokens: np.ndarray) -> int:
    """Least topics of a full window (flush) that no one topic fills to 99.9 %."""
    held = cut_windows(topics, tokens, SEQ_LEN, "flush")
    largest = np.zeros(len(held.num_topics()), np.int64)
    np.maximum.at(largest, held.window, held.tokens)
    is_shared = largest < 0.999 * np.bincount(held.window, weights=held.tokens)
    return int(held.num_topics()[:-1][is_shared[:-1]].min())


def _best_seconds(order: Callable[[], object]) -> float:
    return min(seconds(order) for _ in range(ROUNDS))


def _at_least(what: str, figure: float, target: float) -> Row:
    return what, f"{figure:.4g}", f">= {target:g}", figure >= target


def _at_most(what: str, figure: float, target: float) -> Row:
    return what, f"{figure:.4g}", f"<= {target:g}", figure <= target


def _print(rows: Iterator[Row]) -> int:
    missed = 0
    for what, figure, target, is_reached in rows:
        missed += not is_reached
        print(
            f"{'pass' if is_reached else 'FAIL'}  {what:44s} {figure:>18s}   {target}", flush=True
        )
    return missed


def _print_table(seed: int) -> None:
    topics, tokens = make("seedlike", seed=seed)
    orders = {
        "stratified": stratified(topics, tokens),
        "golden": golden(topics, tokens),
        "window_fill": window_fill(topics, tokens, seq_len=SEQ_LEN),
    }
    names = ("mean", "min_full", "last", "std", "percent_of_ceiling", "kl_mean")
    names += ("discrepancy_max", "wrap_tv_8", "length_drift", "cut_documents")
    print("\n" + " ".join(f"{name[:12]:>12s}" for name in ("concat", *names)))
    for order, found in compare(orders, topics, tokens, SEQ_LEN).items():
        row = found["concat"] or {}
        print(f"{order:>12s} " + " ".join(f"{row[name]:12.4g}" for name in names))


if __name__ == "__main__":
    main()
