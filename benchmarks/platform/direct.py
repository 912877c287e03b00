"""The main job without Dagster: the same calls of `nmoe_core`, in the same order.

python -m benchmarks.platform.direct CONFIG [--bare]

`--bare` leaves out what the platform adds to the work itself: checks, samples and pictures.
"""

from __future__ import annotations

import sys

from nmoe_assets.partitions import label_partitions
from nmoe_core.config.run import Run
from nmoe_core.prep.mixture import SourcePlan, run_sources
from nmoe_core.tasks import backbone, checks, curate, hydra, prep
from nmoe_core.tasks.report import summary


def prepare(run: Run, source: SourcePlan, bare: bool = False) -> None:
    """What `prep` and `prep_valid` do for one source."""
    table, name = run.config.prep, source.name
    for split in ("train", "valid") if source.has_valid else ("train",):
        buckets = range(table.num_shards if split == "train" else table.num_valid_shards)
        prep.make_shards(run, source, split, buckets)
        prep.make_manifest(run, source, split)
        if split == "train":
            prep.make_slices(run, source.name)
        if not bare:
            for bucket in buckets:
                summary.sample_documents(run, name, split, bucket)
            checks.check_shards(run, name, split, buckets)
            checks.check_manifest(run, name, split)
            if split == "train":
                checks.check_slices(run, name)
            else:
                checks.check_leak(run, name)


def run_directly(run: Run, bare: bool = False) -> None:
    """What `pipeline` does."""
    sources = run_sources(run)
    names = [source.name for source in sources]
    buckets = range(run.config.prep.num_shards)
    for source in sources:
        prepare(run, source, bare)
    for key in label_partitions.get_partition_keys():
        hydra.label_slices(run, names, [key])
        if not bare:
            summary.sample_labels(run, key)
    backbone.make_backbone(run)
    for kind in ("probe", "judge"):
        hydra.train_head(run, kind)
    hydra.calibrate_heads(run)
    for name in names:
        for bucket in buckets:
            hydra.grade_shards(run, name, [bucket])
            if not bare:
                summary.sample_grades(run, name, bucket)
    curate.fit_topics(run, names)
    for name in names:
        for bucket in buckets:
            curate.assign_shard_topics(run, name, [bucket])
        for bucket in buckets:
            curate.curate_shards(run, name, [bucket])
        curate.combine(run, name)
    curate.make_plan(run, names, [source.name for source in sources if source.has_valid])
    if not bare:
        _check(run, sources)


def _check(run: Run, sources: list[SourcePlan]) -> None:
    buckets = range(run.config.prep.num_shards)
    checks.check_labels(run)
    checks.check_backbone(run)
    for kind in ("probe", "judge"):
        checks.check_head(run, kind)
    checks.check_calibration(run)
    checks.check_topic_model(run)
    for source in sources:
        checks.check_grades(run, source.name, buckets)
        checks.check_topics(run, source.name, buckets)
        checks.check_curated_shards(run, source.name, buckets)
        checks.check_curated(run, source.name)
    checks.check_plan(run, sources)


if __name__ == "__main__":
    run_directly(Run(sys.argv[1]), bare="--bare" in sys.argv)
