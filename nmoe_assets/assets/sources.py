"""Assets of one source, from its documents to its docid slices."""

import dagster as dg

from nmoe_assets.assets.asset import Asset
from nmoe_assets.assets.cost import Stopwatch
from nmoe_assets.assets.events import (
    Events,
    PartitionResult,
    log_partitions,
    require_partitions,
    timed,
    told,
    wait_for_lock,
)
from nmoe_assets.assets.run_log import run_log
from nmoe_assets.catalogue import (
    DOCUMENT_ROWS,
    SHARD_ROWS,
    SLICE_ROWS,
    asset_metadata,
    table,
    to_metadata,
)
from nmoe_assets.dagster_private import SUPPRESS_DEFAULT_EVENT
from nmoe_assets.inputs import CurrentInputs, forget_tagged
from nmoe_assets.names import asset_key, prefixed
from nmoe_assets.partitions import shard_partitions
from nmoe_assets.resources import Machine
from nmoe_core.base.errors import LockedError, NmoeError
from nmoe_core.config.run import Run
from nmoe_core.prep.mixture import SourcePlan
from nmoe_core.tasks import checks, prep
from nmoe_core.tasks.graph import settings
from nmoe_core.tasks.report import summary


def documents(run: Run, source: SourcePlan) -> dg.AssetSpec:
    """The source as an external asset; prep observes its revision."""
    spec = source.spec
    reads = {"hf_dataset": spec.hf_dataset} if spec.hf_dataset else {"paths": list(spec.paths)}
    return dg.AssetSpec(
        asset_key(run, [source.name, "documents"]),
        group_name=prefixed(run, source.name),
        kinds={spec.kind},
        description=f"Documents of {source.name}, of kind {spec.kind}. This asset is external: "
        "prep records the revision that it read.",
        owners=list(run.config.automation.owners),
        tags={"stage": "prep"},
        metadata=asset_metadata(
            columns=DOCUMENT_ROWS, downstream=[asset_key(run, [source.name, "shards"])]
        )
        | reads,
    )


def shards(run: Run, source: SourcePlan, split: str) -> dg.AssetsDefinition:
    """Token shards of a split, one partition per shard."""
    name = source.name
    counts = run.config.prep
    num_shards = counts.num_shards if split == "train" else counts.num_valid_shards
    asset = Asset(
        run=run,
        key=[name, f"{_prefix(split)}shards"],
        group=name,
        stage="prep",
        kind="numpy",
        description=f"Token shards of the {split} split: one pass over the documents fills all "
        "requested shards. The command nmoe explain accepts the ids in the sample.",
        facts=("documents_tokenized", "documents_reused", "shards_made", "shards_current"),
        code_version=settings.prep(run, source, split).version,
        deps=[[name, "documents"]],
        downstream=[[name, f"{_prefix(split)}manifest"]],
        columns=SHARD_ROWS,
        partitions=shard_partitions(num_shards),
        checks=("integrity",),
        check=lambda made: checks.check_shards(run, name, split, map(int, made)),
    )

    def make_shards(context: dg.AssetExecutionContext, machine: Machine) -> Events:
        require_partitions(context)
        forget_tagged(context, run, asset.key, context.partition_keys)
        watch = Stopwatch()
        inputs = CurrentInputs(context)
        try:
            with run_log(context):
                made = prep.make_shards(run, source, split, map(int, context.partition_keys))
        except LockedError as error:
            raise wait_for_lock() from error
        except NmoeError as error:
            raise dg.Failure(told(error)) from error
        pass_facts = timed(made.facts, watch.read(), machine)
        parts = {}
        for bucket, result in made.shards.items():
            facts = {key: to_metadata(key, value) for key, value in result.facts.items()}
            sample = table(summary.sample_documents(run, name, split, bucket))
            page = {**facts, **sample, **pass_facts}
            parts[f"{bucket:04d}"] = PartitionResult(result.digest, page)
        _log_revision(context, asset_key(run, [name, "documents"]), made.source_revision)
        log_partitions(context, inputs, parts, is_complete=True)
        yield dg.MaterializeResult(metadata={SUPPRESS_DEFAULT_EVENT: True})
        yield from asset.own_checks.results_of_partitions(context, list(parts))

    return asset.definition(make_shards)


def manifest(run: Run, source: SourcePlan, split: str) -> dg.AssetsDefinition:
    """The manifest over all shards of a split."""
    name = source.name
    prefix = _prefix(split)
    deps = [[name, f"{prefix}shards"]]
    downstream = [["mixture", "loader_plan"]]
    if split == "train":
        downstream = [] if run.config.grading.is_off else [[name, "docid_slices"]]
        downstream += [["curation", "topic_model"]]
        downstream += [[name, "valid_manifest"]] if source.has_valid else []
    else:
        deps.append([name, "manifest"])  # the check `no_leak` reads both manifests
    return Asset(
        run=run,
        key=[name, f"{prefix}manifest"],
        group=name,
        stage="prep",
        kind="json",
        description=f"Inventory of the {split} shards: their files, documents, tokens and SHA-256 "
        "checksums, and the settings of prep.",
        facts=("changed_text", "changed"),
        code_version=settings.prep(run, source, split).version,
        deps=deps,
        downstream=downstream,
    ).unpartitioned(lambda: prep.make_manifest(run, source, split), "documents_by_length")


def docid_slices(run: Run, source: SourcePlan) -> dg.AssetsDefinition:
    """Divides documents into slices for training, calibrating and testing the heads."""
    name = source.name
    return Asset(
        run=run,
        key=[name, "docid_slices"],
        group=name,
        stage="label",
        kind="json",
        description="Document ids split 80/10/10 by the MD5 of the id: train fits the heads, val "
        "calibrates them, test only measures them.",
        facts=("train, val, test", "changed"),
        code_version=settings.SLICES.version,
        deps=[[name, "manifest"]],
        downstream=[["hydra", "oracle_labels"]],
        columns=SLICE_ROWS,
        checks=("split_rule",),
        check=lambda: checks.check_slices(run, name),
    ).unpartitioned(lambda: prep.make_slices(run, name))


def _log_revision(context: dg.AssetExecutionContext, key: dg.AssetKey, revision: str) -> None:
    """Log the revision of a source, unless the newest event has it. It is no data version: a shard
    reads only its own documents, and a new revision would make all shards stale."""
    records = context.instance.fetch_materializations(key, limit=1).records
    known = records[0].asset_materialization if records else None
    if known is None or known.metadata.get("revision") != dg.MetadataValue.text(revision):
        context.log_event(dg.AssetMaterialization(key, metadata={"revision": revision}))


def _prefix(split: str) -> str:
    return "" if split == "train" else f"{split}_"
