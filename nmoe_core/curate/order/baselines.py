"""Source order, shuffle and published orders, with which the other orders are compared."""

from bisect import bisect_right
from typing import Unpack

import numpy as np

from loader.order.shuffle import GOLDEN, mix64_array
from nmoe_core.curate.even_spacing import (
    Turn,
    by_cluster,
    members_by_topic,
    rank_in_group,
    refusal,
    turn_of,
)

_NEVER = np.iinfo(np.int64).max
_POWER_STEPS = 8  # power iterations that find a topic's main direction


def original(
    doc_clusters: np.ndarray, doc_tokens: np.ndarray, **unused: Unpack[Turn]
) -> np.ndarray:
    """Source order. `seed` and `epoch` have no effect."""
    return np.arange(len(doc_clusters), dtype=np.int64)


def shuffle(
    doc_clusters: np.ndarray, doc_tokens: np.ndarray, *, seed: int = 0, epoch: int = 0
) -> np.ndarray:
    """A random permutation: documents sorted by a SplitMix64 hash of seed, epoch and document
    number.

    The hash is written out here because NumPy may change its random streams between versions.
    """
    number = np.arange(len(doc_clusters), dtype=np.uint64)
    state = _mix(number + np.uint64(seed << 32) + np.uint64(1))
    if epoch:
        state = _mix(state + np.uint64(epoch))
    return np.argsort(state, kind="stable")


def round_robin(
    doc_clusters: np.ndarray, doc_tokens: np.ndarray, **unused: Unpack[Turn]
) -> np.ndarray:
    """One document per cluster in turn. `seed` and `epoch` have no effect."""
    grouped = by_cluster(doc_clusters)
    turn = np.empty(len(grouped), np.int64)
    turn[grouped] = rank_in_group(np.bincount(doc_clusters))
    return np.lexsort((doc_clusters, turn))


def stratified(
    doc_clusters: np.ndarray, doc_tokens: np.ndarray, *, seed: int = 0, epoch: int = 0
) -> np.ndarray:
    """The greedy order by number of documents: each step takes the cluster that is furthest behind
    its share of documents; ties go to the lowest id.

    After t of N documents, the greedy algorithm maximises remaining_k / (N - t) - placed_k / t.
    Multiplied by t (N - t), which is positive, this score is n_k t - placed_k N. It is computed in
    integers, so that ties are exact. The scores sum to zero and the score of an exhausted cluster
    is below zero, so it is never picked. The first pick is the largest cluster. O(N K). `epoch`
    rotates the documents within each cluster; `seed` has no effect.
    """
    # Leave out empty clusters: their score would stay at zero and could be picked.
    members = [documents for _, documents in members_by_topic(doc_clusters)]
    sizes = np.array([len(documents) for documents in members], np.int64)
    num_documents = len(doc_clusters)
    shift = turn_of(epoch=epoch)
    heads = (np.cumsum(sizes) - sizes).tolist()
    grouped = [row for rows in members for row in np.roll(rows, -int(shift * len(rows))).tolist()]
    order = np.empty(num_documents, np.int64)
    score = sizes.copy()
    for t in range(num_documents):
        k = int(score.argmax())
        if t == 0:
            score[:] = 0
        order[t] = grouped[heads[k]]
        heads[k] += 1
        score += sizes
        score[k] -= num_documents
    return order


