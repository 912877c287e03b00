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
from nmoe_assets.catalogue import DOCUMENT_ROWS, SHARD_ROWS, SLICE_ROWS, about, shown, table
from nmoe_assets.dagster_private import SUPPRESS_DEFAULT_EVENT
from nmoe_assets.inputs import CurrentInputs, forget_tagged
from nmoe_assets.names import asset_key, named
from nmoe_assets.partitions import shard_partitions
from nmoe_assets.resources import Machine
from nmoe_core.base.errors import LockedError, NmoeError
from nmoe_core.config.run import Run
from nmoe_core.prep.mixture import SourcePlan
from nmoe_core.tasks import checks, prep
from nmoe_core.tasks.graph import settings
from nmoe_core.tasks.report import summary


def documents(run: Run, source: SourcePlan) -> dg.AssetSpec:
    """The source itself; prep observes its revision."""
    spec = source.spec
    reads = {"hf_dataset": spec.hf_dataset} if spec.hf_dataset else {"paths": list(spec.paths)}
    return dg.AssetSpec(
        asset_key(run, [source.name, "documents"]),
        group_name=named(run, source.name),
        kinds={spec.kind},
        description=f"Documents of {source.name}, of kind {spec.kind}. This asset is external: "
        "prep records the revision that it read.",
        owners=list(run.config.automation.owners),
        tags={"stage": "prep"},
        metadata=about(rows=DOCUMENT_ROWS, leads_to=[asset_key(run, [source.name, "shards"])])
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
        text=f"Token shards of the {split} split: one pass fills all requested shards. "
        "`nmoe explain` takes the ids in the sample.",
        facts=("documents_tokenized", "documents_reused", "shards_made", "shards_current"),
        version=settings.prep(run, source, split).version,
        deps=[[name, "documents"]],
        leads_to=[[name, f"{_prefix(split)}manifest"]],
        rows=SHARD_ROWS,
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
            facts = {key: shown(key, value) for key, value in result.facts.items()}
            sample = table(summary.sample_documents(run, name, split, bucket))
            page = {**facts, **sample, **pass_facts}
            parts[f"{bucket:04d}"] = PartitionResult(result.digest, page)
        log_partitions(
            context, inputs, parts, {asset_key(run, [name, "documents"]): made.source_revision}
        )
        yield dg.MaterializeResult(metadata={SUPPRESS_DEFAULT_EVENT: True})
        yield from asset.own_checks.results_of_partitions(context, list(parts))

    return asset.definition(make_shards)


def manifest(run: Run, source: SourcePlan, split: str) -> dg.AssetsDefinition:
    """The manifest over all shards of a split."""
    name = source.name
    prefix = _prefix(split)
    deps = [[name, f"{prefix}shards"]]
    leads_to = [["mixture", "loader_plan"]]
    if split == "train":
        leads_to = [] if run.config.grading.is_off else [[name, "docid_slices"]]
        leads_to += [["curation", "topic_model"]]
        leads_to += [[name, "valid_manifest"]] if source.has_valid else []
    else:
        deps.append([name, "manifest"])  # the check `no_leak` reads both
    return Asset(
        run=run,
        key=[name, f"{prefix}manifest"],
        group=name,
        stage="prep",
        kind="json",
        text=f"Inventory of the {split} shards with SHA-256 checksums.",
        facts=("changed",),
        version=settings.prep(run, source, split).version,
        deps=deps,
        leads_to=leads_to,
    ).unpartitioned(lambda: prep.make_manifest(run, source, split), "documents_by_length")


def docid_slices(run: Run, source: SourcePlan) -> dg.AssetsDefinition:
    """Splits documents into those for training, calibrating and testing the heads."""
    name = source.name
    return Asset(
        run=run,
        key=[name, "docid_slices"],
        group=name,
        stage="label",
        kind="json",
        text="Document ids split 80/10/10 by the MD5 of the id: train fits the heads, val "
        "calibrates them, test only measures them.",
        facts=("train, val, test", "changed"),
        version=settings.SLICES.version,
        deps=[[name, "manifest"]],
        leads_to=[["hydra", "oracle_labels"]],
        rows=SLICE_ROWS,
        checks=("split_rule",),
        check=lambda: checks.check_slices(run, name),
    ).unpartitioned(lambda: prep.make_slices(run, name))


def _prefix(split: str) -> str:
    return "" if split == "train" else f"{split}_"
