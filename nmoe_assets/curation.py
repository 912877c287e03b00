"""Assets of curation: topics, curated shards, their manifest, and the loader plan."""

from collections.abc import Iterator

import dagster as dg

from nmoe_assets.automation import FOLLOW
from nmoe_assets.checks import Checks
from nmoe_assets.events import each_partition, whole
from nmoe_assets.metadata import LINEAGE_ROWS, ORDER_FACTS, about, curated_group, described, owners
from nmoe_assets.partitions import shard_partitions
from nmoe_assets.resources import Machine
from nmoe_core.config.run import Run
from nmoe_core.prep.mixture import SourcePlan
from nmoe_core.tasks import checks, curate, plan, versions
from nmoe_core.tasks.shards import each_shard

GROUP = "curation"


def topic_model(run: Run, sources: list[SourcePlan]) -> dg.AssetsDefinition:
    """Frozen centroids of document embeddings over all sources."""
    names = [source.name for source in sources]
    held_to = Checks(
        run, [GROUP, "topic_model"], ("readable",), lambda: checks.check_topic_model(run)
    )

    @dg.asset(
        key=[GROUP, "topic_model"],
        code_version=versions.topic_model(run),
        check_specs=held_to.specs(),
        deps=[
            dg.AssetDep(["hydra", "backbone"]),
            *(dg.AssetDep([name, "manifest"]) for name in names),
        ],
        group_name=GROUP,
        kinds={"scikitlearn"},
        description="Topics: centroids of documents, by MiniBatchKMeans over mean-pooled rows of "
        "the backbone's embedding table. Frozen: a new one moves every document, so it is made "
        "by hand.",
        owners=owners(run),
        tags={"stage": "curate"},
        metadata=about(leads_to=[[name, "topics"] for name in names]),
    )
    def fit(context: dg.AssetExecutionContext, machine: Machine) -> dg.MaterializeResult:
        return whole(
            context, machine, lambda: curate.fit_topics(run, names), held_to, "topics_and_k"
        )

    return fit


def topics(run: Run, source: SourcePlan) -> dg.AssetsDefinition:
    """Topic of every document of a source, a partition a shard."""
    name = source.name
    held_to = Checks(
        run,
        [name, "topics"],
        ("topic_range",),
        lambda made: checks.check_topics(run, name, map(int, made)),
    )

    @dg.asset(
        key=[name, "topics"],
        code_version=versions.TOPICS,
        check_specs=held_to.specs(),
        deps=[dg.AssetDep([name, "shards"]), dg.AssetDep([GROUP, "topic_model"])],
        partitions_def=shard_partitions(run.config.prep.num_shards),
        backfill_policy=dg.BackfillPolicy.single_run(),
        automation_condition=FOLLOW,
        group_name=curated_group(name),
        kinds={"numpy"},
        description="Topic of each document: the nearest centroid of the topic model.",
        owners=owners(run),
        tags={"stage": "curate"},
        metadata=about(leads_to=[[name, "curated"]]),
    )
    def assign(
        context: dg.AssetExecutionContext, machine: Machine
    ) -> Iterator[dg.MaterializeResult | dg.AssetCheckResult]:
        yield from each_partition(
            context,
            machine,
            lambda keys: each_shard(run, "topics", name, keys),
            held_to,
        )

    return assign


def curated(run: Run, source: SourcePlan) -> dg.AssetsDefinition:
    """Kept documents of each shard in diversity order."""
    name = source.name
    held_to = Checks(
        run,
        [name, "curated"],
        ("integrity",),
        lambda made: checks.check_curated_shards(run, name, map(int, made)),
    )

    @dg.asset(
        key=[name, "curated"],
        code_version=versions.curated(run, name),
        check_specs=held_to.specs(),
        deps=[dg.AssetDep([name, part]) for part in ("shards", "quality_scores", "topics")],
        partitions_def=shard_partitions(run.config.prep.num_shards),
        backfill_policy=dg.BackfillPolicy.single_run(),
        automation_condition=FOLLOW,
        group_name=curated_group(name),
        kinds={"numpy"},
        description=described(
            f"Documents decided {' or '.join(run.config.curation.include)}, in training order "
            f"({run.config.curation.order}). The columns are those of lineage.jsonl.",
            *ORDER_FACTS,
        ),
        owners=owners(run),
        tags={"stage": "curate"},
        metadata=about(rows=LINEAGE_ROWS, leads_to=[[name, "curated_manifest"]]),
    )
    def curate_shards(
        context: dg.AssetExecutionContext, machine: Machine
    ) -> Iterator[dg.MaterializeResult | dg.AssetCheckResult]:
        yield from each_partition(
            context,
            machine,
            lambda keys: each_shard(run, "curate", name, keys),
            held_to,
            lambda key, output: {"order": dg.MetadataValue.md(output.picture)},
        )

    return curate_shards


def curated_manifest(run: Run, source: SourcePlan) -> dg.AssetsDefinition:
    """The manifest a trainer's loader opens."""
    name = source.name

    @dg.asset(
        key=[name, "curated_manifest"],
        code_version=versions.curated_manifest(run, name),
        deps=[dg.AssetDep([name, "curated"])],
        automation_condition=FOLLOW,
        group_name=curated_group(name),
        kinds={"json"},
        description=described(
            "Inventory of the curated shards, with the digest of what they came from.",
            *("misaligned_shards", *ORDER_FACTS),
        ),
        owners=owners(run),
        tags={"stage": "curate"},
        metadata=about(leads_to=[["mixture", "loader_plan"]]),
    )
    def combine(context: dg.AssetExecutionContext, machine: Machine) -> dg.MaterializeResult:
        return whole(
            context, machine, lambda: curate.combine(run, name), picture="order_and_diversity"
        )

    return combine


def loader_plan(run: Run, sources: list[SourcePlan]) -> dg.AssetsDefinition:
    """What `loader.build_loader` opens: sources, weights, quotas, digests."""
    names = [source.name for source in sources]
    valid = [source.name for source in sources if source.has_valid]

    @dg.asset(
        key=["mixture", "loader_plan"],
        code_version=versions.loader_plan(run),
        deps=[
            *(dg.AssetDep([name, "curated_manifest"]) for name in names),
            *(dg.AssetDep([name, "valid_manifest"]) for name in valid),
        ],
        automation_condition=FOLLOW,
        group_name="mixture",
        kinds={"json"},
        description=described(
            "What a trainer's loader opens: sources, weights, quotas and digests, which make the "
            "training stream a pure function of the step.",
            *("steps, sequences", "sequences_SOURCE", "changed"),
        ),
        owners=owners(run),
        tags={"stage": "plan"},
        metadata=about(),
    )
    def write_plan(context: dg.AssetExecutionContext, machine: Machine) -> dg.MaterializeResult:
        return whole(context, machine, lambda: plan.make_plan(run, names, valid))

    return write_plan
