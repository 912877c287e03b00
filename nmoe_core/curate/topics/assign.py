"""Topics of documents: a topic model is fitted once on a sample and then assigns a topic to every
document.

`fit_topic_model` embeds a deterministic sample, clusters it and freezes the centroids;
`assign_topics` assigns a topic to each document of one shard. Both take the backbone's table as an
argument, so many shards share one copy. If the fingerprints are unchanged, neither function reads
documents.
"""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np

from loader.files.format import Manifest, load_manifest, read_json_object
from nmoe_core.base.atomic import (
    atomic_file,
    fsync_dir,
    output_lock,
    replacing,
    save_array,
    write_json,
    writing_if,
)
from nmoe_core.base.bucket.ahead import fetched_ahead
from nmoe_core.base.bucket.paths import shown
from nmoe_core.base.errors import CurationError
from nmoe_core.base.fingerprint import (
    Fingerprints,
    is_current,
    seal_summary,
    sha256_file,
    sha256_json,
)
from nmoe_core.base.result import Result
from nmoe_core.config.tree import ShardPaths, Tree
from nmoe_core.curate.even_spacing import PLASTIC
from nmoe_core.curate.topics import ASSIGN_CODE, MODEL_FORMAT
from nmoe_core.curate.topics.embed import EmbeddingTable
from nmoe_core.curate.topics.model import (
    MAX_TOPICS,
    TopicModel,
    fit_centroids,
    load_topic_model,
    nearest_topics,
    save_tensors,
)
from nmoe_core.curate.topics.states import DOCUMENTS as STATE_DOCUMENTS
from nmoe_core.curate.topics.states import StateTable
from nmoe_core.curate.topics.terms import DOCUMENTS, METHOD, TOKENS, fit_terms, term_table
from nmoe_core.shards.documents import ShardFile, open_entry, require_undamaged, shard_files
from nmoe_core.shards.manifest import documents_digest

SUMMARY_NAME = "summary.json"
Table = EmbeddingTable | StateTable


@dataclass(frozen=True, slots=True)
class TopicSettings:
    """Settings of topics: their number, the seed of sampling and k-means, and the sample size.
    Raises CurationError if a number is out of range (E-CURATION-TOPICS)."""

    num_topics: int = 30
    seed: int = 42
    sample_documents: int = 65_536

    def __post_init__(self) -> None:
        if not 2 <= self.num_topics <= MAX_TOPICS or self.sample_documents < self.num_topics:
            raise CurationError(
                "the settings of the topic model are out of range",
                found=f"num_topics {self.num_topics}, sample_documents {self.sample_documents}",
                expected=f"num_topics from 2 to {MAX_TOPICS}, sample_documents at least num_topics",
                code="E-CURATION-TOPICS",
            )


