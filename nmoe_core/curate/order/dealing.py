"""Dealing documents to shards so that each shard, ordered alone, holds every topic in proportion.

With it no global sort is needed at any scale: one pass counts topics per input shard, an exclusive
prefix sum of the counts gives each shard its first rank in each topic, and a second pass deals.
"""

from __future__ import annotations

import numpy as np

from nmoe_core.curate.order.input import refusal
from nmoe_core.curate.order.spacing import by_cluster, rank_in_group

_STEP = 7  # topics start at different shards, or shard 0 would get the odd document of each


def deal(
    doc_clusters: np.ndarray, num_shards: int, ranks_before: np.ndarray | None = None
) -> np.ndarray:
    """Output shard of each document: document r of topic c goes to (r + 7c) mod `num_shards`.

    Args:
        doc_clusters: int `[N]`, of one input shard or of all.
        num_shards: Output shards.
        ranks_before: int `[num_clusters]`: documents of each topic in the input shards before this
            one; None for the first, or for all at once.

    Returns:
        int64 `[N]`. Dealing shard by shard gives what dealing all at once does.

    Raises:
        CurationError: No shard, or a topic without its count (E-CURATION-ORDER).
    """
    sizes = np.bincount(doc_clusters)
    before = np.zeros(len(sizes), np.int64) if ranks_before is None else np.asarray(ranks_before)
    if num_shards < 1 or len(before) < len(sizes):
        found = f"{num_shards} shards, counts of {len(before)} topics"
        raise refusal("documents cannot be dealt", found, f"shards, counts of {len(sizes)} topics")
    documents = by_cluster(doc_clusters)
    cluster = np.repeat(np.arange(len(sizes)), sizes)
    shard = np.empty(len(documents), np.int64)
    shard[documents] = (before[cluster] + rank_in_group(sizes) + _STEP * cluster) % num_shards
    return shard
