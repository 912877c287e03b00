"""Document orders: permutations that spread topics evenly over training windows.

An order is a function of the topic and the length of each document, `order(doc_clusters,
doc_tokens, **options) -> int64 [N]`: position -> document. All are pure, deterministic across
platforms, and break ties by the lower document number. `golden` is the default: no window length
is needed, three sorts, and after it every stretch of the epoch holds every topic in proportion and
the same mix of long and short documents. Costs O(N log N), except `stratified`, O(N K).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from nmoe_core.errors import CurationError

GOLDEN = 0.6180339887498949  # 1/phi: multiples of it, modulo 1, are spread as evenly as can be
PLASTIC = 0.7548776662466927  # 1/rho, and its square: the same in two dimensions
_MAX_SEED = 2**32  # above it the fraction of seed * PLASTIC loses digits

Order = Callable[..., np.ndarray]


def arrange(name: str, doc_clusters: np.ndarray, doc_tokens: np.ndarray, **options) -> np.ndarray:
    """The order called `name`, on checked input.

    Args:
        name: A key of `ORDERS`.
        doc_clusters: Topic of each document, in source order: non-negative integers `[N]`.
        doc_tokens: Length of each document in tokens, EOS included: non-negative integers `[N]`.
        options: Of the order; every order takes `seed`.

    Returns:
        int64 `[N]`: the document at each position, a permutation.

    Raises:
        CurationError: No such order, or arrays or seed are not as above (E-CURATION-ORDER).
    """
    clusters, tokens = np.asarray(doc_clusters), np.asarray(doc_tokens)
    if name not in ORDERS:
        raise _refuse("no such order", name, f"one of {', '.join(ORDERS)}")
    if clusters.ndim != 1 or clusters.shape != tokens.shape:
        raise _refuse("arrays differ", (clusters.shape, tokens.shape), "two of shape [N]")
    for what, values in (("topics", clusters), ("lengths", tokens)):
        if values.dtype.kind not in "iu" or (len(values) and values.min() < 0):
            raise _refuse(f"{what} are not counts", values.dtype, "integers from 0")
    seed = options.get("seed", 0)
    if not 0 <= seed < _MAX_SEED:
        raise _refuse("seed is out of range", seed, f"0 to {_MAX_SEED - 1}")
    return ORDERS[name](clusters.astype(np.int64), tokens.astype(np.int64), **options)


def golden(
    doc_clusters: np.ndarray, doc_tokens: np.ndarray, *, seed: int = 0, epoch: int = 0
) -> np.ndarray:
    """Even spacing inside each cluster, with lengths dealt out at golden-ratio steps.

    Inside a cluster documents are ranked by length, then dealt: rank r goes to the fraction
    r/phi mod 1 of the cluster, so neighbours in length end up far apart. The dealt document r of
    n is placed at (r + phase) / n of the epoch, each cluster with a phase of its own.

    Args:
        doc_clusters: int `[N]`.
        doc_tokens: int `[N]`.
        seed: Turns places and phases; each value is another order of the same evenness.
        epoch: As `seed`, in an independent direction: do not repeat one order each epoch.
    """
    sizes = np.bincount(doc_clusters)
    if not len(sizes):
        return np.empty(0, np.int64)
    turn = (seed * PLASTIC + epoch * PLASTIC**2) % 1.0
    ids = np.arange(len(sizes))
    by_length = np.lexsort((-doc_tokens, doc_clusters))
    cluster = np.repeat(ids, sizes)
    rank = _rank_in_group(sizes)
    place = (rank * GOLDEN + (cluster + 0.5) / len(sizes) + turn) % 1.0
    dealt = by_length[np.lexsort((place, cluster))]
    key = np.empty(len(dealt))
    key[dealt] = (rank + (cluster * GOLDEN + turn) % 1.0) / sizes[cluster]
    return np.argsort(key, kind="stable")


def count_stride(doc_clusters: np.ndarray, doc_tokens: np.ndarray, *, seed: int = 0) -> np.ndarray:
    """Even spacing of each cluster by count, keeping source order inside it (for curricula).

    Document r of n is placed at (r + phase) / n of the epoch. `seed` turns the phases.
    """
    sizes = np.bincount(doc_clusters)
    by_cluster = np.argsort(doc_clusters, kind="stable")
    cluster = doc_clusters[by_cluster]
    phase = (cluster * GOLDEN + seed * PLASTIC) % 1.0
    key = np.empty(len(by_cluster))
    key[by_cluster] = (_rank_in_group(sizes) + phase) / sizes[cluster]
    return np.argsort(key, kind="stable")


def stratified(doc_clusters: np.ndarray, doc_tokens: np.ndarray, *, seed: int = 0) -> np.ndarray:
    """The sample-count greedy: at each step the cluster furthest behind its share, lowest id first.

    After t of N documents the greedy maximises remaining_k / (N - t) - placed_k / t. Times the
    positive t (N - t) that is n_k t - placed_k N, which is kept here in integers, so ties are
    exact; an exhausted cluster is below zero while the scores sum to zero, so it is never picked.
    The first pick is the largest cluster. It has no random part: `seed` changes nothing.
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


def round_robin(doc_clusters: np.ndarray, doc_tokens: np.ndarray, *, seed: int = 0) -> np.ndarray:
    """One document of each cluster in turn, skipping exhausted ones. `seed` changes nothing."""
    by_cluster = np.argsort(doc_clusters, kind="stable")
    turn = np.empty(len(by_cluster), np.int64)
    turn[by_cluster] = _rank_in_group(np.bincount(doc_clusters))
    return np.lexsort((doc_clusters, turn))


def shuffle(doc_clusters: np.ndarray, doc_tokens: np.ndarray, *, seed: int = 0) -> np.ndarray:
    """A random permutation: documents sorted by a SplitMix64 hash of seed and number.

    The hash is spelled out because NumPy does not promise its own streams across versions.
    """
    number = np.arange(len(doc_clusters), dtype=np.uint64)
    state = (number + np.uint64(seed << 32) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(state ^ (state >> np.uint64(31)), kind="stable")


def original(doc_clusters: np.ndarray, doc_tokens: np.ndarray, *, seed: int = 0) -> np.ndarray:
    """Source order. `seed` changes nothing."""
    return np.arange(len(doc_clusters), dtype=np.int64)


def _rank_in_group(sizes: np.ndarray) -> np.ndarray:
    """0..n-1 for each group in turn: int64 `[sum(sizes)]`."""
    starts = np.cumsum(sizes) - sizes
    return np.arange(int(sizes.sum())) - np.repeat(starts, sizes)


def _refuse(what: str, found: object, expected: str) -> CurationError:
    return CurationError(
        what, where="order", found=found, expected=expected, code="E-CURATION-ORDER"
    )


ORDERS: dict[str, Order] = {
    "golden": golden,
    "count_stride": count_stride,
    "stratified": stratified,
    "round_robin": round_robin,
    "shuffle": shuffle,
    "original": original,
}
