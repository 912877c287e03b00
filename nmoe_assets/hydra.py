"""Assets of HYDRA: the backbone, oracle labels, the two heads, their calibration, and scores."""

from collections.abc import Iterator

import dagster as dg

from nmoe_assets.events import Made, partition_results, result
from nmoe_assets.partitions import (
    buckets,
    label_keys,
    label_partitions,
    shard_partitions,
)
from nmoe_core.config import Run
from nmoe_core.hydra.decide import GRADE_CODE
from nmoe_core.mixture import SourcePlan
from nmoe_core.stages import hydra

GROUP = "hydra"

_changed = dg.AutomationCondition.any_deps_match(dg.AutomationCondition.data_version_changed())
# Eager would grade again whenever heads are rewritten; this asks whether their content changed.
REGRADE = (
    (
        dg.AutomationCondition.newly_missing()
        | dg.AutomationCondition.code_version_changed()
        | _changed
    ).since(dg.AutomationCondition.newly_requested() | dg.AutomationCondition.newly_updated())
    & ~dg.AutomationCondition.any_deps_missing()
    & ~dg.AutomationCondition.any_deps_in_progress()
    & ~dg.AutomationCondition.in_progress()
)


def backbone(run: Run) -> dg.AssetsDefinition:
    """The frozen model that features come from."""

    @dg.asset(
        key=[GROUP, "backbone"],
        group_name=GROUP,
        kinds={"pytorch"},
        description="gpt-oss-shaped checkpoint; kind tiny is made here from seeded random numbers.",
    )
    def make_backbone(context: dg.AssetExecutionContext) -> dg.MaterializeResult:
        made = hydra.make_backbone(run)
        return result(made.digest, made.facts)

    return make_backbone


def oracle_labels(run: Run, sources: list[SourcePlan]) -> dg.AssetsDefinition:
    """Scores of the oracle on train and val slices, a partition a slice."""

    @dg.asset(
        key=[GROUP, "oracle_labels"],
        deps=[dg.AssetDep([source.name, "docid_slices"]) for source in sources],
        partitions_def=label_partitions,
        backfill_policy=dg.BackfillPolicy.single_run(),
        group_name=GROUP,
        pool="gpu",
        kinds={"json"},
        description=f"Five scores a document from the oracle of kind {run.config.oracle.kind}.",
    )
    def label(context: dg.AssetExecutionContext) -> Iterator[dg.MaterializeResult]:
        names = [source.name for source in sources]
        labels = hydra.label_slices(run, names, context.partition_keys)
        yield from partition_results(
            context,
            {key: Made(made.digest, made.facts) for key, made in labels.items()},
        )

    return label


def head(run: Run, kind: hydra.HeadKind) -> dg.AssetsDefinition:
    """The probe or the judge."""

    @dg.asset(
        key=[GROUP, f"{kind}_head"],
        deps=[
            # Fitted on train, reported on val.
            dg.AssetDep([GROUP, "oracle_labels"]),
            dg.AssetDep([GROUP, "backbone"]),
        ],
        group_name=GROUP,
        pool="gpu",
        kinds={"pytorch"},
        description=f"The {kind}, trained on oracle labels over the frozen backbone.",
    )
    def train_head(context: dg.AssetExecutionContext) -> dg.MaterializeResult:
        made = hydra.train_head(run, kind)
        curves = dg.MetadataValue.md(made.picture)
        return result(made.digest, {**made.facts, "loss": curves})

    return train_head


def calibration(run: Run) -> dg.AssetsDefinition:
    """Thresholds, fitted on the heads' own scores of val documents."""

    @dg.asset(
        key=[GROUP, "calibration"],
        deps=[
            dg.AssetDep(
                [GROUP, "oracle_labels"],
                partition_mapping=dg.SpecificPartitionsPartitionMapping(label_keys("val")),
            ),
            dg.AssetDep([GROUP, "probe_head"]),
            dg.AssetDep([GROUP, "judge_head"]),
        ],
        group_name=GROUP,
        kinds={"json"},
        description="Weights, tau_drop, tau_keep and the probe's own tau_probe.",
    )
    def calibrate(context: dg.AssetExecutionContext) -> dg.MaterializeResult:
        made = hydra.calibrate_heads(run)
        picture = dg.MetadataValue.md(made.picture)
        return result(made.digest, {**made.facts, "keep_rate_and_reliability": picture})

    return calibrate


def quality_scores(run: Run, source: SourcePlan) -> dg.AssetsDefinition:
    """Scores and decision of every document of a source, a partition a shard."""

    @dg.asset(
        key=[source.name, "quality_scores"],
        deps=[
            dg.AssetDep([source.name, "shards"]),
            dg.AssetDep([GROUP, "backbone"]),
            dg.AssetDep([GROUP, "probe_head"]),
            dg.AssetDep([GROUP, "judge_head"]),
            dg.AssetDep([GROUP, "calibration"]),
        ],
        partitions_def=shard_partitions(run.config.prep.num_shards),
        backfill_policy=dg.BackfillPolicy.single_run(),
        automation_condition=REGRADE,
        code_version=GRADE_CODE,
        group_name=source.name,
        pool="gpu",
        kinds={"json"},
        description="Probe and judge scores, and the decision drop, band or keep.",
    )
    def grade(context: dg.AssetExecutionContext) -> Iterator[dg.MaterializeResult]:
        graded = hydra.grade_shards(run, source.name, buckets(context))
        yield from partition_results(
            context,
            {f"{bucket:04d}": Made(made.digest, made.facts) for bucket, made in graded.items()},
        )

    return grade
