"""Stages of curation: topics, curated shards and their manifest."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nmoe_core.base.fingerprint import sha256_file
from nmoe_core.base.result import Result
from nmoe_core.config.run import Run
from nmoe_core.shards.manifest import shard_dir_name
from nmoe_core.sources.digests import Identity, file_identity
from nmoe_core.tasks.curate_pictures import order_picture, order_pictures, topic_pictures

if TYPE_CHECKING:
    from nmoe_core.curate.shards.planning import CurateSettings
    from nmoe_core.curate.topics.embed import EmbeddingTable


def fit_topics(run: Run, sources: Sequence[str]) -> Result:
    """Fit the topic model over all sources; a current one is left alone.

    One that an order depends on (stability other than `replan`) is kept although documents came.
    """
    from nmoe_core.curate.topics.assign import MODEL_NAME, fit_topic_model
    from nmoe_core.curate.topics.model import load_topic_model

    table, path = run.config.curation, run.paths.topics / MODEL_NAME
    if table.stability != "replan" and path.is_file():
        # New topics would move old documents: an order that keeps its past keeps its model.
        model = load_topic_model(path)
        facts = {"topics": len(model.centroids), "path": str(path)}
        return Result(
            model.digest, facts, topic_pictures(run, sources, _table(run), model, _window(run))
        )
    embeddings = _table(run)
    report = fit_topic_model(
        run.paths.data,
        list(sources),
        embeddings,
        run.paths.topics,
        num_topics=table.num_topics,
        seed=run.config.seed,
        sample_documents=table.sample_documents,
    )
    facts = {
        "topics": table.num_topics,
        "documents_sampled": report.num_sampled,
        "smallest_topic": min(report.count_per_topic),
        "largest_topic": max(report.count_per_topic),
        "path": str(report.path),
    }
    model = load_topic_model(report.path)
    pictures = topic_pictures(run, sources, embeddings, model, _window(run))
    return Result(report.digest, facts, pictures)


def open_topics(run: Run, sources: Sequence[str], *, refit: bool = False) -> Result:
    """The topic model that is there; fitted over all sources where there is none, or on request."""
    from nmoe_core.curate.topics.assign import MODEL_NAME
    from nmoe_core.curate.topics.model import load_topic_model

    path = run.paths.topics / MODEL_NAME
    if refit or not path.is_file():
        return fit_topics(run, sources)
    model = load_topic_model(path)
    return Result(model.digest, {"topics": len(model.centroids), "path": str(path)})


def assign_shard_topics(run: Run, source: str, buckets: Iterable[int]) -> dict[int, Result]:
    """Label the documents of shards with their topics; current ones are left alone."""
    from nmoe_core.curate.topics.assign import MODEL_NAME, TOPICS_NAME, assign_topics
    from nmoe_core.curate.topics.model import load_topic_model

    table, model = _table(run), load_topic_model(run.paths.topics / MODEL_NAME)
    outputs = {}
    for bucket in buckets:
        report = assign_topics(run.paths.data, run.paths.topics, source, bucket, table, model)
        path = run.paths.topics / source / shard_dir_name(bucket) / TOPICS_NAME
        facts = {
            "documents": report.num_documents,
            "topics_used": sum(count > 0 for count in report.count_per_topic),
        }
        outputs[bucket] = Result(sha256_file(path), facts)
    return outputs


def curate_shards(run: Run, source: str, buckets: Iterable[int]) -> dict[int, Result]:
    """Filter and order the documents of shards; current ones are left alone."""
    from nmoe_core.curate.shards.curated import curate_shard

    paths, settings = run.paths, curate_settings(run, source)
    outputs = {}
    for bucket in sorted(buckets):
        report = curate_shard(
            paths.data, paths.curated, paths.quality, paths.topics, source, bucket, settings
        )
        facts = {
            "documents": report.num_kept,
            "documents_read": report.num_documents,
            **{f"decided_{name}": count for name, count in report.decisions.items()},
            "tokens": report.num_kept_tokens,
            "order_taken": report.order,
            "changed": not report.is_current,
            **_composition(report.diversity, settings.loader),
        }
        if settings.resume_from_token is not None:
            facts["documents_frozen"] = report.num_frozen
            facts["documents_deferred"] = report.num_deferred
        picture = order_picture(run, source, bucket, settings.seq_len)
        outputs[bucket] = Result(report.content_hash, facts, picture)
    return outputs


def combine(run: Run, source: str) -> Result:
    """Write the curated manifest of a source, with the window diversity of all its shards."""
    from nmoe_core.curate.shards.combine import combine_curated

    num_shards, settings = run.config.prep.num_shards, curate_settings(run, source)
    report = combine_curated(
        run.paths.data, run.paths.curated, source, num_shards, settings.seq_len
    )
    facts = {
        "documents": report.num_documents,
        "tokens": report.num_tokens,
        "orders_taken": ", ".join(f"{name} ({count})" for name, count in report.orders.items()),
        "misaligned_shards": report.num_misaligned,
        "changed": not report.is_current,
        "path": str(report.path),
        **_composition(report.diversity, settings.loader),
    }
    if settings.resume_from_token is not None:
        facts["documents_deferred"] = report.num_deferred
    pictures = order_pictures(run, source, range(num_shards), settings.seq_len)
    return Result(report.content_hash, facts, pictures)


def curate_settings(run: Run, source: str) -> CurateSettings:
    """What the run's `[curation]` asks for; windows are those its loader reads by default."""
    from nmoe_core.curate.shards.planning import CurateSettings

    config, table = run.config, run.config.curation
    insert_only, resumes = (table.stability == name for name in ("insert_only", "resume"))
    return CurateSettings(
        include=table.include,
        order="insert_only" if insert_only else table.order,
        seed=config.seed,
        epoch=table.epoch,
        seq_len=_window(run),
        loader=table.loader,
        by=table.by,
        descending=table.descending,
        resume_from_token=table.resume_from_token.get(source, 0) if resumes else None,
        tokens_per_shard=config.prep.tokens_per_shard,
    )


