"""The code location: `nmoe_assets.definitions.defs`, for the run that `NMOE_CONFIG` names."""

import warnings

import dagster as dg

from nmoe_assets import curation, hydra, sources
from nmoe_assets.jobs import named_jobs, stage_jobs
from nmoe_assets.run import current_run
from nmoe_core.config import Run
from nmoe_core.mixture import SourcePlan, run_sources


def build_definitions(run: Run) -> dg.Definitions:
    """All assets, checks and jobs of a run."""
    with warnings.catch_warnings():
        # backfill_policy is marked beta; it is used as documented, and tested.
        warnings.simplefilter("ignore", dg.BetaWarning)
        return _definitions(run)


def _definitions(run: Run) -> dg.Definitions:
    plans = run_sources(run)
    jobs = stage_jobs(run, plans)
    return dg.Definitions(
        assets=[
            *(asset for plan in plans for asset in _source_assets(run, plan)),
            hydra.backbone(run),
            hydra.oracle_labels(run, plans),
            hydra.head(run, "probe"),
            hydra.head(run, "judge"),
            hydra.calibration(run),
            curation.topic_model(run, plans),
            curation.loader_plan(run, plans),
        ],
        asset_checks=[check for plan in plans for check in _source_checks(run, plan)],
        jobs=[
            *named_jobs(jobs),
            *(job.definition() for part in jobs.values() for job in part),
        ],
    )


def _source_assets(run: Run, plan: SourcePlan) -> list[dg.AssetSpec | dg.AssetsDefinition]:
    assets: list[dg.AssetSpec | dg.AssetsDefinition] = [sources.documents(run, plan)]
    for split in ("train", "valid") if plan.has_valid else ("train",):
        assets += [sources.shards(run, plan, split), sources.manifest(run, plan, split)]
    return [
        *assets,
        sources.docid_slices(run, plan),
        hydra.quality_scores(run, plan),
        curation.topics(run, plan),
        curation.curated(run, plan),
        curation.curated_manifest(run, plan),
    ]


def _source_checks(run: Run, plan: SourcePlan) -> list[dg.AssetChecksDefinition]:
    checks = [sources.manifest_checks(run, plan, "train")]
    if plan.has_valid:
        checks += [sources.manifest_checks(run, plan, "valid"), sources.leak_check(run, plan)]
    return checks


defs = build_definitions(current_run())
