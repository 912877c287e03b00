"""Window diversity: how many topics each training window holds, and the most that is attainable.

Two ways to fill a window of `seq_len` tokens are measured. `concat` concatenates documents and cuts
every `seq_len` tokens, as the loader does. `flush` starts a new window when a document does not
fit, as the published metric of diversity ordering does. Costs one sort over (window, topic) pairs.
An order cannot pass the ceiling of its data, so every figure comes with its percent of the ceiling.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from nmoe_core.errors import CurationError

Metric = Literal["flush", "concat"]
METRICS: tuple[Metric, ...] = ("concat", "flush")


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


def window_diversity(
    doc_clusters: np.ndarray, doc_tokens: np.ndarray, seq_len: int, metric: Metric = "concat"
) -> WindowDiversity | None:
    """Diversity of documents in the order given; None where there is no token.

    Args:
        doc_clusters: Topic of each document, in training order: int `[N]`.
        doc_tokens: Length of each document, EOS included: int `[N]`.
        seq_len: Tokens of a window.
        metric: How windows are filled.
    """
    clusters, tokens = _checked(doc_clusters, doc_tokens, seq_len)
    if not len(tokens):
        return None
    first, last, last_fill = _FILL[metric](tokens, seq_len)
    counts = _distinct(clusters, first, last)
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


def window_topics(
    doc_clusters: np.ndarray, doc_tokens: np.ndarray, seq_len: int, metric: Metric = "concat"
) -> np.ndarray:
    """Number of distinct topics in each window, the last partial one included: int64 `[W]`."""
    clusters, tokens = _checked(doc_clusters, doc_tokens, seq_len)
    if not len(tokens):
        return np.empty(0, np.int64)
    first, last, _ = _FILL[metric](tokens, seq_len)
    return _distinct(clusters, first, last)


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


def compare_orders(
    doc_clusters: np.ndarray, doc_tokens: np.ndarray, order: np.ndarray, seq_len: int
) -> dict[str, Any]:
    """Diversity before and after an order, by both metrics, ready for JSON."""
    arranged = doc_clusters[order], doc_tokens[order]
    result: dict[str, Any] = {"seq_len": seq_len}
    for metric in METRICS:
        before = window_diversity(doc_clusters, doc_tokens, seq_len, metric)
        after = window_diversity(*arranged, seq_len, metric)
        result[metric] = {
            "before": asdict(before) if before else None,
            "after": asdict(after) if after else None,
        }
    return result


def _distinct(clusters: np.ndarray, first: np.ndarray, last: np.ndarray) -> np.ndarray:
    """Distinct clusters in each window, given the windows first..last of each document."""
    spans = last - first + 1
    offset = np.arange(int(spans.sum())) - np.repeat(np.cumsum(spans) - spans, spans)
    num_clusters = int(clusters.max()) + 1
    window = np.repeat(first, spans) + offset
    pairs = np.unique(window * num_clusters + np.repeat(clusters, spans))
    return np.bincount(pairs // num_clusters)


def _concat_windows(tokens: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray, int]:
    """First and last window each document touches, int64 `[N]`; tokens in the last window."""
    ends = np.cumsum(tokens)
    first, last = (ends - tokens) // seq_len, (ends - 1) // seq_len
    return first, last, int(ends[-1] - last[-1] * seq_len)


def _flush_windows(tokens: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray, int]:
    """As `_concat_windows`, for a filler that closes a window when a document does not fit."""
    ends = np.cumsum(tokens)
    first = np.empty(len(tokens), np.int64)
    last = np.empty(len(tokens), np.int64)
    window = used = i = 0
    while i < len(tokens):
        start = int(ends[i] - tokens[i])
        stop = int(np.searchsorted(ends, start + seq_len - used, side="right"))
        first[i:stop] = last[i:stop] = window  # documents i..stop-1 fit into this window
        if stop == len(tokens):
            return first, last, used + int(ends[-1]) - start
        window += 1 if stop > i or used else 0
        i, used = stop, 0
        if tokens[i] >= seq_len:
            full, used = divmod(int(tokens[i]), seq_len)
            first[i], last[i] = window, window + full - (used == 0)
            window += full
            i += 1
    return first, last, used or seq_len


_FILL = {"concat": _concat_windows, "flush": _flush_windows}


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
