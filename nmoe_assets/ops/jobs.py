"""The jobs of single tasks. Each is one asset job over all sources: `prep`, `prep_valid`, `label`,
`train_heads`, `grade`, `curate`; and `verify`, which only checks.

A run covers all partitions unless its tags name a range, as backfills, sensors and
`dagster job execute --tags` do.
"""

from dataclasses import dataclass

import dagster as dg

from nmoe_assets.assets.partitions import label_partitions, range_tags, shard_partitions
from nmoe_core.config.run import Run
from nmoe_core.prep.mixture import SourcePlan

_HEADS = ("backbone", "probe_head", "judge_head", "calibration")


@dataclass(frozen=True)
class TaskJob:
    """An asset job, and the partitions of its assets; those without partitions run along."""

    name: str
    keys: tuple[tuple[str, ...], ...]
    partitions: dg.StaticPartitionsDefinition | None = None

    def definition(self):  # Dagster does not export the type of what define_asset_job returns
        """The asset job, checks included."""
        made = ", ".join("/".join(key) for key in self.keys)
        note = " Choose some partitions or all; current ones are left alone."
        return dg.define_asset_job(
            self.name,
            selection=dg.AssetSelection.assets(*(dg.AssetKey(key) for key in self.keys)),
            executor_def=dg.in_process_executor,
            description=f"Makes {made}." + (note if self.partitions else ""),
            run_tags=self.run_tags(),
        )

    def run_tags(self) -> dict[str, str]:
        """Tags of a run over all partitions."""
        return range_tags(self.partitions.get_partition_keys()) if self.partitions else {}


def task_jobs(run: Run, sources: list[SourcePlan]) -> list[TaskJob]:
    """The jobs in the order of the pipeline."""

    def of_sources(*names: str) -> tuple[tuple[str, str], ...]:
        return tuple((source.name, name) for name in names for source in sources)

    table, topics = run.config.prep, ("curation", "topic_model")
    shards, valid = shard_partitions(table.num_shards), [s for s in sources if s.has_valid]
    jobs = [
        TaskJob("prep", of_sources("shards", "manifest", "docid_slices"), shards),
        TaskJob("label", (("hydra", "oracle_labels"),), label_partitions),
        TaskJob("train_heads", tuple(("hydra", name) for name in _HEADS)),
        TaskJob("grade", of_sources("quality_scores"), shards),
        TaskJob(
            "curate",
            (
                topics,
                *of_sources("topics", "curated", "curated_manifest"),
                ("mixture", "loader_plan"),
            ),
            shards,
        ),
    ]
    if valid:  # their number of partitions differs, and a job has one definition of partitions
        keys = tuple((s.name, name) for name in ("valid_shards", "valid_manifest") for s in valid)
        jobs.insert(1, TaskJob("prep_valid", keys, shard_partitions(table.num_valid_shards)))
    return jobs


def verify_job(sources: list[SourcePlan]):  # as `TaskJob.definition`
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
