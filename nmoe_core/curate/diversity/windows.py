"""How a training stream is cut into windows, and what each window holds.

`concat` concatenates documents and cuts every `seq_len` tokens, as the loader does. `flush` starts
a new window when a document does not fit, as the published metric of diversity ordering does; a
document longer than a window fills windows of its own there, and its rest opens one more.
Costs one pass and one sort over (window, topic) pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

Metric = Literal["flush", "concat"]
METRICS: tuple[Metric, ...] = ("concat", "flush")


@dataclass(frozen=True, slots=True)
class Cut:
    """Where the documents of a stream lie.

    Attributes:
        first: int64 `[N]`: first window of each document.
        last: int64 `[N]`: last window of each document.
        last_fill: Tokens in the last window, those of `offset` included.
    """

    first: np.ndarray
    last: np.ndarray
    last_fill: int

    def num_windows(self) -> int:
        """Windows, the last and perhaps partial one included."""
        return int(self.last[-1]) + 1


@dataclass(frozen=True, slots=True)
class Contents:
    """Tokens of each topic in each window, for the pairs that occur, by window and topic.

    Attributes:
        window: int64 `[P]`, ascending.
        topic: int64 `[P]`.
        tokens: int64 `[P]`, all positive.
    """

    window: np.ndarray
    topic: np.ndarray
    tokens: np.ndarray

    def num_topics(self) -> np.ndarray:
        """Distinct topics of each window: int64 `[W]`."""
        return np.bincount(self.window)


def cut_windows(tokens: np.ndarray, seq_len: int, metric: Metric, offset: int = 0) -> Cut:
    """Cut a stream of at least one document.

    Args:
        tokens: int64 `[N]`: length of each document in training order, at least 1.
        seq_len: Tokens of a window.
        metric: How windows are filled.
        offset: Tokens that stand before the first document in its window.
    """
    return (_concat if metric == "concat" else _flush)(tokens, seq_len, offset)


def window_contents(
    clusters: np.ndarray,
    tokens: np.ndarray,
    seq_len: int,
    metric: Metric,
    cut: Cut,
    offset: int = 0,
) -> Contents:
    """What each window of a cut holds; arguments as in `cut_windows`."""
    spans = cut.last - cut.first + 1
    piece = np.arange(int(spans.sum())) - np.repeat(np.cumsum(spans) - spans, spans)
    window = np.repeat(cut.first, spans) + piece
    if metric == "concat":
        ends = np.cumsum(tokens) + offset
        stop = np.minimum(np.repeat(ends, spans), (window + 1) * seq_len)
        size = stop - np.maximum(np.repeat(ends - tokens, spans), window * seq_len)
    else:
        size = np.minimum(np.repeat(tokens, spans) - piece * seq_len, seq_len)
    num_clusters = int(clusters.max()) + 1
    pairs, pair = np.unique(window * num_clusters + np.repeat(clusters, spans), return_inverse=True)
    held = np.bincount(pair, weights=size).astype(np.int64)
    return Contents(pairs // num_clusters, pairs % num_clusters, held)


def _concat(tokens: np.ndarray, seq_len: int, offset: int) -> Cut:
    ends = np.cumsum(tokens) + offset
    first, last = (ends - tokens) // seq_len, (ends - 1) // seq_len
    return Cut(first, last, int(ends[-1] - last[-1] * seq_len))


def _flush(tokens: np.ndarray, seq_len: int, offset: int) -> Cut:
    ends = np.cumsum(tokens)
    first = np.empty(len(tokens), np.int64)
    last = np.empty(len(tokens), np.int64)
    window = i = 0
    used = offset
    while i < len(tokens):
        start = int(ends[i] - tokens[i])
        stop = int(np.searchsorted(ends, start + seq_len - used, side="right"))
        first[i:stop] = last[i:stop] = window  # documents i..stop-1 fit into this window
        if stop == len(tokens):
            return Cut(first, last, used + int(ends[-1]) - start)
        window += 1 if stop > i or used else 0
        i, used = stop, 0
        if tokens[i] >= seq_len:
            full, used = divmod(int(tokens[i]), seq_len)
            first[i], last[i] = window, window + full - (used == 0)
            window += full
            i += 1
    return Cut(first, last, used or seq_len)
