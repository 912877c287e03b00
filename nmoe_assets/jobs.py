"""Jobs. A stage job is an asset job over the partitions of one source and stage; the six named jobs
run stage jobs in order over all their partitions, in process, on the same instance, and fail when
one fails. Dagster does not hold assets of different partitions in one job, hence the two levels.
"""

from collections.abc import Callable
from dataclasses import dataclass

import dagster as dg

from nmoe_assets.cost import Stopwatch
from nmoe_assets.interrupts import interrupts_since
from nmoe_assets.metadata import table
from nmoe_assets.partitions import label_partitions, shard_partitions
from nmoe_assets.resources import Machine
from nmoe_core.config.run import Run
from nmoe_core.prep.mixture import SourcePlan

# Dagster logs every event at DEBUG; they stay in the UI, the console shows progress and errors.
QUIET_CONSOLE = {"loggers": {"console": {"config": {"log_level": "INFO"}}}}
Resolve = Callable[[str], dg.JobDefinition]
PART_OF = "nmoe/part_of"
RANGE_START, RANGE_END = "dagster/asset_partition_range_start", "dagster/asset_partition_range_end"


@dataclass(frozen=True)
class StageJob:
    """An asset job and the partitions it has to run over."""

    name: str
    keys: tuple[tuple[str, ...], ...]
    partitions: dg.StaticPartitionsDefinition | None = None

    def definition(self):  # dagster does not export the type of what define_asset_job returns
        """The asset job, checks included."""
        selection = dg.AssetSelection.assets(*(dg.AssetKey(key) for key in self.keys))
        return dg.define_asset_job(
            self.name,
            selection=selection,
            executor_def=dg.in_process_executor,
            description=self.description,
        )

    @property
    def description(self) -> str:
        """What a run makes, and over what."""
        made = ", ".join("/".join(key) for key in self.keys)
        if self.partitions is None:
            return f"Makes {made}."
        keys = self.partitions.get_partition_keys()
        return (
            f"Makes {made}. Partitions {keys[0]} to {keys[-1]}: choose some, or all of them. "
            "Those that are current are left alone."
        )

    def tags(self) -> dict[str, str]:
        """Tags of a run over all partitions."""
        if self.partitions is None:
            return {}
        keys = self.partitions.get_partition_keys()
        return {RANGE_START: keys[0], RANGE_END: keys[-1]}


def _ready() -> None:
    """All that the parts of a job need is there."""


def stage_jobs(run: Run, sources: list[SourcePlan]) -> dict[str, list[StageJob]]:
    """The stage jobs of each named job, in the order they run."""
    shards = shard_partitions(run.config.prep.num_shards)
    prep = [job for source in sources for job in _prep_jobs(run, source)]
    label = [StageJob("label_oracle", (("hydra", "oracle_labels"),), label_partitions)]
    names = ("backbone", "probe_head", "judge_head", "calibration")
    heads = [StageJob("train_and_calibrate", tuple(("hydra", name) for name in names))]
    grade = [StageJob(f"grade_{s.name}", ((s.name, "quality_scores"),), shards) for s in sources]
    curate = [StageJob("fit_topics", (("curation", "topic_model"),))]
    for s in sources:
        keys = tuple((s.name, name) for name in ("topics", "curated", "curated_manifest"))
        curate.append(StageJob(f"curate_{s.name}", keys, shards))
    curate.append(StageJob("plan_loader", (("mixture", "loader_plan"),)))
    return {"prep": prep, "label": label, "train_heads": heads, "grade": grade, "curate": curate}


def named_jobs(
    stages: dict[str, list[StageJob]], resolve: Resolve, before_all: Callable[[], None] = _ready
) -> list[dg.JobDefinition]:
    """`prep`, `label`, `train_heads`, `grade`, `curate`, and `pipeline`, which is all of them.

    `resolve` gives a stage job by its name when a named job runs. `before_all` is called at the
    start of `pipeline`, and raises where a later part could not run.
    """
    everything = [job for part in stages.values() for job in part]
    whole = _named_job("pipeline", everything, resolve, before_all)
    return [whole, *(_named_job(name, jobs, resolve) for name, jobs in stages.items())]


