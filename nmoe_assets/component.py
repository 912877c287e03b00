"""A mixture of sources as Dagster definitions, and as a component of `dg`."""

import warnings

import dagster as dg

from nmoe_assets.assets import attributes, curation, hydra, regrade, sources
from nmoe_assets.checks.manifests import manifest_checks
from nmoe_assets.dagster_private import find_migrations_once
from nmoe_assets.names import asset_key, prefixed
from nmoe_assets.ops import sensors
from nmoe_assets.ops.follow_changes import follow_changes
from nmoe_assets.ops.interrupts import keep_ignored
from nmoe_assets.ops.jobs import AssetJob, follow_job, task_jobs, verify_job
from nmoe_assets.ops.label_sensors import label_new, label_retries
from nmoe_assets.ops.pipeline import pipeline_job
from nmoe_assets.ops.retention import retention_job
from nmoe_assets.ops.schedules import schedules
from nmoe_assets.pods import executor
from nmoe_assets.resources import resources
from nmoe_core.base.compute.garbage import gc_paused
from nmoe_core.config.run import Run
from nmoe_core.prep.mixture import SourcePlan, run_sources

keep_ignored()  # loaded in every process that executes runs
find_migrations_once()  # loaded in every process that evaluates ticks


class Mixture(dg.Component, dg.Resolvable, dg.Model):
    """A mixture in a project of `dg`: `type: nmoe_assets.Mixture` of a `defs.yaml`.

    Attributes:
        config: The run's TOML; a relative path starts at the directory of `defs.yaml`.
        prefix: The prefix of every key, group, job and sensor; replaces `[automation] prefix` of
            the TOML. Each mixture of a deployment needs its own prefix.
    """

    config: str
    prefix: str = ""

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        """The definitions. Raises ConfigError."""
        settings = {"automation.prefix": self.prefix} if self.prefix else None
        return build_definitions(Run(context.path / self.config, settings))


def build_definitions(run: Run) -> dg.Definitions:
    """All assets, checks, jobs, sensors and schedules of a run."""
    # All objects made here stay in use, so a garbage collection frees nothing, but would take a
    # fifth of the time.
    with gc_paused(), warnings.catch_warnings():
        # backfill_policy is marked beta; it is used as documented, and tested.
        warnings.simplefilter("ignore", dg.BetaWarning)
        return _definitions(run)


def _definitions(run: Run) -> dg.Definitions:
    plans = run_sources(run)
    tasks = task_jobs(run, plans)
    # Dagster compares jobs by identity, so sensors must use the same objects as `jobs` below.
    jobs = {task.name: task.definition() for task in tasks}
    prep = [task for task in tasks if task.name.startswith(prefixed(run, "prep"))]
    follow = follow_job(run, tasks)
    jobs[follow.name] = follow.definition()
    verify = verify_job(run, plans)
    label = prefixed(run, "label")
    retention = retention_job(run, lambda: made.resolve_asset_graph().asset_check_keys)
    made = dg.Definitions(
        assets=[
            *(asset for plan in plans for asset in _source_assets(run, plan)),
            hydra.backbone(run),
            *_graders(run, plans),
            *attributes.duplicates(run, plans),
            curation.topic_model(run, plans),
            *curation.buckets(run, plans),
            curation.loader_plan(run, plans),
            *curation.published_plan(run),
        ],
        asset_checks=manifest_checks(run, plans),
        jobs=[pipeline_job(run, tasks, lambda: made), *jobs.values(), verify, retention],
        sensors=[
            follow_changes(run),
            sensors.source_watch(run, plans, prep, follow, jobs),
            *(_label_sensors(run, jobs[label]) if label in jobs else []),
            *sensors.failure_notices(run),
        ],
        schedules=schedules(run),
        resources=resources(),
        executor=executor(run),
    )
    return made


def _label_sensors(run: Run, label: AssetJob) -> list[dg.SensorDefinition]:
    made = [label_retries(run, label)]
    if run.config.automation.label == "new":
        behind = [["hydra", name] for name in ("student", *hydra.heads(run), "calibration")]
        made.append(label_new(run, label, [asset_key(run, key) for key in behind]))
    return made


def _graders(run: Run, plans: list[SourcePlan]) -> list[dg.AssetsDefinition]:
    """Labels, the graders fitted on them, and the preview of grading; empty if the run has no
    grader."""
    if run.config.grading.is_off:
        return []
    heads = [hydra.head(run, kind) for kind in ("probe", "judge") if hydra.heads(run)]
    fitted = [hydra.student(run), *heads, hydra.calibration(run, plans)]
    return [hydra.oracle_labels(run, plans), *fitted, regrade.regrade_plan(run, plans)]


def _source_assets(run: Run, plan: SourcePlan) -> list[dg.AssetSpec | dg.AssetsDefinition]:
    assets: list[dg.AssetSpec | dg.AssetsDefinition] = [sources.documents(run, plan)]
    for split in ("train", "valid") if plan.has_valid else ("train",):
        assets += [sources.shards(run, plan, split), sources.manifest(run, plan, split)]
    return [
        *assets,
        *([] if run.config.grading.is_off else [sources.docid_slices(run, plan)]),
        hydra.quality_scores(run, plan),
        *attributes.attributes(run, plan),
        *attributes.copies(run, plan),
        curation.topics(run, plan),
        *attributes.selection(run, plan),
        *curation.source_buckets(run, plan),
        curation.curated(run, plan),
        *curation.seen_index(run, plan),
        curation.curated_manifest(run, plan),
    ]