def _window(run: Run) -> int:
    config = run.config
    stride = config.seq_len + (config.window_stride == "seq_len+1")
    return config.curation.seq_len or stride


def _composition(diversity: Mapping[str, Any], loader: str) -> dict[str, Any]:
    """The figures people look at, of the order beside the source order and a shuffle."""
    windows = diversity[loader]
    facts: dict[str, Any] = {}
    for when in ("before", "after", "shuffle"):
        if windows[when] is not None:
            facts[f"window_topics_{when}"] = windows[when]["mean"]
            facts[f"percent_of_ceiling_{when}"] = windows[when]["percent_of_ceiling"]
            facts[f"wrap_tv_8_{when}"] = windows[when]["wrap_tv_8"]
    names = ("min_full", "last", "std", "kl_mean", "discrepancy_max", "padding", "cut_documents")
    return facts | {name: windows["after"][name] for name in names if windows["after"]}


def _table(run: Run) -> EmbeddingTable:
    """The run's embedding table, opened once in a process while its files are untouched."""
    from nmoe_core.curate.topics.embed import EmbeddingTable
    from nmoe_core.engine.weights.checkpoint import checkpoint_files

    path = run.paths.checkpoint
    identities = [file_identity(file) for file in checkpoint_files(path)]
    known = tuple(identity for identity in identities if identity is not None)
    return EmbeddingTable.open(path) if len(known) < len(identities) else _opened(path, known)


@functools.lru_cache(maxsize=1)
def _opened(path: Path, identities: tuple[Identity, ...]) -> EmbeddingTable:
    from nmoe_core.curate.topics.embed import EmbeddingTable

    return EmbeddingTable.open(path)
