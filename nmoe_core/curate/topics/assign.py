"""Topics of documents: a model fitted once on a sample, then one label for each document.

`fit_topic_model` embeds a deterministic sample, clusters it and freezes the centroids;
`assign_topics` labels one shard. Both read the backbone's table through the object they are given,
so many shards share one copy, and read nothing when their fingerprints are unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from loader.files.format import MANIFEST_NAME, Manifest, load_manifest, read_json_object
from nmoe_core.base.atomic import atomic_file, fsync_dir, output_lock, write_json
from nmoe_core.base.errors import CurationError
from nmoe_core.base.fingerprint import is_current, seal_summary, sha256_file, sha256_json
from nmoe_core.base.locks import replacing
from nmoe_core.curate.order.spacing import PLASTIC
from nmoe_core.curate.topics.embed import EmbeddingTable, embed_documents
from nmoe_core.curate.topics.model import (
    MAX_TOPICS,
    MODEL_FORMAT,
    MODEL_NAME,
    TopicModel,
    fit_centroids,
    load_topic_model,
    nearest_topics,
    save_topic_model,
)
from nmoe_core.shards.documents import ShardFile, open_entry, shard_files, shard_manifest
from nmoe_core.shards.manifest import documents_digest, shard_dir_name

TOPICS_NAME = "topics.npy"
SUMMARY_NAME = "summary.json"
ASSIGN_CODE = "topics/1"
DEFAULT_NUM_TOPICS = 30
DEFAULT_SEED = 42
DEFAULT_SAMPLE_DOCUMENTS = 65_536


@dataclass(frozen=True, slots=True)
class FitReport:
    """The model under `path`; `is_current` when it was there already."""

    path: Path
    digest: str
    is_current: bool
    num_documents: int
    num_sampled: int
    count_per_topic: list[int]


@dataclass(frozen=True, slots=True)
class TopicsReport:
    """The labels of one shard; `is_current` when they were there already."""

    source: str
    bucket: int
    is_current: bool
    num_documents: int
    count_per_topic: list[int]


def fit_topic_model(
    data_root: Path,
    sources: list[str],
    table: EmbeddingTable,
    out_dir: Path,
    *,
    num_topics: int = DEFAULT_NUM_TOPICS,
    seed: int = DEFAULT_SEED,
    sample_documents: int = DEFAULT_SAMPLE_DOCUMENTS,
) -> FitReport:
    """Cluster a sample of the training documents; write `{out_dir}/topic_model.safetensors`.

    Memory: `sample_documents` float32 rows of the table's width, twice.

    Args:
        data_root: Holds `{source}/train/manifest.json`.
        sources: Sources to sample, each in proportion to its documents.
        table: The backbone's table.
        out_dir: Where the model goes.
        num_topics: Clusters.
        seed: Of the sample and of k-means.
        sample_documents: Most documents to cluster; all when there are fewer.

    Raises:
        CurationError: Fewer documents with text than topics, or a number out of range
            (E-CURATION-TOPICS); an embedding is not finite (E-CURATION-EMBEDDING).
    """
    _check_numbers(num_topics, sample_documents)
    sources = sorted(sources)
    manifests = [load_manifest(data_root / name / "train" / MANIFEST_NAME) for name in sources]
    fingerprints = {
        "format": MODEL_FORMAT,
        "embedding": table.method,
        "backbone": table.backbone,
        "documents": sha256_json([[s, documents_digest(m)] for s, m in zip(sources, manifests)]),
        "num_topics": str(num_topics),
        "seed": str(seed),
        "sample_documents": str(sample_documents),
    }
    path = out_dir / MODEL_NAME
    with replacing(path):
        unchanged = path.exists() and load_topic_model(path).header["fingerprints"] == fingerprints
        if not unchanged:
            rows = _sample(data_root, manifests, table, sample_documents, seed)
            _check_enough(len(rows), num_topics, sources)
            header = {
                "format": MODEL_FORMAT,
                "seed": seed,
                "embedding": table.method,
                "backbone": table.backbone,
                "sources": sources,
                "num_documents": sum(m.total_documents for m in manifests),
                "fingerprints": fingerprints,
            }
            _fit(path, rows, num_topics, header)
        model = load_topic_model(path)
    facts = {k: model.header[k] for k in ("num_documents", "num_sampled", "count_per_topic")}
    return FitReport(path=path, digest=model.digest, is_current=unchanged, **facts)


def assign_topics(
    data_root: Path,
    topics_root: Path,
    source: str,
    bucket: int,
    table: EmbeddingTable,
    model: TopicModel,
) -> TopicsReport:
    """Label the documents of one shard under `{topics_root}/{source}/shard_NNNN/`.

    Writes `topics.npy`, uint16 `[N]` in document order, then `summary.json`.

    Raises:
        CurationError: The model belongs to another backbone (E-CURATION-BACKBONE), or an
            embedding is not finite (E-CURATION-EMBEDDING).
        FormatError: The shard is missing or broken.
    """
    _check_backbone(table, model, f"{source} {shard_dir_name(bucket)}")
    manifest = shard_manifest(data_root, source, bucket)
    directory = topics_root / source / shard_dir_name(bucket)
    fingerprints = {
        "code": ASSIGN_CODE,
        "shard": documents_digest(manifest),
        "topic_model": model.digest,
    }
    summary_path = directory / SUMMARY_NAME
    with output_lock(directory):
        unchanged = is_current(summary_path, fingerprints) and _is_whole(summary_path)
        if not unchanged:
            labels = [np.empty(0, np.uint16), *_labels(data_root, manifest, table, model)]
            topics = np.concatenate(labels)
            _commit_topics(summary_path, topics)
            summary = {
                "source": source,
                "shard": shard_dir_name(bucket),
                "num_documents": len(topics),
                "num_topics": len(model.centroids),
                "count_per_topic": _count(topics, len(model.centroids)),
                "topics_checksum": sha256_file(directory / TOPICS_NAME),
                "fingerprints": fingerprints,
            }
            write_json(summary_path, seal_summary(summary))
        summary = read_json_object(summary_path)
    facts = {k: summary[k] for k in ("num_documents", "count_per_topic")}
    return TopicsReport(source=source, bucket=bucket, is_current=unchanged, **facts)


def sampled_documents(
    data_root: Path, manifests: list[Manifest], most: int, seed: int
) -> Iterator[tuple[ShardFile, np.ndarray]]:
    """Evenly spaced training documents: files that hold some, and their spans, int64 `[n, 2]`."""
    total = sum(manifest.total_documents for manifest in manifests)
    chosen = np.arange(total)
    if total > most:
        # Every total/most-th document from a seeded start: each source and shard in proportion,
        # read front to back. Prep has already dealt documents to shards by hash.
        chosen = ((np.arange(most) + seed * PLASTIC % 1.0) * (total / most)).astype(np.int64)
    first = 0
    for manifest in manifests:
        for entry in manifest.shards:
            low, high = np.searchsorted(chosen, [first, first + entry.num_documents])
            if high > low:
                file = open_entry(data_root, manifest, entry)
                yield file, file.spans[chosen[low:high] - first]
            first += entry.num_documents


def _sample(
    data_root: Path, manifests: list[Manifest], table: EmbeddingTable, most: int, seed: int
) -> np.ndarray:
    """Embeddings of sampled documents that have text: float32 `[at most `most`, D]`."""
    blocks = [np.empty((0, table.rows.shape[1]), np.float32)]
    for file, spans in sampled_documents(data_root, manifests, most, seed):
        blocks += embed_documents(file.tokens, spans, table)
    rows = np.concatenate(blocks)
    return rows[rows.any(axis=1)]


def _fit(path: Path, rows: np.ndarray, num_topics: int, header: dict[str, Any]) -> None:
    centroids = fit_centroids(rows, num_topics, header["seed"])
    counts = _count(nearest_topics(rows, centroids), num_topics)
    save_topic_model(
        path, centroids, header | {"num_sampled": len(rows), "count_per_topic": counts}
    )


def _labels(
    data_root: Path, manifest: Manifest, table: EmbeddingTable, model: TopicModel
) -> Iterator[np.ndarray]:
    for file in shard_files(data_root, manifest):
        for block in embed_documents(file.tokens, file.spans, table):
            yield nearest_topics(block, model.centroids)


def _is_whole(summary_path: Path) -> bool:
    topics = summary_path.with_name(TOPICS_NAME)
    checksum = read_json_object(summary_path)["topics_checksum"]
    return topics.is_file() and sha256_file(topics) == checksum


def _commit_topics(summary_path: Path, topics: np.ndarray) -> None:
    # The old summary goes first: were the run killed here, it would vouch for the new labels.
    summary_path.unlink(missing_ok=True)
    fsync_dir(summary_path.parent)
    with atomic_file(summary_path.with_name(TOPICS_NAME)) as file:
        np.save(file, topics)


def _count(topics: np.ndarray, num_topics: int) -> list[int]:
    return np.bincount(topics, minlength=num_topics).tolist()


def _check_numbers(num_topics: int, sample_documents: int) -> None:
    if not 2 <= num_topics <= MAX_TOPICS or sample_documents < num_topics:
        raise CurationError(
            "a topic model cannot have these numbers",
            found=f"num_topics {num_topics}, sample_documents {sample_documents}",
            expected=f"2 to {MAX_TOPICS} topics, and at least as many sampled documents",
            code="E-CURATION-TOPICS",
        )


def _check_enough(num_documents: int, num_topics: int, sources: list[str]) -> None:
    if num_documents < num_topics:
        raise CurationError(
            "fewer documents with text than topics",
            where=", ".join(sources),
            found=f"{num_documents} documents",
            expected=f"at least {num_topics}",
            do="lower num_topics, or prepare more documents",
            code="E-CURATION-TOPICS",
        )


def _check_backbone(table: EmbeddingTable, model: TopicModel, where: str) -> None:
    if table.backbone != model.header["backbone"]:
        raise CurationError(
            "topic model was fitted on another backbone",
            where=where,
            found=table.backbone,
            expected=model.header["backbone"],
            do="fit the topic model again, or use its backbone",
            code="E-CURATION-BACKBONE",
        )
