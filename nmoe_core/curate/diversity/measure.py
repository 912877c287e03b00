"""Window diversity: what training windows are composed of, and the most that is attainable.

Both ways to fill a window are measured (see `windows`). An order cannot pass the ceiling of its
data, so every figure comes with its percent of the ceiling, and every order stands beside the
source order and a shuffle. The figures say what windows hold, not what a model makes of it.
Costs a few sorts an order: about a second for a million documents.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from nmoe_core.base.errors import CurationError
from nmoe_core.curate.diversity.windows import (
    METRICS,
    Contents,
    Metric,
    cut_windows,
    window_contents,
)
from nmoe_core.curate.order import arrange
from nmoe_core.curate.order.spacing import by_cluster

__all__ = [
    "METRICS",
    "SCALES",
    "Ceilings",
    "Metric",
    "Metrics",
    "WindowDiversity",
    "ceilings",
    "compare",
    "compare_orders",
    "diversity_ceiling",
    "measure",
    "scales",
    "window_diversity",
    "window_topics",
]

SCALES = (2048, 8192, 32_768, 131_072)
_ALIGNMENTS = 8
_PARTS = 20  # of the epoch, for the drift of length


@dataclass(frozen=True, slots=True)
class WindowDiversity:
    """Distinct topics a window, over all windows of an order.

    `min_full` is over windows that were filled or closed; the last window may be partial and is
    reported alone. `std` is that of the population. `percent_of_ceiling` is `mean` over `ceiling`.
    """

    num_windows: int
    mean: float
    min_full: int
    last: int
    std: float
    ceiling: float
    percent_of_ceiling: float


@dataclass(frozen=True, slots=True)
class Metrics(WindowDiversity):
    """What the windows of an order are composed of.

    Attributes:
        p1: First percentile of distinct topics over full windows.
        kl_mean: Mean over windows of KL(tokens of each topic in the window || in all), nats.
        kl_p99: Its 99th percentile.
        discrepancy_max: Most that a prefix of the epoch is ahead or behind in tokens of a topic
            against the topic's share, in windows.
        wrap_tv_1: Total variation between topics of the first and of the last window: the step
            that training sees at the boundary of an epoch. Whole documents; 0 to 1.
        wrap_tv_8: The same over eight windows.
        length_drift: Documents in the densest over those in the sparsest twentieth of the tokens.
        adjacent_same: Share of documents that follow one of their own topic.
        padding: Share of window tokens that no document fills, the last window's included.
        cut_documents: Documents of at most a window that lie in more than one.
        min_over_alignments: Least `min_full` when windows begin at each eighth of a window.
    """

    p1: float
    kl_mean: float
    kl_p99: float
    discrepancy_max: float
    wrap_tv_1: float
    wrap_tv_8: float
    length_drift: float
    adjacent_same: float
    padding: float
    cut_documents: int
    min_over_alignments: int


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What no order of these documents can exceed, in `num_windows` = ceil(tokens / seq_len).

    `flush` and `concat` bound the mean; `min_*` the least window; `best_std_*` is the least
    standard deviation of counts whose mean is the ceiling.
    """

    num_windows: int
    flush: float
    concat: float
    min_flush: int
    min_concat: int
    best_std_flush: float
    best_std_concat: float


def measure(
    order: np.ndarray,
    doc_clusters: np.ndarray,
    doc_tokens: np.ndarray,
    seq_len: int,
    loader: Metric = "concat",
) -> Metrics | None:
    """All metrics of an order; None where there is no token.

    Args:
        order: int `[N]`: the document at each position.
        doc_clusters: Topic of each document, in source order: int `[N]`.
        doc_tokens: Length of each document, EOS included: int `[N]`.
        seq_len: Tokens of a window.
        loader: How windows are filled.

    Raises:
        CurationError: Arrays differ, or a length is below 1 (E-CURATION-WINDOWS).
    """
    clusters, tokens = _checked(doc_clusters, doc_tokens, seq_len)
    if not len(tokens):
        return None
    clusters, tokens = clusters[order], tokens[order]
    cut = cut_windows(tokens, seq_len, loader)
    contents = window_contents(clusters, tokens, seq_len, loader, cut)
    basic = _basic(contents.num_topics(), cut.last_fill, clusters, tokens, seq_len, loader)
    counts = contents.num_topics()
    full = counts[: max(1, len(counts) - (cut.last_fill < seq_len))]
    divergence = _divergence(contents)
    return Metrics(
        **asdict(basic),
        p1=float(np.percentile(full, 1)),
        kl_mean=float(divergence.mean()),
        kl_p99=float(np.percentile(divergence, 99)),
        discrepancy_max=_discrepancy(clusters, tokens) / seq_len,
        wrap_tv_1=_wrap(clusters, tokens, seq_len),
        wrap_tv_8=_wrap(clusters, tokens, 8 * seq_len),
        length_drift=_length_drift(tokens),
        adjacent_same=float((clusters[1:] == clusters[:-1]).mean()) if len(clusters) > 1 else 0.0,
        padding=1 - int(tokens.sum()) / (cut.num_windows() * seq_len),
        cut_documents=int(((cut.first != cut.last) & (tokens <= seq_len)).sum()),
        min_over_alignments=_min_over_alignments(clusters, tokens, seq_len, loader),
    )


