"""Curate a JSONL file from end to end, as `nmoe curate` does.

Outputs: the reordered file, embeddings, token counts, labels, order, clusters, pictures. Each file
is written atomically, the metadata last. If a run is killed, the next run embeds only the last
block again. `stats_only` writes no files. `*_meta.json` has all keys of the published tool, and
further keys of this project.
"""

from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import numpy as np

from nmoe_core.base.atomic import write_bytes, write_json
from nmoe_core.curate.diversity.calibrate_k import Calibration, calibrate_k
from nmoe_core.curate.diversity.measure import window_topics
from nmoe_core.curate.jsonl.compute import (
    Curated,
    JsonlSettings,
    curate_jsonl,
    embed_jsonl,
    open_jsonl,
)
from nmoe_core.curate.jsonl.record_files import (
    JsonlPaths,
    lock_outputs,
    write_array,
    write_records,
    write_set_aside,
)
from nmoe_core.curate.topics.clusters import fit_pca, project, save_clusters
from nmoe_core.curate.topics.model import sample_rows

_SIMILARITY_ROWS = 5_000
_HIGH_SIMILARITY = 0.9


def curate_file(
    paths: JsonlPaths, settings: JsonlSettings, *, stats_only: bool = False, plot: bool = True
) -> dict[str, Any]:
    """Curate `paths.input` into `paths.output`; return the metadata.

    Raises:
        CurationError, TokenizerError, CheckpointError: As `open_jsonl`, `embed_jsonl`,
            `curate_jsonl` and `write_records`.
        LockedError: Another process is curating the same output (E-LOCKED).
    """
    if not stats_only:
        paths.require_counts()
    opened = open_jsonl(paths, settings)
    with nullcontext() if stats_only else lock_outputs(paths):
        embedded = embed_jsonl(paths, settings, opened, is_kept=not stats_only)
        curated = curate_jsonl(paths, embedded, settings)
        facts = _meta(paths, curated, settings)
        if not stats_only:
            _write(paths, curated)
            if plot:
                _draw(paths, curated, settings)
            write_json(paths.beside("_meta.json"), facts)
    # Only the returned facts say how much work this run did: the bytes of the file must not depend
    # on the number of runs.
    return facts | {"embedded_now": embedded.num_computed, "is_refitted": curated.is_refitted}


def calibrate_file(paths: JsonlPaths, settings: JsonlSettings, *, plot: bool = True) -> Calibration:
    """Measure several numbers of clusters k for `paths.input`; the reordered file is not written.

    Raises:
        As `curate_file`; CurationError if there are too few records (E-CURATION-TOPICS).
    """
    opened = open_jsonl(paths, settings)
    with lock_outputs(paths):
        embedded = embed_jsonl(paths, settings, opened)
        with_text = embedded.rows[embedded.rows.any(axis=1)]
        mean, axes, _ = fit_pca(with_text, settings.pca_components, settings.seed)
        rows = project(embedded.rows, mean, axes)
        found = calibrate_k(rows, embedded.lengths, settings.seq_len, settings.seed)
        if plot:
            from nmoe_core.report.plots import k_plot

            write_bytes(paths.picture("k"), k_plot(asdict(found)))
        write_json(paths.beside("_calibrate_k.json"), asdict(found))
    return found


def _write(paths: JsonlPaths, curated: Curated) -> None:
    embedded = curated.embedded
    # Remove the old metadata first: after a kill it must not describe new files.
    paths.beside("_meta.json").unlink(missing_ok=True)
    save_clusters(paths.beside("_clusters.safetensors"), curated.clusters)
    if paths.embeddings is None:  # loaded embeddings have a file already
        write_array(paths.beside("_embeddings.npy"), embedded.rows)
    write_array(paths.token_counts, embedded.tokens)
    write_array(paths.beside("_labels.npy"), curated.labels)
    write_array(paths.beside("_order.npy"), curated.order)
    write_set_aside(paths.beside("_set_aside.jsonl"), embedded.records)
    write_records(paths.output, embedded.records, curated.order)