def fit_topic_model(
    tree: Tree, sources: Iterable[str], table: Table, settings: TopicSettings
) -> Result:
    """Cluster a sample of the training documents; write `tree.topic_model`.

    Memory: twice `sample_documents` float32 rows of the table's width. A table of terms is fitted
    first, and stored with the centroids. Each source is sampled in
    proportion to its number of documents. If all sources together have at most `sample_documents`
    documents, all documents are used. Raises CurationError if there are fewer documents with text
    than topics (E-CURATION-TOPICS), or if an embedding is not finite (E-CURATION-EMBEDDING).
    """
    sources = sorted(sources)
    manifests = [load_manifest(tree.manifest(name)) for name in sources]
    fingerprints = topic_fingerprints(tree, sources, table, settings)
    path = tree.topic_model
    with replacing(path):
        changed = not path.exists() or load_topic_model(path).header["fingerprints"] != fingerprints
        if changed:
            tensors: dict[str, np.ndarray] = {}
            chosen: dict[str, object] = {}
            num_documents = sum(manifest.total_documents for manifest in manifests)
            _require_enough(num_documents, settings, sources)
            vocab_size = max(manifest.vocab_size for manifest in manifests)
            if table.method == METHOD:
                tensors["terms"] = _fit_terms(tree, manifests, settings.seed)
                fitted = term_table(tensors["terms"], vocab_size)
                table = EmbeddingTable.of_terms(lambda: fitted)
            elif isinstance(table, StateTable):
                sampled = partial(_some, tree, manifests, settings)
                silhouettes = table.fit(sampled, settings.num_topics, settings.seed)
                chosen = {"block": table.fitted.block, "silhouettes": silhouettes}
                tensors["standard"] = table.fitted.standard
            rows = _sample(tree, manifests, table, settings)
            _require_enough(len(rows), settings, sources)
            centroids = fit_centroids(rows, settings.num_topics, settings.seed)
            counts = _count(nearest_topics(rows, centroids), settings.num_topics)
            header = {
                "format": MODEL_FORMAT,
                "seed": settings.seed,
                "embedding": table.method,
                "backbone": table.backbone,
                "vocab_size": vocab_size,
                "sources": sources,
                "num_documents": num_documents,
                "fingerprints": fingerprints,
                "num_sampled": len(rows),
                "count_per_topic": counts,
                **chosen,
            }
            save_tensors(path, {"centroids": centroids, **tensors}, header)
        model = load_topic_model(path)
    counts = model.header["count_per_topic"]
    facts = {
        "topics": settings.num_topics,
        "documents_sampled": model.header["num_sampled"],
        "smallest_topic": min(counts),
        "largest_topic": max(counts),
        **model.choice,
        "changed": changed,
        "path": shown(path),
    }
    return Result(model.digest, facts)


def topic_fingerprints(
    tree: Tree, sources: Iterable[str], table: Table, settings: TopicSettings
) -> Fingerprints:
    """Fingerprints of the topic model of these sources."""
    manifests = {name: load_manifest(tree.manifest(name)) for name in sorted(sources)}
    documents = [[name, documents_digest(manifest)] for name, manifest in manifests.items()]
    return {
        "format": MODEL_FORMAT,
        "embedding": table.method,
        "backbone": table.backbone,
        **table.made_with,
        "documents": sha256_json(documents),
        **{name: str(value) for name, value in asdict(settings).items()},
    }


def assign_fingerprints(documents: str, model_digest: str) -> Fingerprints:
    """Fingerprints of the topics of a shard, from the digest of its documents."""
    return {"code": ASSIGN_CODE, "shard": documents, "topic_model": model_digest}


def assign_topics(shard: ShardPaths, table: Table, model: TopicModel) -> Result:
    """Assign topics to the documents of one shard; writes `topics.npy`, uint16 `[N]` in document
    order.

    Raises:
        CurationError: The model belongs to another backbone (E-CURATION-BACKBONE), or an
            embedding is not finite (E-CURATION-EMBEDDING).
        FormatError: The shard is missing or broken.
    """
    now = {"backbone": table.backbone, **table.made_with}
    differing = [key for key in now if model.header["fingerprints"].get(key) != now[key]]
    if differing:
        raise CurationError(
            "topic model was fitted on another backbone",
            where=f"{shard.source} {shard.name}",
            found=", ".join(f"{key} {now[key]}" for key in differing),
            expected=", ".join(str(model.header["fingerprints"].get(key)) for key in differing),
            do="fit the topic model again, or set [curation] topics_from and the backbone as then",
            code="E-CURATION-BACKBONE",
        )
    manifest = load_manifest(shard.manifest)
    fingerprints = assign_fingerprints(documents_digest(manifest), model.digest)
    summary_path = shard.with_topics / SUMMARY_NAME

    def is_stale() -> bool:
        return not is_current(summary_path, fingerprints) or not _is_whole(shard)

    with writing_if(is_stale, shard.with_topics, output_lock) as changed:
        if changed:
            require_undamaged(manifest)
            files = shard_files(shard.tree.data, manifest)
            blocks = (block for file in files for block in table.embed(file, file.spans))
            labels = [nearest_topics(block, model.centroids) for block in blocks]
            topics = np.concatenate([np.empty(0, np.uint16), *labels])
            # Remove the old summary first. Otherwise, after a kill, it would describe the new
            # topics.
            summary_path.unlink(missing_ok=True)
            fsync_dir(summary_path.parent)
            with atomic_file(shard.topics) as file:
                save_array(file, topics)
            summary = {
                "source": shard.source,
                "shard": shard.name,
                "num_documents": len(topics),
                "num_topics": len(model.centroids),
                "count_per_topic": _count(topics, len(model.centroids)),
                "topics_checksum": sha256_file(shard.topics),
                "fingerprints": fingerprints,
            }
            write_json(summary_path, seal_summary(summary))
        summary = read_json_object(summary_path)
    facts = {
        "documents": summary["num_documents"],
        "topics_used": sum(count > 0 for count in summary["count_per_topic"]),
        "changed": changed,
    }
    # Curated shards depend on the model too, even if a new model gives the same topics.
    return Result(sha256_json([summary["topics_checksum"], model.digest]), facts)


