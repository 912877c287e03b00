"""Stages of curation: topics, curated shards, their manifest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from nmoe_core.config import Run
from nmoe_core.fingerprint import sha256_file
from nmoe_core.shards.manifest import shard_dir_name
from nmoe_core.stages.result import Output

if TYPE_CHECKING:
    from nmoe_core.curate.embed import EmbeddingTable


def fit_topics(run: Run, sources: Sequence[str]) -> Output:
    """Fit the topic model over all sources; a current one is left alone."""
    from nmoe_core.curate.topics import fit_topic_model

    table = run.config.curation
    report = fit_topic_model(
        run.paths.data,
        list(sources),
        _table(run),
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
    return Output(report.digest, facts)


def assign_shard_topics(run: Run, source: str, buckets: Iterable[int]) -> dict[int, Output]:
    """Label the documents of shards with their topics; current ones are left alone."""
    from nmoe_core.curate.topic_model import load_topic_model
    from nmoe_core.curate.topics import MODEL_NAME, TOPICS_NAME, assign_topics

    table, model = _table(run), load_topic_model(run.paths.topics / MODEL_NAME)
    outputs = {}
    for bucket in buckets:
        report = assign_topics(run.paths.data, run.paths.topics, source, bucket, table, model)
        path = run.paths.topics / source / shard_dir_name(bucket) / TOPICS_NAME
        facts = {
            "documents": report.num_documents,
            "topics_used": sum(count > 0 for count in report.count_per_topic),
        }
        outputs[bucket] = Output(sha256_file(path), facts)
    return outputs


def curate_shards(run: Run, source: str, buckets: Iterable[int]) -> dict[int, Output]:
    """Filter and order the documents of shards; current ones are left alone."""
    from nmoe_core.curate.curated import CurateSettings, curate_shard

    paths, table = run.paths, run.config.curation
    settings = CurateSettings(
        include=table.include,
        order=table.order,
        seed=run.config.seed,
        seq_len=run.config.seq_len,
        tokens_per_shard=run.config.prep.tokens_per_shard,
    )
    outputs = {}
    for bucket in buckets:
        report = curate_shard(
            paths.data, paths.curated, paths.quality, paths.topics, source, bucket, settings
        )
        facts = {
            "documents": report.num_kept,
            "documents_read": report.num_documents,
            "tokens": report.num_kept_tokens,
            "changed": not report.is_current,
        }
        picture = _order_picture(run, source, [bucket])
        outputs[bucket] = Output(report.content_hash, facts, picture)
    return outputs


def combine(run: Run, source: str) -> Output:
    """Write the curated manifest of a source, with the window diversity of all its shards."""
    from nmoe_core.curate.combine import combine_curated

    num_shards = run.config.prep.num_shards
    report = combine_curated(
        run.paths.data, run.paths.curated, source, num_shards, run.config.seq_len
    )
    windows = report.diversity["concat"]
    facts = {
        "documents": report.num_documents,
        "tokens": report.num_tokens,
        "changed": not report.is_current,
        "path": str(report.path),
    }
    for when in ("before", "after"):
        if windows[when] is not None:
            facts[f"window_topics_{when}"] = windows[when]["mean"]
            facts[f"percent_of_ceiling_{when}"] = windows[when]["percent_of_ceiling"]
    return Output(report.content_hash, facts, _order_picture(run, source, range(num_shards)))


def _order_picture(run: Run, source: str, buckets: Iterable[int]) -> str:
    from nmoe_core.curate.lineage import arranged_documents
    from nmoe_core.plots import curated_plot, png_markdown

    documents = arranged_documents(run.paths.curated, source, buckets)
    return png_markdown(curated_plot(documents, run.config.seq_len), f"{source}: order")


def _table(run: Run) -> EmbeddingTable:
    from nmoe_core.curate.embed import EmbeddingTable

    return EmbeddingTable.open(run.paths.checkpoint)
