"""The orders that others are measured against: source order, shuffle, round-robin, the greedy."""

from __future__ import annotations

import numpy as np

from nmoe_core.curate.order.spacing import rank_in_group


def original(
    doc_clusters: np.ndarray, doc_tokens: np.ndarray, *, seed: int = 0, epoch: int = 0
) -> np.ndarray:
    """Source order. `seed` and `epoch` change nothing."""
    return np.arange(len(doc_clusters), dtype=np.int64)


def shuffle(
    doc_clusters: np.ndarray, doc_tokens: np.ndarray, *, seed: int = 0, epoch: int = 0
) -> np.ndarray:
    """A random permutation: documents sorted by a SplitMix64 hash of seed, epoch and number.

    The hash is spelled out because NumPy does not promise its own streams across versions.
    """
    number = np.arange(len(doc_clusters), dtype=np.uint64)
    state = _mix(number + np.uint64(seed << 32) + np.uint64(1))
    if epoch:
        state = _mix(state + np.uint64(epoch))
    return np.argsort(state, kind="stable")


def round_robin(
    doc_clusters: np.ndarray, doc_tokens: np.ndarray, *, seed: int = 0, epoch: int = 0
) -> np.ndarray:
    """One document of each cluster in turn, skipping exhausted ones.

    `seed` and `epoch` change nothing.
    """
    by_cluster = np.argsort(doc_clusters, kind="stable")
    turn = np.empty(len(by_cluster), np.int64)
    turn[by_cluster] = rank_in_group(np.bincount(doc_clusters))
    return np.lexsort((doc_clusters, turn))


def stratified(
    doc_clusters: np.ndarray, doc_tokens: np.ndarray, *, seed: int = 0, epoch: int = 0
) -> np.ndarray:
    """The sample-count greedy: at each step the cluster furthest behind its share, lowest id first.

    After t of N documents the greedy maximises remaining_k / (N - t) - placed_k / t. Times the
    positive t (N - t) that is n_k t - placed_k N, which is kept here in integers, so ties are
    exact; an exhausted cluster is below zero while the scores sum to zero, so it is never picked.
    The first pick is the largest cluster. O(N K). `seed` and `epoch` change nothing.
    """
    # Only clusters that have documents: the score of an empty one would stay at zero.
    _, present, sizes = np.unique(doc_clusters, return_inverse=True, return_counts=True)
    num_documents = len(doc_clusters)
    by_cluster = np.argsort(present, kind="stable")
    heads = (np.cumsum(sizes) - sizes).tolist()
    order = np.empty(num_documents, np.int64)
    score = sizes.copy()
    for t in range(num_documents):
        k = int(score.argmax())
        if t == 0:
            score[:] = 0
        order[t] = by_cluster[heads[k]]
        heads[k] += 1
        score += sizes
        score[k] -= num_documents
    return order


def _mix(state: np.ndarray) -> np.ndarray:
    state = state * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