def compare(
    orders: Mapping[str, np.ndarray],
    doc_clusters: np.ndarray,
    doc_tokens: np.ndarray,
    seq_len: int,
) -> dict[str, dict[str, dict[str, Any] | None]]:
    """Metrics of each order by both loaders, beside `original` and `shuffle`, ready for JSON."""
    named = dict(orders)
    for name in ("original", "shuffle"):
        if name not in named:
            named[name] = arrange(name, doc_clusters, doc_tokens)
    return {
        name: {metric: _as_dict(order, doc_clusters, doc_tokens, seq_len, metric)
               for metric in METRICS}
        for name, order in named.items()
    }  # fmt: skip


def compare_orders(
    doc_clusters: np.ndarray, doc_tokens: np.ndarray, order: np.ndarray, seq_len: int
) -> dict[str, Any]:
    """Metrics before and after an order and of a shuffle, by both loaders, ready for JSON."""
    orders = {
        "before": arrange("original", doc_clusters, doc_tokens),
        "after": order,
        "shuffle": arrange("shuffle", doc_clusters, doc_tokens),
    }
    result: dict[str, Any] = {"seq_len": seq_len}
    for metric in METRICS:
        result[metric] = {
            name: _as_dict(each, doc_clusters, doc_tokens, seq_len, metric)
            for name, each in orders.items()
        }
    return result


def scales(order: np.ndarray, doc_clusters: np.ndarray, doc_tokens: np.ndarray) -> dict[int, float]:
    """Percent of the ceiling (concat) in windows of 2k to 128k tokens; none where no token is."""
    arranged = np.asarray(doc_clusters)[order], np.asarray(doc_tokens)[order]
    found = {size: window_diversity(*arranged, size) for size in SCALES}
    return {size: each.percent_of_ceiling for size, each in found.items() if each is not None}


def window_diversity(
    doc_clusters: np.ndarray, doc_tokens: np.ndarray, seq_len: int, metric: Metric = "concat"
) -> WindowDiversity | None:
    """Distinct topics a window of documents in the order given; None where there is no token.

    Args:
        doc_clusters: Topic of each document, in training order: int `[N]`.
        doc_tokens: Length of each document, EOS included: int `[N]`.
        seq_len: Tokens of a window.
        metric: How windows are filled.
    """
    clusters, tokens = _checked(doc_clusters, doc_tokens, seq_len)
    if not len(tokens):
        return None
    cut = cut_windows(tokens, seq_len, metric)
    counts = window_contents(clusters, tokens, seq_len, metric, cut).num_topics()
    return _basic(counts, cut.last_fill, clusters, tokens, seq_len, metric)


def window_topics(
    doc_clusters: np.ndarray, doc_tokens: np.ndarray, seq_len: int, metric: Metric = "concat"
) -> np.ndarray:
    """Number of distinct topics in each window, the last partial one included: int64 `[W]`."""
    clusters, tokens = _checked(doc_clusters, doc_tokens, seq_len)
    if not len(tokens):
        return np.empty(0, np.int64)
    cut = cut_windows(tokens, seq_len, metric)
    return window_contents(clusters, tokens, seq_len, metric, cut).num_topics()


