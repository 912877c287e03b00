"""Assets of one source, from its documents to its docid slices, with their blocking checks."""

from collections.abc import Iterator

import dagster as dg

from nmoe_assets.events import Made, partition_results, result
from nmoe_assets.partitions import buckets, shard_partitions
from nmoe_core.config import Run
from nmoe_core.mixture import SourcePlan
from nmoe_core.stages import prep

CHECKS = ("checksums", "eos", "index", "token_range")


def documents(run: Run, source: SourcePlan) -> dg.AssetSpec:
    """The source itself; prep observes its revision."""
    return dg.AssetSpec(
        [source.name, "documents"],
        group_name=source.name,
        kinds={source.spec.kind},
        description=f"Documents of {source.name}, read as kind {source.spec.kind}.",
        metadata={"hf_dataset": source.spec.hf_dataset, "paths": list(source.spec.paths)},
    )


def shards(run: Run, source: SourcePlan, split: str) -> dg.AssetsDefinition:
    """Token shards of a split, a partition each."""
    prefix = "" if split == "train" else f"{split}_"
    table = run.config.prep
    num_shards = table.num_shards if split == "train" else table.num_valid_shards

    @dg.asset(
        key=[source.name, f"{prefix}shards"],
        deps=[dg.AssetDep([source.name, "documents"])],
        partitions_def=shard_partitions(num_shards),
        backfill_policy=dg.BackfillPolicy.single_run(),
        group_name=source.name,
        kinds={"numpy"},
        code_version="prep/1",
        description=f"Token shards of the {split} split: one pass fills all asked-for shards.",
    )
    def make_shards(context: dg.AssetExecutionContext) -> Iterator[dg.MaterializeResult]:
        made = prep.make_shards(run, source, split, buckets(context))
        parts = {
            f"{bucket:04d}": Made(
                manifest.content_digest(),
                {
                    "documents": manifest.total_documents,
                    "tokens": manifest.total_tokens,
                    "files": manifest.num_shards,
                    "path": dg.MetadataValue.path(str(manifest.path.parent)),
                },
            )
            for bucket, manifest in made.manifests.items()
        }
        yield from partition_results(
            context,
            parts,
            {dg.AssetKey([source.name, "documents"]): made.source_revision},
            documents_tokenized=made.report.documents_tokenized,
            shards_made=len(made.report.made),
            shards_current=len(made.report.skipped),
        )

    return make_shards


def manifest(run: Run, source: SourcePlan, split: str) -> dg.AssetsDefinition:
    """The manifest over all shards of a split."""
    prefix = "" if split == "train" else f"{split}_"

    @dg.asset(
        key=[source.name, f"{prefix}manifest"],
        deps=[dg.AssetDep([source.name, f"{prefix}shards"])],
        group_name=source.name,
        kinds={"json"},
        description=f"Inventory of the {split} shards with SHA-256 checksums.",
    )
    def make_manifest(context: dg.AssetExecutionContext) -> dg.MaterializeResult:
        made, changed = prep.make_manifest(run, source, split)
        return result(
            made.content_digest(),
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


def manifest_checks(run: Run, source: SourcePlan, split: str) -> dg.AssetChecksDefinition:
    """Checksums, EOS, index and token range of every file, in one reading."""
    prefix = "" if split == "train" else f"{split}_"
    key = dg.AssetKey([source.name, f"{prefix}manifest"])

    @dg.multi_asset_check(
        name=f"{source.name}__{prefix}manifest_checks",
        specs=[dg.AssetCheckSpec(name, asset=key, blocking=True) for name in CHECKS],
    )
    def check() -> Iterator[dg.AssetCheckResult]:
        problems = prep.verify_split(run, source, split)
        for name in CHECKS:
            found = [str(problem) for problem in problems if problem.check == name]
            yield dg.AssetCheckResult(
                check_name=name,
                asset_key=key,
                passed=not found,
                metadata={"problems": len(found), "first": found[0] if found else ""},
            )

    return check


def leak_check(run: Run, source: SourcePlan) -> dg.AssetChecksDefinition:
    """No document of the validation split is in training."""

    @dg.asset_check(
        asset=[source.name, "valid_manifest"],
        name="no_leak",
        blocking=True,
        additional_deps=[[source.name, "manifest"]],
    )
    def no_leak() -> dg.AssetCheckResult:
        leak = prep.split_leak(run, source)
        return dg.AssetCheckResult(passed=leak["shared_ids"] == 0, metadata=leak)

    return no_leak


def docid_slices(run: Run, source: SourcePlan) -> dg.AssetsDefinition:
    """Which documents are for training heads, for calibrating them and for testing them."""

    @dg.asset(
        key=[source.name, "docid_slices"],
        deps=[dg.AssetDep([source.name, "manifest"])],
        group_name=source.name,
        kinds={"json"},
        description="Document ids split 80/10/10 by the MD5 of the id.",
    )
    def make_slices(context: dg.AssetExecutionContext) -> dg.MaterializeResult:
        made = prep.make_slices(run, source)
        return result(made.digest, made.facts)

    return make_slices
