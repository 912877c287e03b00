"""Assets of HYDRA: backbone, oracle labels, student, heads, their calibration, and scores."""

import dagster as dg

from nmoe_assets.assets.asset import Asset
from nmoe_assets.catalogue import (
    GRADE_ROWS,
    HEAD_FACTS,
    LABEL_ROWS,
    STUDENT_FACTS,
    curated_group,
    table,
)
from nmoe_assets.partitions import label_keys, label_partitions
from nmoe_core.base.result import Result
from nmoe_core.config.attributes import OF_BACKBONE
from nmoe_core.config.run import Run
from nmoe_core.prep.mixture import SourcePlan, run_sources
from nmoe_core.tasks import checks, hydra
from nmoe_core.tasks.attributes import attribute_names
from nmoe_core.tasks.backbone import make_backbone
from nmoe_core.tasks.graph import settings
from nmoe_core.tasks.report import summary
from nmoe_core.tasks.shards import attempt

GROUP = "hydra"
HEADS = ("probe_head", "judge_head")


def heads(run: Run) -> list[str]:
    """Names of the heads' assets; empty if only the student grades, or if the run has no grader."""
    return [*HEADS] * (run.config.grading.grader in ("hydra", "auto"))


def backbone(run: Run) -> dg.AssetsDefinition:
    """The frozen model that computes features."""
    topics = [["curation", "topic_model"]] * run.config.curation.reads_backbone
    of_states = [name for name in attribute_names(run) if name in OF_BACKBONE]
    states = [[one.name, "attributes", name] for one in run_sources(run) for name in of_states]
    return Asset(
        run=run,
        key=[GROUP, "backbone"],
        group=GROUP,
        stage="heads",
        kind="pytorch",
        description="The frozen model that computes features and topics, a checkpoint in the "
        "gpt-oss format. If its kind is tiny, this asset makes it from seeded random numbers.",
        code_version=settings.backbone(run).version,
        downstream=[*([GROUP, name] for name in heads(run)), *topics, *states],
        checks=("readable",),
        check=lambda: checks.check_backbone(run),
    ).unpartitioned(lambda: make_backbone(run))


def oracle_labels(run: Run, sources: list[SourcePlan]) -> dg.AssetsDefinition:
    """Scores of the oracle on train, val and test slices, one partition per slice."""
    names = [source.name for source in sources]

    def label(key: str) -> Result:
        return hydra.label_slices(run, names, [key], is_whole_budget=True)[key]

    return Asset(
        run=run,
        key=[GROUP, "oracle_labels"],
        group=GROUP,
        stage="label",
        kind="json",
        description=f"Scores of documents from the oracle of kind {run.config.oracle.kind}: "
        f"{', '.join(run.rubric.dimensions)}, in the order of the sample's column.",
        facts=(
            *("parse_rate", "salvaged", "failures", "oracle_calls", "labels_reused"),
            *("requests, retries", "tokens_in, tokens_out", "spent", "ledger"),
        ),
        code_version=settings.labels(run).version,
        deps=[
            *([name, "docid_slices"] for name in names),
            # "Materialize all" reaches the labels only through partitioned inputs, and the slices
            # have no partitions.
            *(
                dg.AssetDep([name, "shards"], partition_mapping=dg.AllPartitionMapping())
                for name in names
            ),
        ],
        downstream=[[GROUP, name] for name in ("student", *heads(run), "calibration")],
        columns=LABEL_ROWS,
        pool="gpu",
        partitions=label_partitions,
        checks=("coverage", "parse_rate", "one_scorer"),
        check=lambda made: checks.check_labels(run),
    ).partitioned(
        lambda keys: (attempt(key, label) for key in keys),
        lambda key, result: table(summary.sample_labels(run, key)),
        lambda: table(summary.label_ledger(run), "ledger"),
    )


