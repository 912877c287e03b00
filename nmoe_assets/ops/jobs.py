"""The jobs of single tasks. Each task has one asset job over all sources: `prep`, `prep_valid`,
`label`, `train_heads`, `grade`, `curate`, with `[publish]` also `publish`; and `verify`, which only
checks.

A run covers all partitions unless its tags name a range, as backfills, sensors and
`dagster job execute --tags` do.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import dagster as dg

from nmoe_assets.assets.attributes import attribute_keys, selections
from nmoe_assets.assets.curation import seen_names
from nmoe_assets.assets.hydra import graded_by_language, heads
from nmoe_assets.assets.recorded import Recorded, needed
from nmoe_assets.automation import mode_of
from nmoe_assets.inputs import REBUILD
from nmoe_assets.names import asset_key, prefixed
from nmoe_assets.partitions import label_partitions, range_tags, shard_partitions
from nmoe_core.config.run import Run
from nmoe_core.prep.mixture import SourcePlan
from nmoe_core.tasks.graph.states import Graph

AssetJob = Any  # Dagster does not export the return type of define_asset_job


@dataclass(frozen=True)
class TaskJob:
    """An asset job, and the partitions of its assets; unpartitioned assets run with them."""

    name: str
    keys: Sequence[dg.AssetKey]
    partitions: dg.StaticPartitionsDefinition | None = None
    metadata: Mapping[str, dg.MetadataValue] = field(default_factory=dict)

    def definition(self):  # Dagster does not export the return type of define_asset_job
        """The asset job, checks included."""
        made = ", ".join(dict.fromkeys(key.path[-1] for key in self.keys))
        note = (
            " Choose some partitions or all; current partitions are not made again, except in a "
            f"run with the tag `{REBUILD}` = `true`."
        )
        return dg.define_asset_job(
            self.name,
            selection=dg.AssetSelection.assets(*self.keys),
            description=f"Makes {made}." + (note if self.partitions else ""),
            run_tags=self.run_tags(),
            metadata=self.metadata,
        )

    def run_tags(self) -> dict[str, str]:
        """Tags of a run over all partitions."""
        return range_tags(self.partitions.get_partition_keys()) if self.partitions else {}

    def execute_needed(
        self,
        definitions: dg.Definitions,
        recorded: Recorded,
        states: Graph,
        console_level: str,
        tags: Mapping[str, str] | None = None,
    ) -> dg.ExecuteInProcessResult | None:
        """Execute the job in this process for the assets that have something to do, over the range
        of their partitions; None, without a run, if all is done. `recorded`: the events of all
        assets; `states`: the state of every output's files."""
        found = needed(self.keys, recorded, states)
        if self.keys and not found:
            return None
        range_ = self.run_tags()
        if self.partitions:
            parts = set().union(*found.values())
            ordered = [one for one in self.partitions.get_partition_keys() if one in parts]
            range_ = range_tags(ordered) if ordered else range_
        is_whole = found.keys() == {*self.keys}
        return definitions.resolve_job_def(self.name).execute_in_process(
            instance=recorded.instance,
            asset_selection=None if is_whole else [*found],
            tags={**range_, **(tags or {})},
            raise_on_error=False,
            run_config=console(console_level),
        )


def console(level: str) -> dict[str, Any]:
    """The run configuration that makes a job's console show lines of this level and above."""
    return {"loggers": {"console": {"config": {"log_level": level}}}}


def task_jobs(run: Run, sources: list[SourcePlan]) -> list[TaskJob]:
    """The jobs in the order of the pipeline."""

    def job(
        name: str,
        keys: Sequence[Sequence[str]],
        partitions: dg.StaticPartitionsDefinition | None = None,
        **metadata: dg.MetadataValue,
    ) -> TaskJob:
        made = [asset_key(run, key) for key in keys]
        return TaskJob(prefixed(run, name), made, partitions, metadata)

    def of_sources(*names: str) -> list[tuple[str, str]]:
        return [(source.name, name) for name in names for source in sources]

    table = run.config.prep
    trained = ["backbone", "student", *heads(run), "calibration"]
    shards = shard_partitions(table.num_shards)
    valid = [s for s in sources if s.has_valid]
    regrade_plan = dg.MetadataValue.asset(asset_key(run, ("hydra", "regrade_plan")))
    # Thresholds need the languages, so the job that makes shards makes them too.
    first = [tuple(key) for source in sources for key in graded_by_language(run, source.name)]
    recorded = [tuple(key) for source in sources for key in attribute_keys(run, source.name)]
    curated = [key for key in recorded if key not in first]
    curated += of_sources("topics")
    curated += map(tuple, selections(run, [source.name for source in sources]))
    if run.config.mixture.buckets.by:
        curated += [("curation", "buckets"), *of_sources("buckets")]
    curated += of_sources("curated", *seen_names(run), "curated_manifest")
    curated = [("curation", "topic_model"), *curated, ("mixture", "loader_plan")]
    prepared = [*of_sources("shards", "manifest"), *first]
    if run.config.grading.is_off:
        jobs = [
            job("prep", prepared, shards),
            job("grade", of_sources("quality_scores"), shards),
            job("curate", [("hydra", "backbone"), *curated], shards),
        ]
    else:
        jobs = [
            job("prep", [*prepared, *of_sources("docid_slices")], shards),
            job("label", [("hydra", "oracle_labels")], label_partitions),
            job("train_heads", [("hydra", name) for name in trained]),
            job("grade", of_sources("quality_scores"), shards, what_it_would_change=regrade_plan),
            job("curate", curated, shards),
        ]
    if run.config.publish.url:
        jobs.append(job("publish", [("mixture", "published_plan")]))
    # a separate job, since a job has one partitions definition and valid has another number of
    # shards
    if valid:
        keys = [(s.name, name) for name in ("valid_shards", "valid_manifest") for s in valid]
        jobs.insert(1, job("prep_valid", keys, shard_partitions(table.num_valid_shards)))
    return jobs


def follow_job(run: Run, jobs: Sequence[TaskJob]) -> TaskJob:
    """`follow`: the assets with a partition per shard, and those without partitions, that
    automation makes again when a source changes. One run makes the whole chain, so no asset waits
    for the next evaluation of its condition."""
    shards = shard_partitions(run.config.prep.num_shards)
    keys = [key for job in jobs if job.partitions is shards for key in job.keys]
    prepared = set(jobs[0].keys)
    followed = [key for key in keys if key in prepared or mode_of(run, key.path[-1]) != "off"]
    return TaskJob(prefixed(run, "follow"), followed, shards)


def verify_job(run: Run, sources: list[SourcePlan]):  # as `TaskJob.definition`
    """`verify`: runs the checks of every manifest and of the plan again, without making assets."""
    keys = [(s.name, name) for s in sources for name in ("manifest", "curated_manifest")]
    keys += [(s.name, "valid_manifest") for s in sources if s.has_valid]
    keys.append(("mixture", "loader_plan"))
    return dg.define_asset_job(
        prefixed(run, "verify"),
        selection=dg.AssetSelection.checks_for_assets(*(asset_key(run, key) for key in keys)),
        description="Checksums, indexes and tokens of every manifest, and the plan's digests.",
    )