def _draw(paths: JsonlPaths, curated: Curated, settings: JsonlSettings) -> None:
    from nmoe_core.curate.order import arrange
    from nmoe_core.curate.pictures import order_pictures
    from nmoe_core.curate.topics.clusters import flat_projection
    from nmoe_core.report.plots import cloud_plot

    labels = curated.labels.astype(np.int64)
    lengths = curated.embedded.lengths
    orders = {
        "original": np.arange(len(labels)),
        "shuffle": arrange("shuffle", labels, lengths),  # the same shuffle as in the metrics
        curated.order_name: curated.order,
    }
    points, method = flat_projection(curated.rows, settings.seed)
    write_array(paths.beside(f"_{method}2d.npy"), points)
    pngs = order_pictures(labels, lengths, orders, settings.seq_len, curated.terms)
    pngs["cloud"] = cloud_plot(points, labels, curated.terms, method)
    for what, png in pngs.items():
        write_bytes(paths.picture(what), png)


def _meta(paths: JsonlPaths, curated: Curated, settings: JsonlSettings) -> dict[str, Any]:
    """All metadata of a curated file, as JSON values."""
    embedded = curated.embedded
    clusters = curated.clusters
    name = curated.order_name
    records = embedded.records
    lengths = embedded.lengths
    order = curated.order
    sizes = np.bincount(curated.labels, minlength=settings.n_clusters)
    pca = {
        "n_components": len(clusters.axes),
        "explained_variance": clusters.header["explained_variance"],
        "original_dim": embedded.rows.shape[1],
    }
    # The published tool's keys; its windows are cut as with `flush`.
    published = {
        "input": str(paths.input),
        "output": str(paths.output),
        "input_count": len(records),
        "final_count": len(curated.order),
        "n_clusters": settings.n_clusters,
        "ordering": "stratified_greedy" if name == "stratified" else name,
        "sequence_length": settings.seq_len,
        "total_tokens": int(embedded.tokens.sum()),
        "n_training_sequences": -(-int(lengths.sum()) // settings.seq_len),
        "embedding_method": embedded.method,
        "load_embeddings_path": str(paths.embeddings) if paths.embeddings else None,
        "pca": pca if len(clusters.axes) else None,
        "token_window_diversity": {
            "original": _published(curated.labels, lengths, settings.seq_len),
            "curated": _published(curated.labels[order], lengths[order], settings.seq_len),
        },
        "similarity_stats": _similarity_stats(curated.rows, settings.seed),
        "cluster_sizes": {str(k): int(sizes[k]) for k in np.argsort(-sizes, kind="stable")},
    }
    return published | {
        "cluster_terms": {str(k): words for k, words in enumerate(curated.terms)},
        "diversity": curated.metrics,
        "clusters": {
            "version": clusters.header["version"],
            "fitted_on": clusters.header["num_rows"],
            "share_tv": curated.drift.share_tv,
            "distance_ratio": curated.drift.distance_ratio,
        },
        "counts": {
            "blank_lines": records.num_blank,
            "empty_texts": records.num_empty,
            "set_aside": len(records.rejected),
            "not_finite_rows": embedded.num_nan,
            "eos_per_record": 1,
        },
        "input_sha256": records.sha256,
        "settings": asdict(settings),
    }


def _similarity_stats(rows: np.ndarray, seed: int) -> dict[str, Any]:
    """Cosine statistics over all pairs in a sample of the non-zero rows."""
    with_text = np.flatnonzero(rows.any(axis=1))
    sample = rows[with_text[sample_rows(len(with_text), _SIMILARITY_ROWS, seed)]]
    cosines = (sample @ sample.T)[np.triu_indices(len(sample), 1)]
    figures = {"mean": np.mean, "std": np.std, "median": np.median}
    wide = cosines.astype(np.float64)
    return {
        **{name: float(of(wide)) if len(wide) else None for name, of in figures.items()},
        "high_sim_pairs_gt_0.9": int((cosines > _HIGH_SIMILARITY).sum()),
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