def student(run: Run) -> dg.AssetsDefinition:
    """The student: a scorer without a backbone, and the baseline of the heads."""
    return Asset(
        run=run,
        key=[GROUP, "student"],
        group=GROUP,
        stage="heads",
        kind="numpy",
        description="Ridge regression of the oracle's scores on hashed n-grams of token bytes. It "
        "needs no backbone, so a head must rank better to justify its cost. It grades if "
        "[grading] grader is `student`, or if `auto` chooses it; otherwise it drops clearly bad "
        "documents before the probe reads them.",
        facts=STUDENT_FACTS,
        code_version=settings.student(run).version,
        deps=[[GROUP, "oracle_labels"]],
        downstream=[[GROUP, name] for name in (*heads(run), "calibration")],
        checks=("readable",),
        check=lambda: checks.check_student(run),
    ).unpartitioned(lambda: hydra.train_student(run))


def head(run: Run, kind: hydra.HeadKind) -> dg.AssetsDefinition:
    """The probe or the judge, fitted on train and reported on val and, separately, on test."""
    return Asset(
        run=run,
        key=[GROUP, f"{kind}_head"],
        group=GROUP,
        stage="heads",
        kind="pytorch",
        description=f"The {kind}: a head over the states of the frozen backbone, trained on the "
        "oracle's labels and compared with the student.",
        facts=HEAD_FACTS,
        code_version=settings.head(run, kind).version,
        deps=[[GROUP, name] for name in ("oracle_labels", "backbone", "student")],
        downstream=[[GROUP, "calibration"]],
        pool="gpu",
        checks=("promotion", "baselines"),
        check=lambda: checks.check_head(run, kind),
    ).unpartitioned(lambda: hydra.train_head(run, kind), "loss")


def calibration(run: Run, sources: list[SourcePlan]) -> dg.AssetsDefinition:
    """Thresholds, fitted on the grader's scores of val documents and also reported on test."""
    read = dg.SpecificPartitionsPartitionMapping([*label_keys("val"), *label_keys("test")])
    languages = [key for source in sources for key in graded_by_language(run, source.name)]
    return Asset(
        run=run,
        key=[GROUP, "calibration"],
        group=GROUP,
        stage="heads",
        kind="json",
        description="Thresholds that turn the grader's scores into drop, band or keep, and the "
        "weights of the dimensions.",
        facts=(
            *(
                "tau_drop, tau_keep",
                "tau_probe",
                "tau_student",
                "achieved_keep, achieved_band, achieved_drop",
            ),
            *("count", "grader", "backbone_tokens", "cost"),
        ),
        code_version=settings.calibration(run).version,
        deps=[
            dg.AssetDep([GROUP, "oracle_labels"], partition_mapping=read),
            *([GROUP, name] for name in (*heads(run), "student")),
            *(dg.AssetDep(key, partition_mapping=dg.AllPartitionMapping()) for key in languages),
        ],
        downstream=[[GROUP, "regrade_plan"]],
        pool="gpu",
        checks=("thresholds", "calibrated_keep_rate", "false_drops"),
        check=lambda: checks.check_calibration(run),
    ).unpartitioned(lambda: hydra.calibrate_heads(run), "keep_rate_and_reliability")


def graded_by_language(run: Run, source: str) -> list[list[str]]:
    """Key of the language attribute of a source, if thresholds differ by language."""
    is_read = run.config.calibration.target_by == "language"
    return [[source, "attributes", "language"]] if is_read else []


def quality_scores(run: Run, source: SourcePlan) -> dg.AssetsDefinition:
    """Scores and decision of every document of a source, one partition per shard."""
    name = source.name
    is_off = run.config.grading.is_off
    read = [] if is_off else [*heads(run), "student", "calibration"]
    read += ["backbone"] if heads(run) else []
    return Asset(
        run=run,
        key=[name, "quality_scores"],
        group=curated_group(name),
        stage="grade",
        kind="json",
        description="One row per document with the decision keep, since the run has no grader."
        if is_off
        else "The grader's scores of every document, and the decision drop, band or keep, which "
        "the thresholds of the calibration give.",
        facts=("early_exits", "failed", "backbone_documents", "backbone_tokens"),
        code_version=settings.grades(run).version,
        deps=[[name, "shards"], *graded_by_language(run, name), *([GROUP, made] for made in read)],
        downstream=[[name, "curated"]],
        columns=GRADE_ROWS,
        pool="gpu",
        checks=checks.grade_checks(run),
        check=lambda made: checks.check_grades(run, name, map(int, made)),
    ).sharded(
        "grade",
        name,
        lambda key, result: {} if is_off else table(summary.sample_grades(run, name, int(key))),
    )
