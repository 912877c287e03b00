"""Measures window diversity: how many topics the training windows of an order hold, compared with a
ceiling.

Both ways to fill a window are measured (see `windows`). The mean is also given in percent of the
data's ceiling, a reference that an order may slightly exceed (see `diversity_ceiling`). Every order
is compared with the source order and with a shuffle. An order of a million documents takes one
second (a few sorts).
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from nmoe_core.curate.even_spacing import by_cluster
from nmoe_core.curate.order import arrange
from nmoe_core.curate.windows import LOADERS, Loader, Windows, checked_documents, cut_windows

SCALES = (2048, 8192, 32_768, 131_072)
NUM_SHUFFLES = 20
_ALIGNMENTS = 8
_PARTS = 20  # `length_drift` compares so many parts of the epoch, with equal numbers of tokens


@dataclass(frozen=True, slots=True)
class Metrics:
    """Topics and documents in the windows of an order. In these comments, "topics" is the number of
    distinct topics of a window."""

    num_windows: int  # including the last one, which may be partial
    mean: float  # topics, over all windows
    min_full: int  # fewest topics in any window, except a partial last window
    last: int  # topics of the last window
    std: float  # population standard deviation of topics
    ceiling: float  # reference for the mean, see `diversity_ceiling`
    percent_of_ceiling: float
    p1: float  # first percentile of topics over full windows
    kl_mean: float  # over windows: KL(tokens of each topic in the window || in all), nats
    kl_p99: float
    # How far a topic runs ahead or behind: the largest difference, over all topics and positions in
    # the epoch, between the topic's tokens so far and its even share; in windows.
    discrepancy_max: float
    # Total variation distance, 0 to 1, between the topic shares of the first and of the last window
    # (or eight windows), in whole documents: how much the topics change from one epoch to the next.
    wrap_tv_1: float
    wrap_tv_8: float
    length_drift: float  # most documents in one of the `_PARTS`, divided by the fewest
    adjacent_same: float  # share of documents that follow a document of the same topic
    padding: float  # share of padding among the tokens of all windows
    cut_documents: int  # documents no longer than a window that are in several windows
    min_over_alignments: int  # lowest `min_full` if windows are shifted by eighths of a window


def measure(
    order: np.ndarray,
    doc_clusters: np.ndarray,
    doc_tokens: np.ndarray,
    seq_len: int,
    loader: Loader = "concat",
) -> Metrics | None:
    """Compute all metrics of an order; None if the documents have no tokens.

    `order`, int `[N]`, holds the document at each position; the other arrays are in source order.
    Raises CurationError as `cut_windows`.
    """
    clusters, tokens = checked_documents(doc_clusters, doc_tokens, seq_len)
    if not len(tokens):
        return None
    clusters = clusters[order]
    tokens = tokens[order]
    windows = cut_windows(clusters, tokens, seq_len, loader)
    counts = windows.num_topics()
    full = counts[: max(1, windows.num_full())]
    mean = float(counts.mean())
    ceiling = diversity_ceiling(clusters, tokens, seq_len, loader)
    divergence = _divergence(windows)
    return Metrics(
        num_windows=len(counts),
        mean=mean,
        min_full=int(full.min()),
        last=int(counts[-1]),
        std=float(counts.std()),
        ceiling=ceiling,
        percent_of_ceiling=100.0 * mean / ceiling,
        p1=float(np.percentile(full, 1)),
        kl_mean=float(divergence.mean()),
        kl_p99=float(np.percentile(divergence, 99)),
        discrepancy_max=_discrepancy(clusters, tokens) / seq_len,
        wrap_tv_1=_wrap(clusters, tokens, seq_len),
        wrap_tv_8=_wrap(clusters, tokens, 8 * seq_len),
        length_drift=_length_drift(tokens),
        adjacent_same=float((clusters[1:] == clusters[:-1]).mean()) if len(clusters) > 1 else 0.0,
        padding=1 - int(tokens.sum()) / (len(counts) * seq_len),
        cut_documents=int(((windows.first != windows.last) & (tokens <= seq_len)).sum()),
        min_over_alignments=_min_over_alignments(clusters, tokens, seq_len, loader),
    )


def compare(
    orders: Mapping[str, np.ndarray], doc_clusters: np.ndarray, doc_tokens: np.ndarray, seq_len: int
) -> dict[str, dict[str, dict[str, Any] | None]]:
    """Metrics of each order, of `original` and of `shuffle`, with both ways of packing, as JSON
    values."""
    named = dict(orders)
    for name in ("original", "shuffle"):
        if name not in named:
            named[name] = arrange(name, doc_clusters, doc_tokens)
    found: dict[str, dict[str, dict[str, Any] | None]] = {}
    for name, order in named.items():
        by_loader = {m: measure(order, doc_clusters, doc_tokens, seq_len, m) for m in LOADERS}
        found[name] = {m: asdict(one) if one else None for m, one in by_loader.items()}
    return found


def compare_orders(
    doc_clusters: np.ndarray, doc_tokens: np.ndarray, order: np.ndarray, seq_len: int
) -> dict[str, Any]:
    """Metrics of the source order, of `order` and of a shuffle, with both ways of packing, as JSON
    values."""
    found = compare({"after": order}, doc_clusters, doc_tokens, seq_len)
    names = {"before": "original", "after": "after", "shuffle": "shuffle"}
    windows = {m: {when: found[name][m] for when, name in names.items()} for m in LOADERS}
    return {"seq_len": seq_len, **windows}


def worst_of_shuffles(
    doc_clusters: np.ndarray, doc_tokens: np.ndarray, seq_len: int, loader: Loader
) -> tuple[float, float]:
    """The lowest `percent_of_ceiling` and the highest `wrap_tv_8` of `NUM_SHUFFLES` shuffles of at
    least one document. Another shuffle is worse than all of them with probability 1 / 21."""
    ceiling = diversity_ceiling(doc_clusters, doc_tokens, seq_len, loader)
    shares: list[float] = []
    seams: list[float] = []
    for seed in range(NUM_SHUFFLES):
        order = arrange("shuffle", doc_clusters, doc_tokens, seed=seed)
        clusters = doc_clusters[order]
        tokens = doc_tokens[order]
        counts = window_topics(clusters, tokens, seq_len, loader)
        shares.append(100.0 * float(counts.mean()) / ceiling)
        seams.append(_wrap(clusters, tokens, 8 * seq_len))
    return min(shares), max(seams)


def scales(order: np.ndarray, doc_clusters: np.ndarray, doc_tokens: np.ndarray) -> dict[int, float]:
    """Percent of the ceiling (concat) that an order reaches, per window length from 2k to 128k
    tokens; empty without tokens."""
    found = {size: measure(order, doc_clusters, doc_tokens, size) for size in SCALES}
    return {size: each.percent_of_ceiling for size, each in found.items() if each is not None}


def window_topics(
    doc_clusters: np.ndarray, doc_tokens: np.ndarray, seq_len: int, loader: Loader = "concat"
) -> np.ndarray:
    """Distinct topics per window, including a partial last window: int64 `[W]`."""
    return cut_windows(doc_clusters, doc_tokens, seq_len, loader).num_topics()


def diversity_ceiling(
    doc_clusters: np.ndarray, doc_tokens: np.ndarray, seq_len: int, loader: Loader = "concat"
) -> float:
    """The highest mean number of topics per window that an order can be expected to reach.

    With W = ceil(T / seq_len) windows, a topic is in at most W windows, and in at most as many as
    its documents touch. `flush`: a document of L >= seq_len tokens fills floor(L / seq_len) windows
    alone, and its remainder opens one more. `concat`: a document touches 1 + (L - 1) / seq_len
    windows on average over its alignments. The ceiling is not a bound: an order that puts documents
    of rare topics across the edges of windows exceeds it, by about 3 % with hundreds of windows and
    by more with a few. The hard bound, the sum of 1 + ceil((L - 1) / seq_len) over a topic's
    documents, is far above what orders reach.
    """
    clusters, tokens = checked_documents(doc_clusters, doc_tokens, seq_len)
    if not len(tokens):
        return 0.0
    num_windows = -(-int(tokens.sum()) // seq_len)
    if loader == "concat":
        touched = np.bincount(clusters, weights=1 + (tokens - 1) / seq_len)
        return float(np.minimum(num_windows, touched).sum() / num_windows)
    alone = int((tokens // seq_len).sum())
    touched = np.bincount(clusters[tokens % seq_len > 0])
    return float((alone + np.minimum(num_windows - alone, touched).sum()) / num_windows)


def _divergence(windows: Windows) -> np.ndarray:
    """KL divergence of each window's token shares by topic from the shares of the whole corpus:
    float64 `[W]`."""
    overall = np.bincount(windows.topic, weights=windows.tokens)
    overall /= overall.sum()
    per_window = np.bincount(windows.window, weights=windows.tokens)
    share = windows.tokens / per_window[windows.window]
    terms = share * np.log(share / overall[windows.topic])
    return np.bincount(windows.window, weights=terms)


def _discrepancy(clusters: np.ndarray, tokens: np.ndarray) -> float:
    """The largest difference, over topics and positions, between a topic's tokens so far and its
    even share.

    The largest difference occurs right before or right after a document of the topic, so only these
    positions are checked.
    """
    documents = by_cluster(clusters)
    sizes = np.bincount(clusters)
    held = np.cumsum(tokens[documents])
    totals = np.bincount(clusters, weights=tokens)
    before_topic = np.repeat(np.cumsum(totals) - totals, sizes)
    ends = np.cumsum(tokens)
    expected = np.repeat(totals / ends[-1], sizes)
    ahead = held - before_topic - expected * ends[documents]
    behind = ahead - tokens[documents] * (1 - expected)
    return float(max(np.abs(ahead).max(), np.abs(behind).max()))


def _wrap(clusters: np.ndarray, tokens: np.ndarray, num_tokens: int) -> float:
    """Total variation distance between the topic shares of the first and of the last `num_tokens`
    tokens."""
    ends = np.cumsum(tokens)
    head = slice(int(np.searchsorted(ends, num_tokens)) + 1)
    tail = slice(int(np.searchsorted(ends, ends[-1] - num_tokens, side="right")), None)
    size = int(clusters.max()) + 1
    shares = [np.bincount(clusters[part], tokens[part], size) for part in (head, tail)]
    return float(0.5 * np.abs(shares[0] / shares[0].sum() - shares[1] / shares[1].sum()).sum())


def _length_drift(tokens: np.ndarray) -> float:
    ends = np.cumsum(tokens)
    edges = np.searchsorted(ends, ends[-1] * np.arange(1, _PARTS) / _PARTS, side="right")
    counts = np.diff(edges, prepend=0, append=len(tokens))
    return float(counts.max() / max(int(counts.min()), 1))


def _min_over_alignments(
    clusters: np.ndarray, tokens: np.ndarray, seq_len: int, loader: Loader
) -> int:
    """Fewest distinct topics in a full window, over windows shifted by each eighth of a window."""
    least: list[int] = []
    for offset in sorted({seq_len * i // _ALIGNMENTS for i in range(_ALIGNMENTS)}):
        windows = cut_windows(clusters, tokens, seq_len, loader, offset)
        counts = windows.num_topics()
        full = counts[int(offset > 0) : windows.num_full()]
        least += full.tolist() or counts[:1].tolist()
    return min(least)
