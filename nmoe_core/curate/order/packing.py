"""Bin-packing by topic, kept for comparison: fill one window at a time from the rarest topic in it.

It balances tokens inside a window and takes long documents first, so the early windows hold few
documents and the late ones only short ones. O(N K).
"""

from __future__ import annotations

import numpy as np

from nmoe_core.curate.order.input import refusal
from nmoe_core.curate.order.spacing import by_cluster

_NEVER = np.iinfo(np.int64).max


def bin_packing(
    doc_clusters: np.ndarray, doc_tokens: np.ndarray, *, seq_len: int, seed: int = 0, epoch: int = 0
) -> np.ndarray:
    """Documents longer than a window first; then window by window, the topic with the fewest tokens
    in it gives its longest document that fits; when none fits, the next window begins.

    Ties go to the topic with more documents left, then to the lower id. `seed` and `epoch` change
    nothing.

    Args:
        doc_clusters: int `[N]`.
        doc_tokens: int `[N]`.
        seq_len: Tokens of a window.
    """
    if seq_len < 1:
        raise refusal("seq_len is out of range", seq_len, "1 or more")
    whole = np.flatnonzero(doc_tokens > seq_len)
    short = np.flatnonzero(doc_tokens <= seq_len)
    if not len(short):
        return whole
    pools = _Pools(short, doc_clusters[short], doc_tokens[short])
    order = whole.tolist()
    in_window, room = np.zeros(len(pools.left), np.int64), seq_len
    while len(order) < len(doc_clusters):
        fits = pools.shortest <= room
        if not fits.any():
            in_window[:], room = 0, seq_len
            continue
        # One integer for (tokens in the window, documents left downwards): the first wins ties.
        rank = in_window * (len(short) + 1) - pools.left
        cluster = int(np.where(fits, rank, _NEVER).argmin())
        document = pools.take(cluster, room)
        order.append(document)
        in_window[cluster] += doc_tokens[document]
        room -= int(doc_tokens[document])
    return np.asarray(order, np.int64)


class _Pools:
    """The documents of each topic, shortest first, of which the longest that fits is taken."""

    def __init__(self, documents: np.ndarray, clusters: np.ndarray, tokens: np.ndarray) -> None:
        self.left = np.bincount(clusters)
        self.shortest = np.full(len(self.left), _NEVER)
        self._lengths: list[np.ndarray] = []
        self._documents: list[np.ndarray] = []
        # Slot i + 1 is document i: `taken[slot]` leads to the last one not after it that is left.
        self._taken: list[list[int]] = []
        self._first_left = [1] * len(self.left)
        grouped, ends = by_cluster(clusters), np.cumsum(self.left)
        for cluster, size in enumerate(self.left.tolist()):
            rows = grouped[ends[cluster] - size : ends[cluster]][::-1]  # so that the lower id wins
            rows = rows[np.argsort(tokens[rows], kind="stable")]
            self._lengths.append(tokens[rows])
            self._documents.append(documents[rows])
            self._taken.append(list(range(size + 1)))
            self._set_shortest(cluster)

    def take(self, cluster: int, room: int) -> int:
        """The longest document of `cluster` of at most `room` tokens; there must be one."""
        taken = self._taken[cluster]
        slot = _find(taken, int(np.searchsorted(self._lengths[cluster], room, side="right")))
        taken[slot] = slot - 1
        self.left[cluster] -= 1
        self._set_shortest(cluster)
        return int(self._documents[cluster][slot - 1])

    def _set_shortest(self, cluster: int) -> None:
        taken, lengths, first = self._taken[cluster], self._lengths[cluster], self._first_left
        while first[cluster] <= len(lengths) and taken[first[cluster]] != first[cluster]:
            first[cluster] += 1
        is_left = first[cluster] <= len(lengths)
        self.shortest[cluster] = lengths[first[cluster] - 1] if is_left else _NEVER


def _find(taken: list[int], slot: int) -> int:
    root = slot
    while taken[root] != root:
        root = taken[root]
    while taken[slot] != root:
        taken[slot], slot = root, taken[slot]
    return root
