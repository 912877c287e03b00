"""Assets of one source, from its documents to its docid slices."""

from collections.abc import Iterator

import dagster as dg

from nmoe_assets.checks import Checks
from nmoe_assets.cost import Stopwatch
from nmoe_assets.events import Made, partition_results, result, timed, wait_for_lock, whole
from nmoe_assets.metadata import SLICE_ROWS, about, described, owners, table
from nmoe_assets.partitions import buckets, shard_partitions
from nmoe_assets.resources import Machine
from nmoe_assets.run_log import run_log
from nmoe_core.base.errors import LockedError
from nmoe_core.config.run import Run
from nmoe_core.prep.mixture import SourcePlan
from nmoe_core.shards.manifest import documents_digest
from nmoe_core.tasks import checks, prep, samples, versions


def documents(run: Run, source: SourcePlan) -> dg.AssetSpec:
    """The source itself; prep observes its revision."""
    spec = source.spec
    reads = {"hf_dataset": spec.hf_dataset} if spec.hf_dataset else {"paths": list(spec.paths)}
    return dg.AssetSpec(
        [source.name, "documents"],
        group_name=source.name,
        kinds={spec.kind},
        description=f"Documents of {source.name}, read as kind {spec.kind}. They are not "
        "made here: prep records the revision that it read.",
        owners=owners(run),
        tags={"stage": "prep"},
        metadata=about(leads_to=[[source.name, "shards"]]) | reads,
    )


def shards(run: Run, source: SourcePlan, split: str) -> dg.AssetsDefinition:
    """Token shards of a split, a partition each."""
    name, prefix = source.name, _prefix(split)
    prep_table = run.config.prep
    num_shards = prep_table.num_shards if split == "train" else prep_table.num_valid_shards
    held_to = Checks(
        run,
        [name, f"{prefix}shards"],
        ("integrity",),
        lambda made: checks.check_shards(run, name, split, map(int, made)),
    )

    @dg.asset(
        key=[name, f"{prefix}shards"],
        check_specs=held_to.specs(),
        deps=[dg.AssetDep([name, "documents"])],
        partitions_def=shard_partitions(num_shards),
        backfill_policy=dg.BackfillPolicy.single_run(),
        group_name=name,
        kinds={"numpy"},
        code_version=versions.prep(run, source, split),
        description=described(
            f"Token shards of the {split} split: one pass fills all asked-for shards. "
            "`nmoe explain` takes the ids in the sample.",
            *("documents_tokenized", "shards_made", "shards_current"),
        ),
        owners=owners(run),
        tags={"stage": "prep"},
        metadata=about(leads_to=[[name, f"{prefix}manifest"]]),
    )
    def make_shards(
        context: dg.AssetExecutionContext, machine: Machine
    ) -> Iterator[dg.MaterializeResult | dg.AssetCheckResult]:
        watch = Stopwatch()
        try:
            with run_log(context):
                made = prep.make_shards(run, source, split, buckets(context))
        except LockedError as error:
            raise wait_for_lock() from error
        report = made.report
        pass_facts = timed(
            {
                "documents_tokenized": report.documents_tokenized,
                "shards_made": len(report.made),
                "shards_current": len(report.skipped),
            },
            watch.read(),
            machine,
        )
        parts = {
            f"{bucket:04d}": Made(
                documents_digest(manifest),
                {
                    "documents": manifest.total_documents,
                    "tokens": manifest.total_tokens,
                    "files": manifest.num_shards,
                    "path": dg.MetadataValue.path(str(manifest.path.parent)),
                    **table(samples.sample_documents(run, name, split, bucket)),
                },
            )
            for bucket, manifest in made.manifests.items()
        }
        read = {dg.AssetKey([name, "documents"]): made.source_revision}
        yield from partition_results(context, parts, read, **pass_facts)
        yield from held_to.results_of_partitions(context, list(parts))

    return make_shards


def manifest(run: Run, source: SourcePlan, split: str) -> dg.AssetsDefinition:
    """The manifest over all shards of a split."""
    name, prefix = source.name, _prefix(split)
    leads_to = [["mixture", "loader_plan"]]
    if split == "train":
        leads_to = [[name, "docid_slices"], ["curation", "topic_model"]]

    @dg.asset(
        key=[name, f"{prefix}manifest"],
        deps=[dg.AssetDep([name, f"{prefix}shards"])],
        code_version=versions.prep(run, source, split),
        group_name=name,
        kinds={"json"},
        description=described(
            f"Inventory of the {split} shards with SHA-256 checksums.", "changed"
        ),
        owners=owners(run),
        tags={"stage": "prep"},
        metadata=about(leads_to=leads_to),
    )
    def make_manifest() -> dg.MaterializeResult:
        made, changed = prep.make_manifest(run, source, split)
        return result(
            # The plan, which is all that follows a valid manifest, names the whole manifest.
            made.content_digest() if split == "valid" else documents_digest(made),
            {
                "documents": made.total_documents,
                "tokens": made.total_tokens,
                "shard_files": made.num_shards,
                "changed": changed,
                "path": dg.MetadataValue.path(str(made.path)),
                "documents_by_length": dg.MetadataValue.md(prep.manifest_picture(made)),
            },
        )

    return make_manifest


def docid_slices(run: Run, source: SourcePlan) -> dg.AssetsDefinition:
    """Which documents are for training heads, for calibrating them and for testing them."""
    name = source.name
    key = [name, "docid_slices"]
    held_to = Checks(run, key, ("split_rule",), lambda: checks.check_slices(run, name))

    @dg.asset(
        key=key,
        check_specs=held_to.specs(),
        deps=[dg.AssetDep([name, "manifest"])],
        code_version=versions.SLICES,
        group_name=name,
        kinds={"json"},
        description=described(
            "Document ids split 80/10/10 by the MD5 of the id: train fits the heads, val "
            "calibrates them, test is left alone.",
            *("train, val, test", "changed"),
        ),
        owners=owners(run),
        tags={"stage": "label"},
        metadata=about(rows=SLICE_ROWS, leads_to=[["hydra", "oracle_labels"]]),
    )
    def make_slices(context: dg.AssetExecutionContext, machine: Machine) -> dg.MaterializeResult:
        return whole(context, machine, lambda: prep.make_slices(run, source.name), held_to)

    return make_slices


def _prefix(split: str) -> str:
    return "" if split == "train" else f"{split}_"
