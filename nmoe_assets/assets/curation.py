"""Assets of curation: topics, curated shards and manifest, loader plan and published plan."""

from dataclasses import replace

import dagster as dg

from nmoe_assets.assets.asset import Asset, Deps
from nmoe_assets.assets.attributes import (
    attribute_keys,
    bucket_keys,
    copies_keys,
    selection_names,
    selections,
)
from nmoe_assets.assets.events import picture_link
from nmoe_assets.catalogue import BUCKET_ROWS, LINEAGE_ROWS, ORDER_FACTS, TOPIC_ROWS, curated_group
from nmoe_core.base.errors import one_line
from nmoe_core.base.result import Result
from nmoe_core.config.attributes import WITHOUT_COLUMNS
from nmoe_core.config.run import Run
from nmoe_core.curate.settings import curate_settings, spreads_copies
from nmoe_core.prep.mixture import SourcePlan
from nmoe_core.shards.publish.send import publish
from nmoe_core.tasks import checks, curate
from nmoe_core.tasks.graph import settings
from nmoe_core.tasks.takedown.left import require_none_left

GROUP = "curation"


def topic_model(run: Run, sources: list[SourcePlan]) -> dg.AssetsDefinition:
    """Frozen centroids of document embeddings over all sources."""
    names = [source.name for source in sources]
    backbone = [["hydra", "backbone"]] * run.config.curation.reads_backbone
    return Asset(
        run=run,
        key=[GROUP, "topic_model"],
        group=GROUP,
        stage="curate",
        kind="scikitlearn",
        description="Topics: centroids of documents, by k-means over their terms (tf-idf with a "
        "truncated SVD), mean-pooled rows of the backbone's embedding table, or its mean states. "
        "The model is frozen: a new model reorders all documents, so materialise it by hand.",
        code_version=settings.topic_model(run).version,
        deps=[*backbone, *([name, "manifest"] for name in names)],
        downstream=[[name, "topics"] for name in names],
        checks=("readable",),
        check=lambda: checks.check_topic_model(run),
    ).unpartitioned(lambda: curate.fit_topics(run, names), "topics_and_k")


def buckets(run: Run, sources: list[SourcePlan]) -> list[dg.AssetsDefinition]:
    """The definition of buckets, if the run has buckets."""
    names = [source.name for source in sources]
    if not run.config.mixture.buckets.by:
        return []
    asset = Asset(
        run=run,
        key=[GROUP, "buckets"],
        group=GROUP,
        stage="curate",
        kind="json",
        description="The buckets of each source, by "
        f"`{', '.join(run.config.mixture.buckets.by)}`: quantiles over the kept documents of all "
        "sources, and small buckets merged. The definition is kept until its settings change.",
        facts=("buckets_SOURCE", "changed"),
        code_version=settings.buckets(run).version,
        deps=[key for name in names for key in _bucketed_from(run, name)] + selections(run, names),
        downstream=[[name, "buckets"] for name in names],
    )
    return [asset.unpartitioned(lambda: curate.define_buckets(run, names))]


def _bucketed_from(run: Run, source: str) -> list[list[str]]:
    """The assets whose columns may make buckets of a source."""
    kinds = ("shards", "quality_scores", "topics")
    attributes = [key for key in attribute_keys(run, source) if key[-1] not in WITHOUT_COLUMNS]
    copies = copies_keys(run, source)
    return [*([source, kind] for kind in kinds), *attributes, *copies[1:]]


def source_buckets(run: Run, source: SourcePlan) -> list[dg.AssetsDefinition]:
    """The bucket of each document of a source, if the run has buckets."""
    name = source.name
    if not run.config.mixture.buckets.by:
        return []
    asset = Asset(
        run=run,
        key=[name, "buckets"],
        group=curated_group(name),
        stage="curate",
        kind="parquet",
        description="The bucket of each document, by the definition of all buckets.",
        facts=("changed",),
        code_version=settings.PUT_IN_BUCKETS.version,
        deps=[*_bucketed_from(run, name), [GROUP, "buckets"]],
        downstream=[[name, "curated"]],
        columns=BUCKET_ROWS,
        checks=("rows", "drift"),
        check=lambda made: checks.check_attribute(run, name, "buckets", map(int, made)),
    )
    return [asset.sharded("buckets", name)]


def topics(run: Run, source: SourcePlan) -> dg.AssetsDefinition:
    """Topic of every document of a source, one partition per shard."""
    name = source.name
    return Asset(
        run=run,
        key=[name, "topics"],
        group=curated_group(name),
        stage="curate",
        kind="numpy",
        description="Topic of each document: the nearest centroid of the topic model.",
        code_version=settings.TOPICS.version,
        deps=[[name, "shards"], [GROUP, "topic_model"]],
        downstream=[[name, "curated"], *bucket_keys(run, name)],
        columns=TOPIC_ROWS,
        checks=("topic_range",),
        check=lambda made: checks.check_topics(run, name, map(int, made)),
    ).sharded("topics", name)


def curated(run: Run, source: SourcePlan) -> dg.AssetsDefinition:
    """Kept documents of each shard in diversity order."""
    name = source.name
    table = run.config.curation
    return Asset(
        run=run,
        key=[name, "curated"],
        group=curated_group(name),
        stage="curate",
        kind="numpy",
        description=f"The documents {_rule(run, name)}, in training order ({table.order}). The "
        "file lineage.jsonl of a shard has these columns.",
        facts=ORDER_FACTS,
        code_version=settings.curated(run, name).version,
        deps=[*_curated_from(run, name), *(copies_keys(run, name) if spreads_copies(run) else [])],
        downstream=[[name, key] for key in ("curated_manifest", *seen_names(run))],
        columns=LINEAGE_ROWS,
        checks=("integrity",),
        check=lambda made: checks.check_curated_shards(run, name, map(int, made)),
    ).sharded("curate", name, lambda key, result: {"order": picture_link([name, "curated"], key)})