def sampled_documents(
    tree: Tree, manifests: list[Manifest], most: int, seed: int
) -> Iterator[tuple[ShardFile, np.ndarray]]:
    """Sample evenly spaced training documents: yield each file with the spans of its sampled
    documents, int64 `[n, 2]`."""
    total = sum(manifest.total_documents for manifest in manifests)
    chosen = np.arange(total)
    if total > most:
        # Every (total / most)-th document from a seeded start, so each source and shard is sampled
        # in proportion. Prep has already distributed documents over shards by hash.
        chosen = ((np.arange(most) + seed * PLASTIC % 1.0) * (total / most)).astype(np.int64)
    entries = [(manifest, entry) for manifest in manifests for entry in manifest.shards]
    first = 0
    with fetched_ahead(manifest.shard_path(entry) for manifest, entry in entries):
        for manifest, entry in entries:
            low, high = np.searchsorted(chosen, [first, first + entry.num_documents])
            if high > low:
                file = open_entry(tree.data, manifest, entry)
                yield file, file.spans[chosen[low:high] - first]
            first += entry.num_documents


def _fit_terms(tree: Tree, manifests: list[Manifest], seed: int) -> np.ndarray:
    texts = [
        file.tokens[start : min(end - 1, start + TOKENS)].astype(np.int64)
        for file, spans in sampled_documents(tree, manifests, DOCUMENTS, seed)
        for start, end in spans.tolist()
    ]
    return fit_terms(texts, seed)


def _sample(
    tree: Tree, manifests: list[Manifest], table: Table, settings: TopicSettings
) -> np.ndarray:
    """Embeddings of sampled documents that have text: float32 `[at most sample_documents, D]`."""
    most = STATE_DOCUMENTS if isinstance(table, StateTable) else settings.sample_documents
    sample = _some(tree, manifests, settings, most)
    rows = np.concatenate([block for file, spans in sample for block in table.embed(file, spans)])
    return rows[rows.any(axis=1)]


def _some(
    tree: Tree, manifests: list[Manifest], settings: TopicSettings, most: int
) -> Iterator[tuple[ShardFile, np.ndarray]]:
    """At most so many documents of the sample."""
    most = min(most, settings.sample_documents)
    return sampled_documents(tree, manifests, most, settings.seed)


def _require_enough(num_documents: int, settings: TopicSettings, sources: list[str]) -> None:
    if num_documents < settings.num_topics:
        raise CurationError(
            "fewer documents with text than topics",
            where=", ".join(sources),
            found=f"{num_documents} documents",
            expected=f"at least {settings.num_topics}",
            do="lower [curation] num_topics, or add documents and run prep",
            code="E-CURATION-TOPICS",
        )


def _is_whole(shard: ShardPaths) -> bool:
    checksum = read_json_object(shard.with_topics / SUMMARY_NAME)["topics_checksum"]
    return shard.topics.is_file() and sha256_file(shard.topics) == checksum


def _count(topics: np.ndarray, num_topics: int) -> list[int]:
    return np.bincount(topics, minlength=num_topics).tolist()
