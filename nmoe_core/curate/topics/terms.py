"""Names for clusters: the words most typical of each, against all records.

A word's score is p log(p / q): p the share of the cluster's records that hold it, q the share of
all (its part of the Kullback-Leibler divergence). Words of more than a fifth of the records
name no cluster. Words are of letters only, from a bounded sample of records and of each text.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable

import numpy as np

MAX_RECORDS = 20_000
_MAX_CHARS = 20_000
_MAX_SHARE = 0.2
_WORD = re.compile(r"[^\W\d_]{3,24}")


def sample_records(num_records: int) -> np.ndarray:
    """At most `MAX_RECORDS` record numbers, evenly spaced, ascending."""
    return np.unique(np.linspace(0, num_records - 1, min(num_records, MAX_RECORDS)).astype(int))


def typical_terms(
    texts: Iterable[str], labels: np.ndarray, num_clusters: int, num_terms: int = 4
) -> list[list[str]]:
    """The most typical words of each cluster, best first; fewer where a cluster has few words.

    Args:
        texts: Sampled texts.
        labels: Cluster of each.
        num_clusters: K.
        num_terms: Most words per cluster.
    """
    counts: list[Counter[str]] = [Counter() for _ in range(num_clusters)]
    for text, label in zip(texts, labels.tolist()):
        counts[label].update(set(_WORD.findall(text[:_MAX_CHARS].lower())))
    everywhere: Counter[str] = Counter()
    for words in counts:
        everywhere.update(words)
    sizes = np.bincount(labels, minlength=num_clusters).tolist()
    return [
        _best(words, size, everywhere, len(labels), num_terms) for words, size in zip(counts, sizes)
    ]


def _best(
    words: Counter[str], size: int, everywhere: Counter[str], num_records: int, num_terms: int
) -> list[str]:
    scores = {
        word: count / size * math.log(count / size * num_records / everywhere[word])
        for word, count in words.items()
        if everywhere[word] <= max(_MAX_SHARE * num_records, size)
    }
    ranked = sorted(scores, key=lambda word: (-scores[word], word))
    chosen: list[str] = []
    for word in ranked[: 10 * num_terms]:
        # "returns" adds no meaning to "return".
        if not any(word[:5] == other[:5] for other in chosen):
            chosen.append(word)
    return chosen[:num_terms]