def _curated_from(run: Run, source: str) -> Deps:
    """The inputs of curated shards.

    A shard's offset, and the part that training has consumed, may depend on the documents that
    earlier shards keep. Then each shard depends on the inputs of all shards: Dagster's mapping from
    a partition to all earlier partitions would cost the square of their number.
    """
    kept_from = ["shards", "quality_scores", *selection_names(run, source)]
    table = curate_settings(run, source)
    if table.fills_windows() or table.resume_from_token:
        whole = dg.AllPartitionMapping()
        deps = [dg.AssetDep([source, part], partition_mapping=whole) for part in kept_from]
    else:
        deps = [[source, part] for part in kept_from]
    deps += [[source, "buckets"]] * bool(run.config.mixture.buckets.by)
    return [*deps, [source, "topics"]]


def _rule(run: Run, source: str) -> str:
    table = run.config.curation
    if table.rules(source):
        return "that the selection keeps"
    return f"with the decision {' or '.join(table.include)}"


def seen_names(run: Run) -> tuple[str, ...]:
    """The name of the asset of search indexes, if the run has one."""
    return ("seen_index",) if run.config.seen.index else ()


def seen_index(run: Run, source: SourcePlan) -> list[dg.AssetsDefinition]:
    """Search indexes of the curated shards, if `[seen]` requests them."""
    name = source.name
    if not seen_names(run):
        return []
    asset = Asset(
        run=run,
        key=[name, "seen_index"],
        group=curated_group(name),
        stage="curate",
        kind="numpy",
        description="Suffix arrays of the curated shards, in which nmoe seen finds a "
        "sentence, its documents and the steps that read it.",
        facts=("files_sorted", "changed"),
        code_version=settings.SEEN_INDEX.version,
        deps=[[name, "curated"]],
        checks=("suffixes",),
        check=lambda made: checks.check_seen(run, name, map(int, made)),
    )
    return [asset.sharded("seen", name)]


def curated_manifest(run: Run, source: SourcePlan) -> dg.AssetsDefinition:
    """The manifest of the curated shards of a source."""
    name = source.name
    return Asset(
        run=run,
        key=[name, "curated_manifest"],
        group=curated_group(name),
        stage="curate",
        kind="json",
        description="Inventory of the curated shards: their files, documents, tokens and SHA-256 "
        "checksums, and the digests of their inputs.",
        facts=("left_out", "composition", "misaligned_shards", *ORDER_FACTS),
        code_version=settings.curated_manifest(run, name).version,
        deps=[[name, "curated"]],
        downstream=[["mixture", "loader_plan"]],
    ).unpartitioned(lambda: curate.combine(run, name), "order_and_diversity")


def loader_plan(run: Run, sources: list[SourcePlan]) -> dg.AssetsDefinition:
    """The plan that `loader.open_loader` opens: sources, weights, quotas, digests."""
    names = [source.name for source in sources]
    valid = [source.name for source in sources if source.has_valid]
    return Asset(
        run=run,
        key=["mixture", "loader_plan"],
        group="mixture",
        stage="plan",
        kind="json",
        description="The plan that a trainer's loader opens: sources, weights, quotas and "
        "digests. With these, the training data are a pure function of the step.",
        facts=(
            "steps, sequences",
            "sequences_SOURCE",
            "composition",
            "remix_NNNN",
            "account",
            "not_shown",
            "changed",
        ),
        code_version=settings.loader_plan(run).version,
        deps=[
            *([name, "curated_manifest"] for name in names),
            *([name, "valid_manifest"] for name in valid),
        ],
        max_age_days=run.config.automation.plan_max_age_days,
    ).unpartitioned(lambda: _plan(run, names, valid), "account_and_signals")


def _plan(run: Run, names: list[str], valid: list[str]) -> Result:
    """Make the loader plan. It is the first asset after all sources, so its page compares the
    sources and shows the account of the run. If data cannot be read for these figures, for example
    because they were moved, the plan is made without them."""
    from loader.plan.file import load_plan
    from nmoe_core.tasks.report.account import commit_account
    from nmoe_core.tasks.report.corpus import UNREADABLE
    from nmoe_core.tasks.selection.composition import changes

    made = curate.make_plan(run, names, valid)
    try:
        account = commit_account(run, load_plan(run.tree.plan))
        facts = made.facts | {"account": account["total"], "composition": changes(run, names)}
        return replace(made, facts=facts)
    except UNREADABLE as error:
        return replace(made, facts=made.facts | {"not_shown": one_line(error)})


def published_plan(run: Run) -> list[dg.AssetsDefinition]:
    """The plan with its data in a store, if `[publish]` names a store."""
    if not run.config.publish.url:
        return []
    asset = Asset(
        run=run,
        key=["mixture", "published_plan"],
        group="mixture",
        stage="plan",
        kind="objectstorage",
        description="Copy of the loader plan and its data in a store; loaders open its URL. "
        "Files that the store already has are not uploaded again.",
        facts=("files_sent, bytes_sent", "files_replaced"),
        code_version=settings.published_plan(run).version,
        deps=[["mixture", "loader_plan"]],
    )

    def send() -> Result:
        require_none_left(run.tree.plan)
        return publish(run.tree.plan, run.config.publish.url)

    return [asset.unpartitioned(send)]
