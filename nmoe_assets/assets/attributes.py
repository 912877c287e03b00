"""Assets of attributes: the rows of each attribute per shard, duplicates, and the selection."""

from dataclasses import replace
from typing import Any

import dagster as dg

from nmoe_assets.assets.asset import Asset
from nmoe_assets.assets.events import log_external, materialize_unpartitioned, picture_link
from nmoe_assets.catalogue import (
    ATTRIBUTE_ROWS,
    REPEAT_ROWS,
    SELECTION_ROWS,
    asset_metadata,
    curated_group,
    table,
)
from nmoe_assets.names import asset_key, prefixed
from nmoe_assets.partitions import shard_partitions
from nmoe_assets.resources import Machine
from nmoe_core.base.result import Result
from nmoe_core.config.attributes import OF_BACKBONE, WITHOUT_COLUMNS
from nmoe_core.config.run import Run
from nmoe_core.curate.settings import spreads_copies
from nmoe_core.prep.mixture import SourcePlan
from nmoe_core.tasks import checks
from nmoe_core.tasks.attributes import (
    attribute_names,
    duplicates_digests,
    make_duplicates,
    shard_attribute_names,
)
from nmoe_core.tasks.graph import settings
from nmoe_core.tasks.report import summary

DUPLICATES = ["curation", "duplicates"]


def attributes(run: Run, source: SourcePlan) -> list[dg.AssetsDefinition]:
    """The attributes of a source that are made per shard, one partition per shard."""
    return [_attribute(run, source.name, name) for name in shard_attribute_names(run)]


def _attribute(run: Run, source: str, name: str) -> dg.AssetsDefinition:
    downstream = [] if name in WITHOUT_COLUMNS else selections(run, [source])
    downstream += [DUPLICATES] * (name == "signatures")
    return Asset(
        run=run,
        key=[source, "attributes", name],
        group=source,
        stage="prep",
        kind="parquet",
        description=f"The attribute {name} of each document, in the order of the shard. Rows are "
        "reused if an earlier file has the same text.",
        facts=("computed", "changed"),
        code_version=settings.attribute(run, name).version,
        deps=[[source, "shards"], *[["hydra", "backbone"]] * (name in OF_BACKBONE)],
        downstream=downstream,
        pool="gpu" if name in OF_BACKBONE else None,
        columns=ATTRIBUTE_ROWS,
        checks=checks.ATTRIBUTE_CHECKS,
        check=lambda made: checks.check_attribute(run, source, name, map(int, made)),
    ).sharded(f"attributes/{name}", source, lambda key, result: _page(run, source, name, int(key)))


def _page(run: Run, source: str, name: str, bucket: int) -> dict[str, Any]:
    """A link to histograms of the columns of a shard, and the documents with the lowest and highest
    values."""
    if name in WITHOUT_COLUMNS:  # their histograms are meaningless
        return {}
    link = picture_link([source, "attributes", name], f"{bucket:04d}")
    return {"picture": link, **table(summary.sample_attribute(run, source, name, bucket))}


def attribute_keys(run: Run, source: str) -> list[list[str]]:
    """Keys of the attributes of a source, with the attributes that all sources share."""
    of_shards = ([source, "attributes", name] for name in shard_attribute_names(run))
    return [*of_shards, *copies_keys(run, source)[:1]]


def copies_keys(run: Run, source: str) -> list[list[str]]:
    """Keys of the inputs of an asset that reads `duplicates` of a source: the step that makes the
    rows of all sources, and the rows of this source, with a version per shard."""
    if "duplicates" not in attribute_names(run):
        return []
    return [DUPLICATES, [source, "attributes", "duplicates"]]


def selection_names(run: Run, source: str) -> tuple[str, ...]:
    """The name of the selection's asset, if the source has one."""
    return ("selection",) if run.config.curation.rules(source) else ()


def selections(run: Run, sources: list[str]) -> list[list[str]]:
    """Keys of the selections of sources, which are the only assets that read attributes."""
    return [[source, name] for source in sources for name in selection_names(run, source)]


