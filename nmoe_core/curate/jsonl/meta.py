"""`*_meta.json` of a curated JSONL file: every key of the published tool, and our own after them.

`token_window_diversity` is the published metric (windows are closed when a record does not fit)
rounded as published; `diversity` holds the full figures for both fillings of windows, always beside
the original order and a shuffle.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from nmoe_core.curate.diversity.measure import window_topics
from nmoe_core.curate.jsonl.compute import Curated, JsonlSettings
from nmoe_core.curate.jsonl.output import JsonlPaths
from nmoe_core.curate.topics.model import sample_rows

SIMILARITY_ROWS = 5_000
HIGH_SIMILARITY = 0.9
_PUBLISHED_NAMES = {"stratified": "stratified_greedy"}


def meta(paths: JsonlPaths, curated: Curated, settings: JsonlSettings) -> dict[str, Any]:
    """Everything that is known about a curated file, ready for JSON."""
    embedded, clusters = curated.embedded, curated.clusters
    records, lengths = embedded.records, embedded.lengths
    sizes = np.bincount(curated.labels, minlength=settings.n_clusters)
    pca = {
        "n_components": len(clusters.axes),
        "explained_variance": clusters.header["explained_variance"],
        "original_dim": embedded.rows.shape[1],
    }
    published = {
        "input": str(paths.input),
        "output": str(paths.output),
        "input_count": len(records),
        "final_count": len(curated.order),
        "n_clusters": settings.n_clusters,
        "ordering": _PUBLISHED_NAMES.get(curated.order_name, curated.order_name),
        "sequence_length": settings.seq_len,
        "total_tokens": int(embedded.tokens.sum()),
        "n_training_sequences": -(-int(lengths.sum()) // settings.seq_len),
        "embedding_method": embedded.method,
        "load_embeddings_path": str(paths.embeddings) if paths.embeddings else None,
        "pca": pca if len(clusters.axes) else None,
        "token_window_diversity": {
            "original": _published(curated.labels, lengths, settings.seq_len),
            "curated": _published(
                curated.labels[curated.order], lengths[curated.order], settings.seq_len
            ),
        },
        "similarity_stats": similarity_stats(curated.rows, settings.seed),
        "cluster_sizes": {str(k): int(sizes[k]) for k in np.argsort(-sizes, kind="stable")},
    }
    return published | {
        "cluster_terms": {str(k): words for k, words in enumerate(curated.terms)},
        "diversity": curated.metrics,
        "clusters": {
            "version": clusters.header["version"],
            "fitted_on": clusters.header["num_rows"],
            "is_refitted": curated.is_refitted,
            "share_tv": curated.drift.share_tv,
            "distance_ratio": curated.drift.distance_ratio,
        },
        "counts": {
            "embedded_now": embedded.num_computed,
            "blank_lines": records.num_blank,
            "empty_texts": records.num_empty,
            "set_aside": len(records.rejected),
            "not_finite_rows": embedded.num_nan,
            "eos_per_record": 1,
        },
        "input_sha256": records.sha256,
        "settings": asdict(settings),
    }


def similarity_stats(rows: np.ndarray, seed: int) -> dict[str, Any]:
    """Cosines of all pairs of a sample of rows that are not zero."""
    with_text = np.flatnonzero(rows.any(axis=1))
    sample = rows[with_text[sample_rows(len(with_text), SIMILARITY_ROWS, seed)]]
    cosines = (sample @ sample.T)[np.triu_indices(len(sample), 1)]
    is_any = len(cosines) > 0
    return {
        "mean": float(cosines.mean(dtype=np.float64)) if is_any else None,
        "std": float(cosines.std(dtype=np.float64)) if is_any else None,
        "median": float(np.median(cosines)) if is_any else None,
        "high_sim_pairs_gt_0.9": int((cosines > HIGH_SIMILARITY).sum()),
        "total_pairs_sampled": len(cosines),
    }


def _published(labels: np.ndarray, lengths: np.ndarray, seq_len: int) -> dict[str, Any]:
    counts = window_topics(labels, lengths, seq_len, "flush")
    return {
        "mean": round(float(counts.mean()), 2),
        "min": int(counts.min()),
        "max": int(counts.max()),
        "std": round(float(counts.std()), 2),
        "n_sequences": len(counts),
    }
