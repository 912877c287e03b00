"""Assets of curation: topics, curated shards, their manifest, and the loader plan."""

from collections.abc import Iterator

import dagster as dg

from nmoe_assets.events import Made, partition_results, result
from nmoe_assets.partitions import buckets, shard_partitions
from nmoe_core.config import Run
from nmoe_core.mixture import SourcePlan
from nmoe_core.stages import curate, plan

GROUP = "curation"


def topic_model(run: Run, sources: list[SourcePlan]) -> dg.AssetsDefinition:
    """Frozen centroids of document embeddings over all sources."""

    @dg.asset(
        key=[GROUP, "topic_model"],
        deps=[
            dg.AssetDep(["hydra", "backbone"]),
            *(dg.AssetDep([source.name, "manifest"]) for source in sources),
        ],
        group_name=GROUP,
        kinds={"scikitlearn"},
        description="MiniBatchKMeans over mean-pooled rows of the backbone's embedding table.",
    )
    def fit(context: dg.AssetExecutionContext) -> dg.MaterializeResult:
        made = curate.fit_topics(run, [source.name for source in sources])
        return result(made.digest, made.facts)

    return fit


def topics(run: Run, source: SourcePlan) -> dg.AssetsDefinition:
    """Topic of every document of a source, a partition a shard."""

    @dg.asset(
        key=[source.name, "topics"],
        deps=[dg.AssetDep([source.name, "shards"]), dg.AssetDep([GROUP, "topic_model"])],
        partitions_def=shard_partitions(run.config.prep.num_shards),
        backfill_policy=dg.BackfillPolicy.single_run(),
        group_name=source.name,
        kinds={"numpy"},
        description="Nearest centroid of each document.",
    )
    def assign(context: dg.AssetExecutionContext) -> Iterator[dg.MaterializeResult]:
        assigned = curate.assign_shard_topics(run, source.name, buckets(context))
        yield from partition_results(
            context,
            {f"{bucket:04d}": Made(made.digest, made.facts) for bucket, made in assigned.items()},
        )

    return assign


def curated(run: Run, source: SourcePlan) -> dg.AssetsDefinition:
    """Kept documents of each shard in diversity order."""

    @dg.asset(
        key=[source.name, "curated"],
        deps=[dg.AssetDep([source.name, name]) for name in ("shards", "quality_scores", "topics")],
        partitions_def=shard_partitions(run.config.prep.num_shards),
        backfill_policy=dg.BackfillPolicy.single_run(),
        group_name=source.name,
        kinds={"numpy"},
        description=f"Documents decided {', '.join(run.config.curation.include)}, "
        f"in {run.config.curation.order} order.",
    )
    def curate_shards(context: dg.AssetExecutionContext) -> Iterator[dg.MaterializeResult]:
        made = curate.curate_shards(run, source.name, buckets(context))
        yield from partition_results(
            context,
            {
                f"{bucket:04d}": Made(
                    part.digest, {**part.facts, "order": dg.MetadataValue.md(part.picture)}
                )
                for bucket, part in made.items()
            },
        )

    return curate_shards


def curated_manifest(run: Run, source: SourcePlan) -> dg.AssetsDefinition:
    """The manifest a trainer's loader opens."""

    @dg.asset(
        key=[source.name, "curated_manifest"],
        deps=[dg.AssetDep([source.name, "curated"])],
        group_name=source.name,
        kinds={"json"},
        description="Inventory of the curated shards, with the digest of what they came from.",
    )
    def combine(context: dg.AssetExecutionContext) -> dg.MaterializeResult:
        made = curate.combine(run, source.name)
        picture = dg.MetadataValue.md(made.picture)
        return result(made.digest, {**made.facts, "order_and_diversity": picture})

    return combine


def loader_plan(run: Run, sources: list[SourcePlan]) -> dg.AssetsDefinition:
    """What `loader.build_loader` opens: sources, weights, quotas, digests."""
    valid = [source for source in sources if source.has_valid]

    @dg.asset(
        key=["mixture", "loader_plan"],
        deps=[
            *(dg.AssetDep([source.name, "curated_manifest"]) for source in sources),
            *(dg.AssetDep([source.name, "valid_manifest"]) for source in valid),
        ],
        group_name="mixture",
        kinds={"json"},
        description="The training stream as a pure function of step.",
    )
    def write_plan(context: dg.AssetExecutionContext) -> dg.MaterializeResult:
        made = plan.make_plan(run, [s.name for s in sources], [s.name for s in valid])
        return result(made.digest, made.facts)

    return write_plan
