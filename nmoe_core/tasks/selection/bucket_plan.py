"""The inputs of the loader plan: the stages and manifests of sources or, if the run has buckets, of
their buckets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from loader.files.format import load_manifest
from loader.plan.mixture import Stage
from loader.plan.settings import RunSettings
from nmoe_core.config.run import Run
from nmoe_core.curate.buckets.stages import bucket_phases, bucket_stages
from nmoe_core.prep.mixture import flow_stages, own_weights, run_stages, with_weights


class PlanInputs(NamedTuple):
    """Stages, the manifest of each source that they name, and the settings with their phases."""

    stages: tuple[Stage, ...]
    manifests: dict[str, Path]
    settings: RunSettings


def plan_inputs(run: Run, sources: Sequence[str]) -> PlanInputs:
    """The inputs of the run's plan. Raises ConfigError if `mixture.weights` has other names than
    the plan's sources (E-MIX-WEIGHTS), and FormatError if a manifest is missing or damaged."""
    of_sources = {name: run.tree.curated_manifest(name) for name in sources}
    if not run.config.mixture.buckets.by:
        return PlanInputs(run_stages(run), of_sources, run.loader)
    manifests: dict[str, Path] = {}
    sizes: dict[str, dict[str, int]] = {}
    for source, whole in of_sources.items():
        found = bucket_paths(run, source)
        sizes[source] = {name: load_manifest(path).total_tokens for name, path in found.items()}
        manifests |= found or {source: whole}  # a source without documents is then refused
    stages = bucket_stages(flow_stages(run), sizes)
    weights = own_weights(run)
    if weights is not None:
        stages = with_weights(stages, weights, run.resolve(str(run.config.mixture.weights)))
    settings = replace(run.loader, phases=bucket_phases(run.loader.phases, sizes))
    return PlanInputs(stages, manifests, settings)


def bucket_paths(run: Run, source: str) -> dict[str, Path]:
    """The manifests of the buckets of a source by the buckets' names in the plan, sorted."""
    found = {}
    for path in run.tree.bucket_manifests(source):
        bucket = load_manifest(path).extra["source_info"]["bucket"]
        found[f"{source}/{bucket}"] = path
    return dict(sorted(found.items()))
