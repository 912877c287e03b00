"""What a run would still do: shards to prepare, grades to give again, curated shards to follow.

Writes nothing. Costs a sample of each source that has shards to make, digests of the checkpoint,
heads and score files, and, where asked for, a reading of the sources.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from loader.format import MANIFEST_NAME, load_manifest
from nmoe_core.config import Run
from nmoe_core.errors import NmoeError
from nmoe_core.fingerprint import recorded, sha256_file
from nmoe_core.mixture import SourcePlan, prep_settings
from nmoe_core.prep_plan import PlannedSplit, plan_prep
from nmoe_core.shards.manifest import shard_dir_name
from nmoe_core.sources.spec import open_reader
from nmoe_core.stages.plan_regrade import RegradePlan, plan_regrade


@dataclass(frozen=True, slots=True)
class SplitState:
    """Shards of a split that are there, and the estimate for those that are not.

    `is_changed` is None where the source was not read.
    """

    source: str
    split: str
    num_shards: int
    made: int
    is_changed: bool | None
    estimate: PlannedSplit | None


@dataclass(frozen=True, slots=True)
class RunPlan:
    """All that a run would do. `curated` has, of each source, the shards to curate and why."""

    splits: list[SplitState]
    regrade: RegradePlan
    curated: dict[str, dict[str, str]]


def plan_run(
    run: Run,
    sources: Sequence[SourcePlan],
    *,
    sample_documents: int = 0,
    read_sources: bool = False,
) -> RunPlan:
    """Plan prep, regrade and curation; see `plan_regrade` for `sample_documents`."""
    jobs = [(s, split) for s in sources for split in ("train", "valid")]
    jobs = [(s, split) for s, split in jobs if split == "train" or s.has_valid]
    names = [source.name for source in sources]
    return RunPlan(
        splits=[_split_state(run, *job, read_sources) for job in jobs],
        regrade=plan_regrade(run, names, sample_documents),
        curated={name: _stale_curated(run, name) for name in names},
    )


def _split_state(run: Run, source: SourcePlan, split: str, read_sources: bool) -> SplitState:
    num_shards = prep_settings(run, source, split).num_shards
    directory = run.paths.split(source.name, split)
    paths = [directory / shard_dir_name(i) / MANIFEST_NAME for i in range(num_shards)]
    made = [path for path in paths if path.is_file()]
    changed = _is_changed(run, source, split, made[0]) if read_sources and made else None
    estimate = None
    if changed or len(made) < num_shards:
        estimate = plan_prep(run, [(source, split)])[0]
    return SplitState(source.name, split, num_shards, len(made), changed, estimate)


def _is_changed(run: Run, source: SourcePlan, split: str, made: Path) -> bool:
    before = load_manifest(made).extra["fingerprints"]["source"]
    return open_reader(source.spec, run.base, split).revision() != before


def _stale_curated(run: Run, source: str) -> dict[str, str]:
    """Shard -> why it would be curated again, from what lies there now."""
    from nmoe_core.curate.consumed import CURATION_NAME
    from nmoe_core.curate.inputs import SCORES_NAME
    from nmoe_core.curate.topics import TOPICS_NAME
    from nmoe_core.hydra.grade_file import read_graded
    from nmoe_core.stages.curate import curate_settings

    stale = {}
    for bucket in range(run.config.prep.num_shards):
        name = shard_dir_name(bucket)
        parent = run.paths.split(source, "train") / name / MANIFEST_NAME
        scores = run.paths.quality / source / name / SCORES_NAME
        topics = run.paths.topics / source / name / TOPICS_NAME
        if not (parent.is_file() and scores.is_file() and topics.is_file()):
            continue
        before = recorded(run.paths.curated / source / "train" / name / CURATION_NAME)
        if before is None:
            stale[name] = "not curated yet"
            continue
        try:
            wanted = {
                **curate_settings(run, source).fingerprints(),
                "parent": load_manifest(parent).content_digest(),
                "quality": read_graded(scores.parent).checksum,
                "topics": sha256_file(topics),
            }
        except NmoeError as error:
            stale[name] = str(error)
            continue
        changed = [key for key in wanted if before.get(key) != wanted[key]]
        if changed:
            stale[name] = ", ".join(changed)
    return stale
