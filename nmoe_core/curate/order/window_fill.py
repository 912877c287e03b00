"""`window_fill`: distributes documents over windows of one exact length, so that every window holds
every topic.

Documents are placed in batches of one topic, at most one document per window (bin covering). Then
windows exchange documents of the same topic, until most windows are exactly full. A full window
ends where a document ends, so few documents are cut. If training uses another window length,
`golden` is better. O(N log N).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Unpack

import numpy as np

from nmoe_core.curate.even_spacing import Turn, members_by_topic, rank_in_group, refusal, turn_of
from nmoe_core.curate.order.sequencing import FilledWindows, run_lengths
from nmoe_core.curate.windows import Loader

# Share of a window that is left free, so that no window overflows; the first share that suffices is
# used.
_MARGINS = (0.0, 1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.02, 0.04)
_LONG = 10  # documents longer than 1/10 of a window are placed first, by length alone
_TIGHT = 6  # a window is tight if 6 short documents of each topic would not fit
_FEWEST = 4  # if less than 1/4 of a batch has room, the batch goes to the emptiest windows
_PASSES = 3  # rounds of exchange; a fourth would change fills by less than one token


def window_fill(
    doc_clusters: np.ndarray,
    doc_tokens: np.ndarray,
    *,
    seq_len: int,
    loader: Loader = "concat",
    offset: int = 0,
    **turn: Unpack[Turn],
) -> np.ndarray:
    """Fill windows so that each holds every topic that has at least as many documents as there are
    windows.

    Args:
        seq_len: Tokens per window: the loader's distance between the starts of two windows.
        loader: `concat` cuts the stream every `seq_len` tokens, as this project's loader does;
            `flush` starts a new window when a document does not fit.
        offset: Tokens before the first document in its window.
        turn: `seed` and `epoch`, as for every order.

    Raises:
        CurationError: seq_len, loader or offset is out of range (E-CURATION-ORDER).
    """
    if seq_len < 1 or loader not in ("concat", "flush") or not 0 <= offset < seq_len:
        found = f"seq_len {seq_len}, loader {loader!r}, offset {offset}"
        raise refusal("windows cannot be filled", found, "offset < seq_len, loader concat or flush")
    if not len(doc_tokens):
        return np.empty(0, np.int64)
    margins = (0.0,) if loader == "concat" else _MARGINS
    for margin in margins:
        windows = _Windows(doc_clusters, doc_tokens, seq_len, loader, offset, margin)
        windows.fill_all()
        if margin == margins[-1] or (windows.fill[:-1] <= seq_len).all():
            return windows.order(turn_of(**turn))
    raise AssertionError


@dataclass(slots=True)
class _Group:
    """Documents of one topic, longest first, each in a different window."""

    documents: np.ndarray
    windows: np.ndarray


class _Windows(FilledWindows):
    """Distributes documents over windows.

    Before documents are placed, `fill` counts `offset` tokens in the first window. In the last
    window, it counts the tokens by which this window will stay below the others.
    """

    def __init__(
        self,
        doc_clusters: np.ndarray,
        doc_tokens: np.ndarray,
        seq_len: int,
        loader: Loader,
        offset: int,
        margin: float,
    ) -> None:
        self.clusters = doc_clusters
        self.seq_len = seq_len
        self.loader = loader
        self.offset = offset
        self.load = doc_tokens % seq_len
        self.is_giant = doc_tokens >= seq_len
        self.num_clusters = int(doc_clusters.max()) + 1
        room = max(1, int(seq_len * (1 - margin)))
        total = int(self.load.sum()) + offset
        # With flush, the remainder of each giant opens a window, so each giant needs a window.
        at_least = int(self.is_giant.sum()) if loader == "flush" else 0
        self.count = max(-(-total // room), at_least, 1)
        self.fill = np.zeros(self.count, np.int64)
        self.fill[-1] = max(0, self.count * room - total)
        self.fill[0] += offset
        self.window = np.full(len(doc_tokens), -1, np.int64)
        self.groups: list[_Group] = []

    def fill_all(self) -> None:
        """Place every document in a window."""
        self._place_long()
        self._place_short()
        self._even_out()

    def _place_long(self) -> None:
        """Place giants, then documents longer than 1/10 of a window, longest first, in the emptiest
        window."""
        is_long = self.load * _LONG > self.seq_len
        if self.loader == "flush":
            giants = self._longest_first(np.flatnonzero(self.is_giant))
            first = 1 if self.offset and len(giants) < self.count else 0
            self._put(giants, first + np.arange(len(giants)))
            long = self._longest_first(np.flatnonzero(is_long & ~self.is_giant))
        else:
            long = self._longest_first(np.flatnonzero(is_long | self.is_giant))
        emptiest = list(zip(self.fill.tolist(), range(self.count)))
        heapq.heapify(emptiest)
        target = np.empty(len(long), np.int64)
        for i, load in enumerate(self.load[long].tolist()):
            fill, window = emptiest[0]
            target[i] = window
            heapq.heapreplace(emptiest, (fill + load, window))
        self._put(long, target)
        self._group(long)

    def _place_short(self) -> None:
        """Place the other documents in batches of one topic, starting with the topic whose longest
        document is longest."""
        short = np.flatnonzero(self.window < 0)
        pools = self._pools(short)
        reserve = _Reserve(self, pools)
        self._serve_tight(pools, reserve)
        heads = [(-int(self.load[pool[0]]), cluster) for cluster, pool in pools.items()]
        heapq.heapify(heads)
        while heads:
            _, cluster = heapq.heappop(heads)
            pool = pools[cluster]
            batch = pool[: self.count]
            windows = self._windows_for(cluster, batch, reserve)
            batch = batch[: len(windows)]
            self._deal(cluster, batch, windows, reserve)
            pools[cluster] = pool = pool[len(batch) :]
            if len(pool):
                heapq.heappush(heads, (-int(self.load[pool[0]]), cluster))

    def _even_out(self) -> None:
        """Exchange documents within each group: the longest goes to the emptiest window."""
        for _ in range(_PASSES):
            for group in self.groups:
                load = self.load[group.documents]
                self.fill[group.windows] -= load
                emptiest = np.argsort(self.fill[group.windows], kind="stable")
                group.windows = group.windows[emptiest]
                self.fill[group.windows] += load
        for group in self.groups:
            self.window[group.documents] = group.windows
        self.groups = []

    def _put(self, documents: np.ndarray, windows: np.ndarray) -> None:
        self.window[documents] = windows
        self.fill += np.bincount(
            windows, weights=self.load[documents], minlength=self.count
        ).astype(np.int64)

    def _longest_first(self, documents: np.ndarray) -> np.ndarray:
        return documents[np.argsort(-self.load[documents], kind="stable")]

    def _group(self, documents: np.ndarray) -> None:
        """Group documents that are already placed: group j of a topic holds the j-th document of
        the topic in each window."""
        place = self.window[documents] * self.num_clusters + self.clusters[documents]
        grouped = np.argsort(place, kind="stable")
        rank = np.empty(len(documents), np.int64)
        rank[grouped] = rank_in_group(run_lengths(place[grouped]))
        key = rank * self.num_clusters + self.clusters[documents]
        by_key = np.argsort(key, kind="stable")
        for part in np.split(by_key, np.flatnonzero(np.diff(key[by_key])) + 1):
            rows = documents[part]
            self.groups.append(_Group(rows, self.window[rows]))

    def _pools(self, documents: np.ndarray) -> dict[int, np.ndarray]:
        """The documents of each topic, longest first."""
        documents = self._longest_first(documents)
        members = members_by_topic(self.clusters[documents])
        return {cluster: documents[rows] for cluster, rows in members}

    def _windows_for(self, cluster: int, batch: np.ndarray, reserve: _Reserve) -> np.ndarray:
        """Choose different windows for the first documents of a batch, emptiest first.

        Windows with few documents of this topic come first, then windows with few topics. If too
        few windows have room, the room that is reserved for other topics is used; after that,
        windows with more documents of this topic.
        """
        count = reserve.counts[cluster]
        fill = self.fill
        is_poor = count <= int(count.min()) + 1
        room = self.seq_len - fill - self.load[batch[-1]]
        for allowed in (is_poor & (room >= reserve.needed), is_poor & (room >= 0), room >= 0):
            windows = np.flatnonzero(allowed)
            if len(windows) > len(batch):
                # (documents of the topic, topics, fill), as one integer.
                rank = count[windows] * (self.num_clusters + 1) + reserve.num_topics[windows]
                rank = rank * (int(fill.max()) + 1) + fill[windows]
                windows = windows[np.argsort(rank, kind="stable")[: len(batch)]]
            windows = windows[np.argsort(fill[windows], kind="stable")]
            fits = fill[windows] + self.load[batch[: len(windows)]] <= self.seq_len
            num_fitting = len(windows) if fits.all() else int(fits.argmin())
            if num_fitting * _FEWEST >= len(batch):
                return windows[:num_fitting]
        return np.argsort(fill, kind="stable")[: len(batch)]

    def _serve_tight(self, pools: dict[int, np.ndarray], reserve: _Reserve) -> None:
        """Give the shortest documents of each topic to windows that will soon have too little room
        for every topic."""
        tight = np.flatnonzero(self.fill + _TIGHT * reserve.needed > self.seq_len)
        tight = tight[np.argsort(self.fill[tight], kind="stable")]
        for cluster in sorted(pools, key=lambda cluster: (self.load[pools[cluster][-1]], cluster)):
            pool = pools[cluster]
            windows = tight[reserve.counts[cluster][tight] == 0][-(len(pool) // 2) :]
            batch = pool[len(pool) - len(windows) :]
            fits = self.fill[windows] + self.load[batch] <= self.seq_len
            if len(pool) > 1 and fits.any():
                self._deal(cluster, batch[fits], windows[fits], reserve)
                left = np.ones(len(pool), bool)
                left[len(pool) - len(windows) :] = ~fits
                pools[cluster] = pool[left]

    def _deal(
        self, cluster: int, batch: np.ndarray, windows: np.ndarray, reserve: _Reserve
    ) -> None:
        self._put(batch, windows)
        reserve.note(cluster, windows)
        self.groups.append(_Group(batch, windows))


class _Reserve:
    """The topics of each window, and the room to reserve for topics that the window does not hold
    yet."""

    def __init__(self, windows: _Windows, pools: dict[int, np.ndarray]) -> None:
        self.counts: dict[int, np.ndarray] = {}  # documents of a topic in each window: int32 [W]
        self._short: dict[int, int] = {}
        self.num_topics = np.zeros(windows.count, np.int64)
        self.needed = np.zeros(windows.count, np.int64)
        sizes = np.bincount(windows.clusters)
        rows = np.flatnonzero(windows.window >= 0)
        placed = dict(members_by_topic(windows.clusters[rows]))
        for cluster, pool in pools.items():
            held = windows.window[rows[placed.get(cluster, [])]]
            count = np.bincount(held, minlength=windows.count)
            self.counts[cluster] = count.astype(np.int32)
            self.num_topics += count > 0
            if sizes[cluster] >= windows.count:
                self._short[cluster] = int(windows.load[pool[-1 - len(pool) // 20]])
                self.needed += np.where(count > 0, 0, self._short[cluster])

    def note(self, cluster: int, windows: np.ndarray) -> None:
        """Count one document of the topic in each of these windows."""
        fresh = windows[self.counts[cluster][windows] == 0]
        self.counts[cluster][windows] += 1
        self.num_topics[fresh] += 1
        self.needed[fresh] -= self._short.get(cluster, 0)
