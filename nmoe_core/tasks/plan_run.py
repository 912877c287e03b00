"""What a run would still do: shards to prepare, grades to give again, curated shards to follow.

Writes nothing. Costs a sample of each source that has shards to make, digests of the checkpoint,
heads and score files, and, where asked for, a reading of the sources.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from loader.files.format import load_manifest
from nmoe_core.base.errors import NmoeError
from nmoe_core.config.run import Run
from nmoe_core.prep.estimate import PlannedSplit, plan_prep
from nmoe_core.prep.mixture import SourcePlan, prep_settings
from nmoe_core.sources.open import open_reader
from nmoe_core.tasks.plan_regrade import RegradePlan, plan_regrade


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
    paths = (shard.manifest for shard in run.tree.shards(source.name, num_shards, split))
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
    from nmoe_core.curate.shards.curated import current_inputs, planned_tokens
    from nmoe_core.tasks.curate import curate_settings

    settings = curate_settings(run, source)
    stale: dict[str, str] = {}
    planned: dict[int, int] = {}
    for shard in run.tree.shards(source, run.config.prep.num_shards):
        if not all(path.is_file() for path in (shard.manifest, shard.scores, shard.topics)):
            continue
        try:
            inputs = current_inputs(shard, settings, planned)
            if reasons := inputs.stale():
                stale[shard.name] = ", ".join(reasons)
                if settings.resume_from_token:  # where later shards begin follows from this one
                    planned[shard.bucket] = planned_tokens(inputs)
        except NmoeError as error:
            stale[shard.name] = str(error)
    return stale