def verify_job(sources: list[SourcePlan]):  # as `StageJob.definition`
    """`verify`: the checks of every manifest and of the plan again, making nothing."""
    keys = [(s.name, name) for s in sources for name in ("manifest", "curated_manifest")]
    keys += [(s.name, "valid_manifest") for s in sources if s.has_valid]
    keys.append(("mixture", "loader_plan"))
    return dg.define_asset_job(
        "verify",
        selection=dg.AssetSelection.checks_for_assets(*(dg.AssetKey(key) for key in keys)),
        executor_def=dg.in_process_executor,
        description="Checksums, indexes and tokens of every manifest, and the plan's digests.",
    )


def _named_job(
    name: str, parts: list[StageJob], resolve: Resolve, before: Callable[[], None] = _ready
) -> dg.JobDefinition:
    steps = "".join(f"\n{i}. `{part.name}`" for i, part in enumerate(parts, 1))

    @dg.op(name=f"run_{name}", out=dg.Out(dg.Nothing))
    def run_parts(context: dg.OpExecutionContext, machine: Machine) -> None:
        before()
        rows, links, whole = [], {}, Stopwatch()
        with interrupts_since() as raise_if_interrupted:
            for i, part in enumerate(parts, 1):
                context.log.info(f"{part.name} ({i} of {len(parts)})")
                job, watch = resolve(part.name), Stopwatch()
                outcome = job.execute_in_process(
                    run_config=QUIET_CONSOLE,
                    instance=context.instance,
                    tags={**part.tags(), PART_OF: context.run_id},
                    raise_on_error=False,
                )
                cost = watch.read()
                raise_if_interrupted()
                rows.append({"part": part.name, **cost.facts(machine)})
                links[part.name] = dg.MetadataValue.dagster_run(outcome.run_id)
                context.log.info(f"{part.name}: {cost} (run {outcome.run_id})")
                if not outcome.success:
                    raise _failure(part, outcome)
        facts = whole.read().facts(machine)
        context.add_output_metadata({**facts, **table(rows, "parts"), **links})

    @dg.job(
        name=name,
        description=f"These jobs one after the other, each over all its partitions:\n{steps}",
        config=QUIET_CONSOLE,
        executor_def=dg.in_process_executor,
    )
    def named_job() -> None:
        run_parts()

    return named_job


def _failure(part: StageJob, outcome: dg.ExecuteInProcessResult) -> dg.Failure:
    return dg.Failure(
        f"{part.name} failed: {_first_error(outcome)} (run {outcome.run_id})",
        metadata={part.name: dg.MetadataValue.dagster_run(outcome.run_id)},
        allow_retries=False,
    )


def _first_error(outcome: dg.ExecuteInProcessResult) -> str:
    """The innermost error of the first step that failed, or the check that did."""
    for event in outcome.all_events:
        if event.event_type_value == "STEP_FAILURE":
            return innermost_error(event) or " ".join((event.message or "").split())
    return "a blocking check did not pass"


def innermost_error(event: dg.DagsterEvent) -> str:
    """What a failed step says in one line: the first cause, without its class's path."""
    error = event.step_failure_data.error
    while error is not None and error.cause is not None:
        error = error.cause
    if error is None:
        return ""
    _, found, rest = error.message.partition(f"{error.cls_name}: ")
    return " ".join((rest if found else error.message).split())


def _prep_jobs(run: Run, source: SourcePlan) -> list[StageJob]:
    keys = tuple((source.name, name) for name in ("shards", "manifest", "docid_slices"))
    jobs = [StageJob(f"prep_{source.name}", keys, shard_partitions(run.config.prep.num_shards))]
    if source.has_valid:
        keys = tuple((source.name, name) for name in ("valid_shards", "valid_manifest"))
        partitions = shard_partitions(run.config.prep.num_valid_shards)
        jobs.append(StageJob(f"prep_valid__{source.name}", keys, partitions))
    return jobs
