"""What no order of some documents can exceed, and a way to deal documents to shards by topic."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from nmoe_core.curate.diversity.measure import diversity_ceiling
from nmoe_core.curate.even_spacing import members_by_topic
from nmoe_core.curate.windows import LOADERS

_STEP = 7  # topics start at different shards, or shard 0 would get the odd document of each


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What to expect of an order of these documents at most, in `num_windows` = ceil(tokens /
    seq_len).

    `flush` and `concat` are of the mean, which concat may pass by a few percent; `min_*` of the
    least window; `best_std_*` is the least standard deviation of counts whose mean is the ceiling.
    """

    num_windows: int
    flush: float
    concat: float
    min_flush: int
    min_concat: int
    best_std_flush: float
    best_std_concat: float


def ceilings(doc_clusters: np.ndarray, doc_tokens: np.ndarray, seq_len: int) -> Ceilings:
    """Bounds of mean, minimum and deviation by both loaders.

    A document of at least a window forces a window of one topic under flush; under concat one of
    at least 2 seq_len - 1 does at every alignment. Else the least window can hold the topics that
    are everywhere, and its whole share of the others.
    """
    longest = int(doc_tokens.max(initial=0))
    means = {m: diversity_ceiling(doc_clusters, doc_tokens, seq_len, m) for m in LOADERS}
    least = {m: math.floor(mean + 1e-9) for m, mean in means.items()}
    fraction = {m: mean % 1.0 for m, mean in means.items()}
    return Ceilings(
        num_windows=-(-int(doc_tokens.sum()) // seq_len),
        flush=means["flush"],
        concat=means["concat"],
        min_flush=1 if longest >= seq_len else least["flush"],
        min_concat=1 if longest >= 2 * seq_len - 1 else least["concat"],
        best_std_flush=math.sqrt(fraction["flush"] * (1 - fraction["flush"])),
        best_std_concat=math.sqrt(fraction["concat"] * (1 - fraction["concat"])),
    )


def deal(doc_clusters: np.ndarray, num_shards: int) -> np.ndarray:
    """Shard of each document, int64 `[N]`: document r of topic c goes to (r + 7c) mod `num_shards`.

    Each shard, ordered alone, then holds every topic in proportion.
    """
    shard = np.empty(len(doc_clusters), np.int64)
    for cluster, members in members_by_topic(doc_clusters):
        shard[members] = (np.arange(len(members)) + _STEP * cluster) % num_shards
    return shard