def bin_packing(
    doc_clusters: np.ndarray, doc_tokens: np.ndarray, *, seq_len: int, **unused: Unpack[Turn]
) -> np.ndarray:
    """Documents longer than a window come first. Then windows are filled one by one: each step
    takes the topic with the fewest tokens in the window, and places its longest document that fits.
    If no document fits, the next window begins.

    Topics have about equal tokens within each window. Long documents are placed first, so early
    windows hold few documents and late windows only short documents. Ties go to the topic with more
    documents left, then to the lower id. O(N K). `seed` and `epoch` have no effect.
    """
    if seq_len < 1:
        raise refusal("seq_len is out of range", seq_len, "1 or more")
    is_short = doc_tokens <= seq_len
    order = np.flatnonzero(~is_short).tolist()
    num_short = int(is_short.sum())
    # Documents of each topic, shortest first; among equal lengths, the lowest id last (popped
    # first).
    pools: list[list[int]] = [[] for _ in range(int(doc_clusters.max(initial=-1)) + 1)]
    for cluster, members in members_by_topic(doc_clusters):
        rows = members[is_short[members]][::-1]
        pools[cluster] = rows[np.argsort(doc_tokens[rows], kind="stable")].tolist()
    lengths = [doc_tokens[pool].tolist() for pool in pools]
    left = np.array([len(pool) for pool in pools], np.int64)
    shortest = np.array([pool[0] if pool else _NEVER for pool in lengths], np.int64)
    in_window = np.zeros(len(pools), np.int64)
    room = seq_len
    while len(order) < len(doc_clusters):
        fits = shortest <= room
        if not fits.any():
            in_window[:] = 0
            room = seq_len
            continue
        # The pair (tokens in the window, minus documents left) as one integer; argmin gives ties to
        # the lower id.
        rank = in_window * (num_short + 1) - left
        cluster = int(np.where(fits, rank, _NEVER).argmin())
        place = bisect_right(lengths[cluster], room) - 1
        length = lengths[cluster].pop(place)
        order.append(pools[cluster].pop(place))
        left[cluster] -= 1
        shortest[cluster] = lengths[cluster][0] if lengths[cluster] else _NEVER
        in_window[cluster] += length
        room -= length
    return np.asarray(order, np.int64)


def related(
    doc_clusters: np.ndarray,
    doc_tokens: np.ndarray,
    *,
    embeddings: np.ndarray,
    block: int = 2048,
    seed: int = 0,
    epoch: int = 0,
) -> np.ndarray:
    """Place similar documents next to each other; the other orders spread them.

    For in-context pretraining (Shi et al., 2024, arXiv 2310.10638). Topics are cut into blocks of
    at most `block` documents along their main direction; within a block, each document is followed
    by its nearest unplaced document. It takes O(N block D) time and 4 block^2 bytes. Rows of
    `embeddings` have length 1; the chain of topics starts at topic `(seed + epoch)` modulo the
    number of topics. Raises CurationError if there is not one finite row per document, or if
    `block` is below 1 (E-CURATION-ORDER).
    """
    rows = np.asarray(embeddings)
    if rows.ndim != 2 or len(rows) != len(doc_clusters) or block < 1:
        expected = f"one row per document, {len(doc_clusters)} in all, and block >= 1"
        raise refusal("embeddings or block are invalid", f"{rows.shape}, block {block}", expected)
    if not np.isfinite(rows).all():
        raise refusal("embeddings are not finite", "NaN or infinity", "finite numbers")
    if not len(rows):
        return np.empty(0, np.int64)
    topics = [members for _, members in members_by_topic(doc_clusters)]
    centres = np.stack([rows[members].mean(axis=0, dtype=np.float32) for members in topics])
    order: list[np.ndarray] = []
    for topic in _chain(centres, (seed + epoch) % len(topics)):
        for members in _blocks(topics[topic], rows, block):
            start = int((rows[members] @ rows[order[-1][-1]]).argmax()) if order else 0
            order.append(members[_chain(rows[members], start)])
    return np.concatenate(order)


def _mix(state: np.ndarray) -> np.ndarray:
    return mix64_array(state * np.uint64(GOLDEN))


def _blocks(members: np.ndarray, rows: np.ndarray, block: int) -> list[np.ndarray]:
    """Split members into equal parts of at most `block`, along the main direction of their rows."""
    if len(members) <= block:
        return [members]
    centred = rows[members] - rows[members].mean(axis=0)
    direction = centred[np.square(centred).sum(axis=1).argmax()]
    for _ in range(_POWER_STEPS):
        direction = centred.T @ (centred @ direction)
        direction /= max(float(np.linalg.norm(direction)), np.finfo(np.float32).tiny)
    along = members[np.argsort(centred @ direction, kind="stable")]
    return np.array_split(along, -(-len(members) // block))


def _chain(rows: np.ndarray, start: int) -> np.ndarray:
    """Greedy nearest-neighbour chain by cosine, ties to the lower row: int64 `[n]`."""
    similarity = rows @ rows.T
    order = np.empty(len(rows), np.int64)
    current = start
    for position in range(len(rows)):
        order[position] = current
        similarity[:, current] = -np.inf
        current = int(similarity[current].argmax())
    return order