def diversity_ceiling(
    doc_clusters: np.ndarray, doc_tokens: np.ndarray, seq_len: int, metric: Metric = "concat"
) -> float:
    """Mean topics a window that an order of these documents can reach in W = ceil(T / seq_len).

    A topic is in at most W windows, and in no more than its documents touch. `flush`: a document
    of at least a window fills floor(L / seq_len) windows alone, and its rest opens one more.
    `concat`: a document touches 1 + (L - 1) / seq_len windows on average over alignments. Both are
    bounds for the expected case: a lucky alignment, or an order that flushes so early that it
    takes more than W windows, may pass them by a little.
    """
    clusters, tokens = _checked(doc_clusters, doc_tokens, seq_len)
    if not len(tokens):
        return 0.0
    num_windows = -(-int(tokens.sum()) // seq_len)
    if metric == "concat":
        touched = np.bincount(clusters, weights=1 + (tokens - 1) / seq_len)
        return float(np.minimum(num_windows, touched).sum() / num_windows)
    alone = int((tokens // seq_len).sum())
    touched = np.bincount(clusters[tokens % seq_len > 0])
    return float((alone + np.minimum(num_windows - alone, touched).sum()) / num_windows)


def ceilings(doc_clusters: np.ndarray, doc_tokens: np.ndarray, seq_len: int) -> Ceilings:
    """Bounds of mean, minimum and deviation by both loaders.

    A document of at least a window forces a window of one topic under flush; under concat one of
    at least 2 seq_len - 1 does at every alignment. Else the least window can hold the topics that
    are everywhere, and its whole share of the others.
    """
    clusters, tokens = _checked(doc_clusters, doc_tokens, seq_len)
    longest = int(tokens.max(initial=0))
    means = {m: diversity_ceiling(clusters, tokens, seq_len, m) for m in METRICS}
    least = {m: math.floor(mean + 1e-9) for m, mean in means.items()}
    fraction = {m: mean % 1.0 for m, mean in means.items()}
    return Ceilings(
        num_windows=-(-int(tokens.sum()) // seq_len),
        flush=means["flush"],
        concat=means["concat"],
        min_flush=1 if longest >= seq_len else least["flush"],
        min_concat=1 if longest >= 2 * seq_len - 1 else least["concat"],
        best_std_flush=math.sqrt(fraction["flush"] * (1 - fraction["flush"])),
        best_std_concat=math.sqrt(fraction["concat"] * (1 - fraction["concat"])),
    )


def _basic(
    counts: np.ndarray,
    last_fill: int,
    clusters: np.ndarray,
    tokens: np.ndarray,
    seq_len: int,
    metric: Metric,
) -> WindowDiversity:
    num_full = len(counts) - (last_fill < seq_len)
    mean = float(counts.mean())
    ceiling = diversity_ceiling(clusters, tokens, seq_len, metric)
    return WindowDiversity(
        num_windows=len(counts),
        mean=mean,
        min_full=int(counts[: max(num_full, 1)].min()),
        last=int(counts[-1]),
        std=float(counts.std()),
        ceiling=ceiling,
        percent_of_ceiling=100.0 * mean / ceiling,
    )


def _as_dict(
    order: np.ndarray, clusters: np.ndarray, tokens: np.ndarray, seq_len: int, metric: Metric
) -> dict[str, Any] | None:
    found = measure(order, clusters, tokens, seq_len, metric)
    return asdict(found) if found else None


def _divergence(contents: Contents) -> np.ndarray:
    """KL of each window's share of tokens by topic against that of all: float64 `[W]`."""
    overall = np.bincount(contents.topic, weights=contents.tokens)
    overall /= overall.sum()
    per_window = np.bincount(contents.window, weights=contents.tokens)
    share = contents.tokens / per_window[contents.window]
    terms = share * np.log(share / overall[contents.topic])
    return np.bincount(contents.window, weights=terms)


def _discrepancy(clusters: np.ndarray, tokens: np.ndarray) -> float:
    """Most tokens by which a prefix is off in a topic.

    It is greatest right after a document of the topic, or right before one.
    """
    documents, sizes = by_cluster(clusters), np.bincount(clusters)
    held = np.cumsum(tokens[documents])
    totals = np.bincount(clusters, weights=tokens)
    before_topic = np.repeat(np.cumsum(totals) - totals, sizes)
    ends = np.cumsum(tokens)
    expected = np.repeat(totals / ends[-1], sizes)
    ahead = held - before_topic - expected * ends[documents]
    behind = ahead - tokens[documents] * (1 - expected)
    return float(max(np.abs(ahead).max(), np.abs(behind).max()))


def _wrap(clusters: np.ndarray, tokens: np.ndarray, num_tokens: int) -> float:
    """Total variation between topics of the first and the last `num_tokens` tokens."""
    ends = np.cumsum(tokens)
    head = slice(int(np.searchsorted(ends, num_tokens)) + 1)
    tail = slice(int(np.searchsorted(ends, ends[-1] - num_tokens)), None)
    size = int(clusters.max()) + 1
    shares = [np.bincount(clusters[part], tokens[part], size) for part in (head, tail)]
    return float(0.5 * np.abs(shares[0] / shares[0].sum() - shares[1] / shares[1].sum()).sum())


def _length_drift(tokens: np.ndarray) -> float:
    ends = np.cumsum(tokens)
    edges = np.searchsorted(ends, ends[-1] * np.arange(1, _PARTS) / _PARTS)
    counts = np.diff(edges, prepend=0, append=len(tokens))
    return float(counts.max() / max(int(counts.min()), 1))


def _min_over_alignments(
    clusters: np.ndarray, tokens: np.ndarray, seq_len: int, metric: Metric
) -> int:
    """Least distinct topics of a full window, windows beginning at each eighth of one."""
    least: list[int] = []
    for offset in sorted({seq_len * i // _ALIGNMENTS for i in range(_ALIGNMENTS)}):
        cut = cut_windows(tokens, seq_len, metric, offset)
        counts = window_contents(clusters, tokens, seq_len, metric, cut, offset).num_topics()
        full = counts[int(offset > 0) : len(counts) - (cut.last_fill < seq_len)]
        least += full.tolist() or counts[:1].tolist()
    return min(least)


def _checked(
    doc_clusters: np.ndarray, doc_tokens: np.ndarray, seq_len: int
) -> tuple[np.ndarray, np.ndarray]:
    clusters, tokens = np.asarray(doc_clusters, np.int64), np.asarray(doc_tokens, np.int64)
    if seq_len < 1 or clusters.shape != tokens.shape or (len(tokens) and tokens.min() < 1):
        raise CurationError(
            "windows cannot be filled",
            found=f"seq_len {seq_len}, topics {clusters.shape}, lengths {tokens.shape}",
            expected="seq_len >= 1 and two arrays [N], lengths of at least 1 (the EOS)",
            code="E-CURATION-WINDOWS",
        )
    return clusters, tokens
