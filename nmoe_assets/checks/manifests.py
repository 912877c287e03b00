"""Checks with their own steps: the checks of all manifests and of the loader plan."""

import dagster as dg

from nmoe_assets.checks.asset_checks import Checks
from nmoe_core.config.run import Run
from nmoe_core.prep.mixture import SourcePlan
from nmoe_core.tasks import checks
from nmoe_core.tasks.checks import Verdicts


def manifest_checks(run: Run, sources: list[SourcePlan]) -> list[dg.AssetChecksDefinition]:
    """Checks of all manifests and of the plan."""
    found = []
    for source in sources:
        splits = ("train", "valid") if source.has_valid else ("train",)
        found += [_manifest(run, source.name, split).definition("prep") for split in splits]
        found.append(_curated(run, source.name).definition("curate"))
    key = ["mixture", "loader_plan"]
    names = checks.plan_checks(run)
    plan = Checks(run, key, names, lambda: checks.check_plan(run, sources))
    return [*found, plan.definition("plan")]


def _manifest(run: Run, source: str, split: str) -> Checks:
    names = checks.MANIFEST_CHECKS
    if split == "train":
        key = [source, "manifest"]
        return Checks(run, key, names, lambda: checks.check_manifest(run, source, split))

    def check() -> Verdicts:
        return checks.check_manifest(run, source, split) | checks.check_leak(run, source)

    return Checks(run, [source, "valid_manifest"], (*names, "no_leak"), check)


def _curated(run: Run, source: str) -> Checks:
    key = [source, "curated_manifest"]
    if run.config.contamination.max_share is None:
        return Checks(run, key, checks.CURATED_CHECKS, lambda: checks.check_curated(run, source))

    def check() -> Verdicts:
        return checks.check_curated(run, source) | checks.check_contamination(run, source)

    return Checks(run, key, (*checks.CURATED_CHECKS, "contamination"), check)
