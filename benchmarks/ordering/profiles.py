"""Synthetic corpora that orders are scored on: a topic and a length for each document.

`seedlike` has the cluster sizes read off the published diversity figure (68,159 documents, 156.6M
tokens, 30 topics) in a topically bursty source; `heavy` has Zipf sizes and a Pareto tail of lengths
past the window; `sorted` is `seedlike` fully sorted by topic and length. Reconstructions: the
published data are not available.
"""

from __future__ import annotations

import numpy as np

PROFILES = ("seedlike", "heavy", "sorted")
NUM_DOCUMENTS, NUM_TOKENS, NUM_TOPICS = 68_159, 156_600_000, 30
# fmt: off
SIZES = (
    376, 643, 874, 1340, 1399, 1399, 1480, 1513, 1566, 1658, 1679, 1698, 1765, 1856, 1880,
    1904, 1987, 1987, 2086, 2086, 2238, 2285, 2337, 2499, 2881, 2881, 2978, 3624, 4206, 11054,
)
# fmt: on
_LONGEST_SHORT = 130_000


def make(profile: str, num_documents: int | None = None, seed: int = 0):
    """Topics int64 `[N]` and lengths int64 `[N]`, in source order."""
    rng = np.random.default_rng([seed, 1 + PROFILES.index(profile)])
    is_heavy = profile == "heavy"
    share = 1 / np.arange(1, NUM_TOPICS + 1) if is_heavy else np.asarray(SIZES, float)
    total = num_documents or (70_000 if is_heavy else NUM_DOCUMENTS)
    sizes = np.maximum(1, (share / share.sum() * total).astype(np.int64))
    sizes[sizes.argmax()] += total - sizes.sum()
    topics = np.repeat(np.arange(NUM_TOPICS), rng.permutation(sizes))
    tokens = _heavy(rng, topics) if is_heavy else _log_normal(rng, topics)
    order = np.lexsort((-tokens, topics)) if profile == "sorted" else _bursts(rng, topics, tokens)
    return topics[order], tokens[order]


def _log_normal(rng: np.random.Generator, topics: np.ndarray) -> np.ndarray:
    tokens = np.exp(rng.normal(rng.normal(0, 0.35, NUM_TOPICS)[topics], 0.9))
    for _ in range(20):  # the cap lowers the mean, so scale again
        scale = NUM_TOKENS / NUM_DOCUMENTS / tokens.mean()
        tokens = np.clip(tokens * scale, 16, _LONGEST_SHORT)
    return tokens.astype(np.int64)


def _heavy(rng: np.random.Generator, topics: np.ndarray) -> np.ndarray:
    tokens = np.exp(rng.normal(rng.normal(0, 0.6, NUM_TOPICS)[topics], 1.1))
    is_tail = rng.random(len(topics)) < 0.01
    tokens[is_tail] *= 8 * (1 + rng.pareto(1.3, int(is_tail.sum())))
    return np.clip(tokens * 2300 / tokens.mean(), 16, 600_000).astype(np.int64)


def _bursts(rng: np.random.Generator, topics: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Topics come in runs; four large ones fill the end; half of the longest come first."""
    num_runs, total = 60, len(topics)
    run = rng.integers(0, num_runs, total)
    own = rng.integers(0, num_runs, (NUM_TOPICS, 24))
    is_own = rng.random(total) < 0.75
    run[is_own] = own[topics[is_own], rng.integers(0, 24, int(is_own.sum()))]
    large = np.argsort(-np.bincount(topics))[:4]
    is_late = np.isin(topics, large) & (rng.random(total) < 0.45)
    run[is_late] = num_runs + rng.integers(0, 3, int(is_late.sum()))
    run[(tokens > np.quantile(tokens, 0.999)) & (rng.random(total) < 0.5)] = 0
    return np.lexsort((rng.random(total), run))