def bucket_keys(run: Run, source: str) -> list[list[str]]:
    """Keys of the definition of buckets and of a source's buckets, if the run has buckets."""
    return [["curation", "buckets"], [source, "buckets"]] if run.config.mixture.buckets.by else []


def duplicates(run: Run, sources: list[SourcePlan]) -> list[dg.AssetsDefinition]:
    """The asset `duplicates`, if the run searches for copies."""
    names = [source.name for source in sources]
    if "duplicates" not in attribute_names(run):
        return []
    version = settings.attribute(run, "duplicates").version
    asset = Asset(
        run=run,
        key=DUPLICATES,
        group="curation",
        stage="curate",
        kind="parquet",
        description="Exact and near copies among the documents of all sources, and which document "
        "of each group is kept. Only files whose rows changed are written.",
        facts=("copies", "shards_written"),
        code_version=version,
        deps=[[name, "attributes", "signatures"] for name in names],
        downstream=selections(run, names),
        checks=checks.ATTRIBUTE_CHECKS,
        check=lambda: checks.check_attribute_of_all(run, "duplicates", names),
    )

    def make() -> Result:
        # A version of the rows of all shards would make what reads any shard stale.
        return replace(make_duplicates(run, names, with_copies=True), digest=version)

    def work(context: dg.AssetExecutionContext, machine: Machine) -> dg.MaterializeResult:
        picture = {"exact_and_near": picture_link(DUPLICATES)}
        made = materialize_unpartitioned(context, machine, make, asset.own_checks, picture)
        for name in names:
            key = asset_key(run, copies_keys(run, name)[1])
            log_external(context, key, duplicates_digests(run, name))
        return made

    return [asset.definition(work)]


def copies(run: Run, source: SourcePlan) -> list[dg.AssetSpec]:
    """The rows of `duplicates` of a source as an external asset: one step makes the rows of all
    sources, and records the version of each shard's."""
    read_by = [*selections(run, [source.name]), *[[source.name, "curated"]] * spreads_copies(run)]
    downstream = [asset_key(run, key) for key in read_by]
    return [
        dg.AssetSpec(
            asset_key(run, key),
            deps=[asset_key(run, DUPLICATES)],
            group_name=prefixed(run, source.name),
            kinds={"parquet"},
            description="The copies among the documents of each shard, which "
            "curation/duplicates finds. A shard whose rows did not change keeps its version.",
            owners=list(run.config.automation.owners),
            tags={"stage": "curate"},
            metadata=asset_metadata(downstream=downstream),
            partitions_def=shard_partitions(run.config.prep.num_shards),
        )
        for key in copies_keys(run, source.name)[1:]
    ]


def selection(run: Run, source: SourcePlan) -> list[dg.AssetsDefinition]:
    """The result of the source's expressions for each document, if it has any."""
    name = source.name
    if not selection_names(run, name):
        return []
    table = run.config.curation
    rule = " and ".join(table.rules(name).values())
    often = "" if table.repeat is None else f" How often a pass reads it: `{table.repeat}`."
    deps = [[name, "shards"], [name, "quality_scores"]]
    if "topic" in rule + often:  # part of the name of every column of topics
        deps.append([name, "topics"])
    deps += [key for key in attribute_keys(run, name) if key[-1] not in WITHOUT_COLUMNS]
    deps += copies_keys(run, name)[1:]
    asset = Asset(
        run=run,
        key=[name, "selection"],
        group=curated_group(name),
        stage="curate",
        kind="parquet",
        description="Whether the rule of [curation] keeps each document, and the number of the "
        f"first clause that drops it. The rule: `{rule}`.{often}",
        facts=("kept", *["readings"] * bool(often), "changed"),
        code_version=settings.selection(run, name).version,
        deps=deps,
        downstream=[[name, "curated"], *bucket_keys(run, name)[:1]],
        columns=SELECTION_ROWS + REPEAT_ROWS if often else SELECTION_ROWS,
        checks=("rows", "drift"),
        check=lambda made: checks.check_attribute(run, name, "selection", map(int, made)),
    )
    return [asset.sharded("select", name)]
