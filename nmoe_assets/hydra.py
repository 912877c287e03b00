"""Assets of HYDRA: the backbone, oracle labels, the two heads, their calibration, and scores."""

from collections.abc import Iterator

import dagster as dg

from nmoe_assets.automation import FOLLOW, REGRADE
from nmoe_assets.checks import Checks
from nmoe_assets.events import each_partition, whole
from nmoe_assets.metadata import (
    GRADE_ROWS,
    HEAD_FACTS,
    LABEL_ROWS,
    about,
    curated_group,
    described,
    owners,
    table,
)
from nmoe_assets.partitions import label_keys, label_partitions, shard_partitions
from nmoe_assets.resources import Machine
from nmoe_core.config.run import Run
from nmoe_core.prep.mixture import SourcePlan
from nmoe_core.tasks import checks, hydra, samples, versions
from nmoe_core.tasks.shards import attempt, each_shard

GROUP = "hydra"


def backbone(run: Run) -> dg.AssetsDefinition:
    """The frozen model that features come from."""
    held_to = Checks(run, [GROUP, "backbone"], ("readable",), lambda: checks.check_backbone(run))

    @dg.asset(
        key=[GROUP, "backbone"],
        check_specs=held_to.specs(),
        code_version=versions.backbone(run),
        group_name=GROUP,
        kinds={"pytorch"},
        description="The frozen model that features and topics come from, a checkpoint in the "
        "gpt-oss format. Kind tiny is made here from seeded random numbers.",
        owners=owners(run),
        tags={"stage": "heads"},
        metadata=about(
            leads_to=[[GROUP, "probe_head"], [GROUP, "judge_head"], ["curation", "topic_model"]]
        ),
    )
    def make_backbone(context: dg.AssetExecutionContext, machine: Machine) -> dg.MaterializeResult:
        return whole(context, machine, lambda: hydra.make_backbone(run), held_to)

    return make_backbone


def oracle_labels(run: Run, sources: list[SourcePlan]) -> dg.AssetsDefinition:
    """Scores of the oracle on train, val and test slices, one partition per slice."""
    names = [source.name for source in sources]
    held_to = Checks(
        run,
        [GROUP, "oracle_labels"],
        ("coverage", "parse_rate", "one_scorer"),
        lambda made: checks.check_labels(run),
    )

    @dg.asset(
        key=[GROUP, "oracle_labels"],
        check_specs=held_to.specs(),
        code_version=versions.labels(run),
        deps=[
            *(dg.AssetDep([name, "docid_slices"]) for name in names),
            # "Materialize all" goes from partitioned to partitioned assets and does not cross the
            # slices: without these it would leave the labels out.
            *(
                dg.AssetDep([name, "shards"], partition_mapping=dg.AllPartitionMapping())
                for name in names
            ),
        ],
        partitions_def=label_partitions,
        backfill_policy=dg.BackfillPolicy.single_run(),
        group_name=GROUP,
        pool="gpu",
        kinds={"json"},
        description=described(
            f"Five scores a document from the oracle of kind {run.config.oracle.kind}. "
            "The sample has them in the order of the column scores.",
            *("parse_rate", "salvaged", "oracle_calls"),
        ),
        owners=owners(run),
        tags={"stage": "label"},
        metadata=about(
            rows=LABEL_ROWS,
            leads_to=[[GROUP, name] for name in ("probe_head", "judge_head", "calibration")],
        ),
    )
    def label(
        context: dg.AssetExecutionContext, machine: Machine
    ) -> Iterator[dg.MaterializeResult | dg.AssetCheckResult]:
        yield from each_partition(
            context,
            machine,
            lambda keys: (
                attempt(key, lambda key: hydra.label_slices(run, names, [key])[key]) for key in keys
            ),
            held_to,
            lambda key, output: table(samples.sample_labels(run, key)),
        )

    return label


