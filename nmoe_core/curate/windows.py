"""Cuts a training stream into windows and counts the contents of each.

`concat` concatenates documents and cuts every `seq_len` tokens, as the loader does. `flush` starts
a new window if a document does not fit, as the published diversity metric does. With `flush`, a
document longer than a window fills whole windows alone, and its remainder opens another window. The
cost is one pass over the documents and one sort of (window, topic) pairs.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from nmoe_core.base.errors import CurationError

Loader = Literal["concat", "flush"]
LOADERS: tuple[Loader, ...] = ("concat", "flush")


@dataclass(frozen=True, slots=True)
class Windows:
    """A stream of documents cut into windows, and the pairs of window and topic that occur."""

    seq_len: int  # tokens per window
    first: np.ndarray  # first window of each document: int64 [N]
    last: np.ndarray  # last window of each document: int64 [N]
    last_fill: int  # tokens in the last window, the offset included
    window: np.ndarray  # int64 [P], ascending
    topic: np.ndarray  # int64 [P], ascending within a window
    tokens: np.ndarray  # tokens of the topic in the window: int64 [P], all positive

    def num_topics(self) -> np.ndarray:
        """Distinct topics per window, including a partial last window: int64 `[W]`."""
        return np.bincount(self.window)

    def num_full(self) -> int:
        """Number of windows that were filled or closed."""
        return int(self.last[-1]) + 1 - (self.last_fill < self.seq_len)


def cut_windows(
    clusters: np.ndarray,
    tokens: np.ndarray,
    seq_len: int,
    loader: Loader = "concat",
    offset: int = 0,
) -> Windows:
    """Cut a stream of documents in training order; `tokens` include EOS.

    `offset` is the number of tokens before the first document in its window. Raises CurationError
    if the shapes of the arrays differ, or a length or `seq_len` is below 1 (E-CURATION-WINDOWS).
    """
    clusters, tokens = checked_documents(clusters, tokens, seq_len)
    if not len(tokens):
        return Windows(seq_len, tokens, tokens, 0, tokens, tokens, tokens)
    fill = _concat if loader == "concat" else _flush
    first, last, last_fill = fill(tokens, seq_len, offset)
    spans = last - first + 1
    piece = np.arange(int(spans.sum())) - np.repeat(np.cumsum(spans) - spans, spans)
    window = np.repeat(first, spans) + piece
    if loader == "concat":
        ends = np.cumsum(tokens) + offset
        stop = np.minimum(np.repeat(ends, spans), (window + 1) * seq_len)
        size = stop - np.maximum(np.repeat(ends - tokens, spans), window * seq_len)
    else:
        size = np.minimum(np.repeat(tokens, spans) - piece * seq_len, seq_len)
    num_clusters = int(clusters.max()) + 1
    pairs, pair = np.unique(window * num_clusters + np.repeat(clusters, spans), return_inverse=True)
    held = np.bincount(pair, weights=size).astype(np.int64)
    contents = pairs // num_clusters, pairs % num_clusters, held
    return Windows(seq_len, first, last, last_fill, *contents)


def checked_documents(
    clusters: np.ndarray, tokens: np.ndarray, seq_len: int
) -> tuple[np.ndarray, np.ndarray]:
    """Topics and lengths as int64; raises as `cut_windows`."""
    clusters = np.asarray(clusters, np.int64)
    tokens = np.asarray(tokens, np.int64)
    if seq_len < 1 or clusters.shape != tokens.shape or (len(tokens) and tokens.min() < 1):
        raise CurationError(
            "windows cannot be filled",
            found=f"seq_len {seq_len}, topics {clusters.shape}, lengths {tokens.shape}",
            expected="seq_len >= 1; topics and lengths of one shape [N]; lengths >= 1 (the EOS)",
            code="E-CURATION-WINDOWS",
        )
    return clusters, tokens


def _concat(tokens: np.ndarray, seq_len: int, offset: int) -> tuple[np.ndarray, np.ndarray, int]:
    ends = np.cumsum(tokens) + offset
    first = (ends - tokens) // seq_len
    last = (ends - 1) // seq_len
    return first, last, int(ends[-1] - last[-1] * seq_len)


def _flush(tokens: np.ndarray, seq_len: int, offset: int) -> tuple[np.ndarray, np.ndarray, int]:
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
            return first, last, used + int(ends[-1]) - start
        window += 1 if stop > i or used else 0
        i = stop
        used = 0
        if tokens[i] >= seq_len:
            full, used = divmod(int(tokens[i]), seq_len)
            first[i] = window
            last[i] = window + full - (used == 0)
            window += full
            i += 1
    return first, last, used or seq_len
