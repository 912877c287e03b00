"""The code location: `nmoe_assets.definitions.defs`, for the run that `NMOE_CONFIG` names."""

import warnings

import dagster as dg

from nmoe_assets import checks, curation, hydra, regrade, sensors, sources
from nmoe_assets.automation import automation_sensor
from nmoe_assets.interrupts import keep_ignored
from nmoe_assets.jobs import named_jobs, stage_jobs, verify_job
from nmoe_assets.resources import resources
from nmoe_assets.retention import retention_job, retention_schedules
from nmoe_assets.run import current_run
from nmoe_core.config.run import Run
from nmoe_core.prep.mixture import SourcePlan, run_sources
from nmoe_core.tasks.checkpoints import require_checkpoints


def build_definitions(run: Run) -> dg.Definitions:
    """All assets, checks, jobs, sensors and schedules of a run."""
    with warnings.catch_warnings():
        # backfill_policy is marked beta; it is used as documented, and tested.
        warnings.simplefilter("ignore", dg.BetaWarning)
        return _definitions(run)


def _definitions(run: Run) -> dg.Definitions:
    plans = run_sources(run)
    jobs = stage_jobs(run, plans)
    # Jobs are compared by identity: a sensor has to name the very ones that are listed.
    asset_jobs = {job.name: job.definition() for part in jobs.values() for job in part}
    verify, retention = (
        verify_job(plans),
        retention_job(run, lambda: made.resolve_asset_graph().asset_check_keys),
    )
    made = dg.Definitions(
        assets=[
            *(asset for plan in plans for asset in _source_assets(run, plan)),
            hydra.backbone(run),
            hydra.oracle_labels(run, plans),
            hydra.head(run, "probe"),
            hydra.head(run, "judge"),
            hydra.calibration(run),
            regrade.regrade_plan(run, plans),
            curation.topic_model(run, plans),
            curation.loader_plan(run, plans),
        ],
        asset_checks=checks.manifest_checks(run, plans),
        jobs=[
            # Named jobs run the others, so they ask for them when all are there.
            *named_jobs(
                jobs, lambda name: made.resolve_job_def(name), lambda: require_checkpoints(run)
            ),
            *asset_jobs.values(),
            verify,
            retention,
        ],
        sensors=[
            automation_sensor(run),
            sensors.source_watch(run, plans, jobs["prep"], asset_jobs),
            sensors.label_retries(run, asset_jobs["label_oracle"]),
            *sensors.failure_notices(run),
        ],
        schedules=[sensors.nightly_verify(run, verify), *retention_schedules(run, retention)],
        resources=resources(),
        # Steps of one run are made one after the other: they share a machine, and a process each
        # would import torch and load the backbone again.
        executor=dg.in_process_executor,
    )
    return made


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


keep_ignored()  # in every process that executes runs
defs = build_definitions(current_run())