def head(run: Run, kind: hydra.HeadKind) -> dg.AssetsDefinition:
    """The probe or the judge."""
    key = [GROUP, f"{kind}_head"]
    held_to = Checks(run, key, ("promotion", "baselines"), lambda: checks.check_head(run, kind))

    @dg.asset(
        key=key,
        check_specs=held_to.specs(),
        code_version=versions.head(run, kind),
        deps=[
            # Fitted on train, reported on val and, apart, on test.
            dg.AssetDep([GROUP, "oracle_labels"]),
            dg.AssetDep([GROUP, "backbone"]),
        ],
        automation_condition=FOLLOW,
        group_name=GROUP,
        pool="gpu",
        kinds={"pytorch"},
        description=described(
            f"The {kind}, trained on oracle labels over the frozen backbone.", *HEAD_FACTS
        ),
        owners=owners(run),
        tags={"stage": "heads"},
        metadata=about(leads_to=[[GROUP, "calibration"]]),
    )
    def train_head(context: dg.AssetExecutionContext, machine: Machine) -> dg.MaterializeResult:
        return whole(context, machine, lambda: hydra.train_head(run, kind), held_to, "loss")

    return train_head


def calibration(run: Run) -> dg.AssetsDefinition:
    """Thresholds, fitted on the heads' own scores of val documents, reported on test too."""
    held_to = Checks(
        run,
        [GROUP, "calibration"],
        ("thresholds", "calibrated_keep_rate", "false_drops"),
        lambda: checks.check_calibration(run),
    )

    @dg.asset(
        key=[GROUP, "calibration"],
        check_specs=held_to.specs(),
        code_version=versions.calibration(run),
        deps=[
            dg.AssetDep(
                [GROUP, "oracle_labels"],
                partition_mapping=dg.SpecificPartitionsPartitionMapping(
                    [*label_keys("val"), *label_keys("test")]
                ),
            ),
            dg.AssetDep([GROUP, "probe_head"]),
            dg.AssetDep([GROUP, "judge_head"]),
        ],
        automation_condition=FOLLOW,
        group_name=GROUP,
        pool="gpu",
        kinds={"json"},
        description=described(
            "Thresholds that make drop, band or keep of the heads' scores, and their weights.",
            *("tau_drop, tau_keep", "tau_probe", "achieved_keep, achieved_band, achieved_drop"),
            *("count", "backbone_tokens"),
        ),
        owners=owners(run),
        tags={"stage": "heads"},
        metadata=about(leads_to=[[GROUP, "regrade_plan"]]),
    )
    def calibrate(context: dg.AssetExecutionContext, machine: Machine) -> dg.MaterializeResult:
        picture = "keep_rate_and_reliability"
        return whole(context, machine, lambda: hydra.calibrate_heads(run), held_to, picture)

    return calibrate


def quality_scores(run: Run, source: SourcePlan) -> dg.AssetsDefinition:
    """Scores and decision of every document of a source, a partition a shard."""
    name = source.name
    held_to = Checks(
        run,
        [name, "quality_scores"],
        ("counts", "keep_rate"),
        lambda made: checks.check_grades(run, name, map(int, made)),
    )

    @dg.asset(
        key=[name, "quality_scores"],
        check_specs=held_to.specs(),
        deps=[
            dg.AssetDep([name, "shards"]),
            dg.AssetDep([GROUP, "backbone"]),
            dg.AssetDep([GROUP, "probe_head"]),
            dg.AssetDep([GROUP, "judge_head"]),
            dg.AssetDep([GROUP, "calibration"]),
        ],
        partitions_def=shard_partitions(run.config.prep.num_shards),
        backfill_policy=dg.BackfillPolicy.single_run(),
        automation_condition=REGRADE,
        code_version=versions.grades(run),
        group_name=curated_group(name),
        pool="gpu",
        kinds={"json"},
        description=described(
            "Probe and judge scores of every document, and the decision drop, band or keep.",
            *("early_exits", "failed", "backbone_tokens"),
        ),
        owners=owners(run),
        tags={"stage": "grade"},
        metadata=about(rows=GRADE_ROWS, leads_to=[[name, "curated"]]),
    )
    def grade(
        context: dg.AssetExecutionContext, machine: Machine
    ) -> Iterator[dg.MaterializeResult | dg.AssetCheckResult]:
        yield from each_partition(
            context,
            machine,
            lambda keys: each_shard(run, "grade", name, keys),
            held_to,
            lambda key, output: table(samples.sample_grades(run, name, int(key))),
        )

    return grade
