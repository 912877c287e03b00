"""Curate a JSONL file from end to end: what `nmoe curate` does.

Outputs, each committed whole and the metadata last: the reordered file, embeddings, token counts,
labels, order, clusters, pictures. A run after a kill embeds again only the last block. With
`stats_only` no file is written.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np

from nmoe_core.base.atomic import write_bytes, write_json
from nmoe_core.curate.jsonl.compute import (
    Curated,
    JsonlSettings,
    curate_jsonl,
    embed_jsonl,
    open_jsonl,
)
from nmoe_core.curate.jsonl.meta import meta
from nmoe_core.curate.jsonl.output import (
    CALIBRATION_NAME,
    CLOUD_NAME,
    HEAD_TAIL_NAME,
    ORDERING_NAME,
    SHARES_NAME,
    JsonlPaths,
    lock_outputs,
    write_array,
    write_records,
    write_set_aside,
)
from nmoe_core.curate.jsonl.record_embeddings import Progress, silent
from nmoe_core.curate.topics.calibrate_k import Calibration, calibrate_k
from nmoe_core.curate.topics.clusters import fit_pca, project, save_clusters

CALIBRATION_ENDING = "_calibrate_k.json"


def curate_file(
    paths: JsonlPaths,
    settings: JsonlSettings,
    *,
    stats_only: bool = False,
    plot: bool = True,
    progress: Progress = silent,
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
        embedded = embed_jsonl(paths, settings, opened, is_kept=not stats_only, progress=progress)
        curated = curate_jsonl(paths, embedded, settings)
        facts = meta(paths, curated, settings)
        if not stats_only:
            _write(paths, curated)
            if plot:
                _draw(paths, curated, settings)
            write_json(paths.beside("_meta.json"), facts)
    return facts


def calibrate_file(
    paths: JsonlPaths, settings: JsonlSettings, *, plot: bool = True, progress: Progress = silent
) -> Calibration:
    """Sweep the number of clusters for `paths.input`; the reordered file is not written.

    Raises:
        As `curate_file`; CurationError where there are too few records (E-CURATION-TOPICS).
    """
    opened = open_jsonl(paths, settings)
    with lock_outputs(paths):
        embedded = embed_jsonl(paths, settings, opened, progress=progress)
        with_text = embedded.rows[embedded.rows.any(axis=1)]
        mean, axes, _ = fit_pca(with_text, settings.pca_components, settings.seed)
        rows = project(embedded.rows, mean, axes)
        found = calibrate_k(rows, embedded.lengths, settings.seq_len, settings.seed)
        if plot:
            from nmoe_core.plots import k_plot

            write_bytes(paths.output.with_name(CALIBRATION_NAME), k_plot(found.to_json()))
        write_json(paths.beside(CALIBRATION_ENDING), found.to_json())
    return found


def _write(paths: JsonlPaths, curated: Curated) -> None:
    embedded = curated.embedded
    # The old metadata goes first: it must not vouch for new files after a kill.
    paths.beside("_meta.json").unlink(missing_ok=True)
    save_clusters(paths.beside("_clusters.safetensors"), curated.clusters)
    if paths.embeddings is None:  # loaded ones lie where they are
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
    from nmoe_core.plots import cloud_plot

    labels, lengths = curated.labels.astype(np.int64), curated.embedded.lengths
    orders = {
        "original": np.arange(len(labels)),
        "shuffle": arrange("shuffle", labels, lengths, seed=settings.seed),
        curated.order_name: curated.order,
    }
    points, method = flat_projection(curated.rows, settings.seed)
    write_array(paths.beside(f"_{method}2d.npy"), points)
    pngs = order_pictures(labels, lengths, orders, settings.seq_len, curated.terms)
    names = ORDERING_NAME, SHARES_NAME, HEAD_TAIL_NAME
    cloud = cloud_plot(points, labels, curated.terms, method)
    for name, png in zip((*names, CLOUD_NAME), (*pngs.values(), cloud)):
        write_bytes(paths.output.with_name(name), png)
