"""`related`: neighbours in meaning stand next to each other, the opposite of the other orders.

For in-context pretraining (Shi et al., 2024, arXiv 2310.10638). Topics are cut into blocks of at
most `block` documents along their main direction, and the nearest-neighbour chain is exact inside a
block: the cost is O(N block D), the memory 4 block^2 bytes.
"""

from __future__ import annotations

import numpy as np

from nmoe_core.curate.order.spacing import members_by_topic, refusal

_POWER_STEPS = 8  # of the power iteration that finds a topic's main direction


def related(
    doc_clusters: np.ndarray,
    doc_tokens: np.ndarray,
    *,
    embeddings: np.ndarray,
    block: int = 2048,
    seed: int = 0,
    epoch: int = 0,
) -> np.ndarray:
    """A chain in which each document is followed by its nearest one of those left in its block.

    Lengths have no effect.

    Among `block` documents the chain is exact; rows of `embeddings` have length 1. The chain of
    topics starts at topic `(seed + epoch)` modulo their number.

    Raises:
        CurationError: Not one finite row per document, or `block` is below 1 (E-CURATION-ORDER).
    """
    rows = np.asarray(embeddings)
    if rows.ndim != 2 or len(rows) != len(doc_clusters) or block < 1:
        expected = f"a row for each of {len(doc_clusters)} documents, block >= 1"
        raise refusal("embeddings do not fit", f"{rows.shape}, block {block}", expected)
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


def _blocks(members: np.ndarray, rows: np.ndarray, block: int) -> list[np.ndarray]:
    """Members in equal parts of at most `block`, along the main direction of their rows."""
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
