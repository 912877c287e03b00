"""Sensors: the runs that the daemon requests, apart from the runs for changed content.

If a source has new input or a moved revision, one run of its prep, and of all that follows it, is
requested; it compares content and does no work if only times changed. Each failed run is reported
in one line to the log, and to the webhook if it is set.

Dagster ignores a run key that it has seen before, so keys contain the time of the request in
seconds. So an input that changes back to earlier content also gets a run.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache

import dagster as dg

from nmoe_assets.automation import sensor_status
from nmoe_assets.names import asset_key, first_name, is_of_mixture, prefixed
from nmoe_assets.ops.jobs import AssetJob, TaskJob
from nmoe_assets.ops.pipeline import PART_OF, step_error
from nmoe_assets.resources import COMMAND, Notifier
from nmoe_core.base.errors import NmoeError
from nmoe_core.config.run import Run
from nmoe_core.prep.mixture import SourcePlan
from nmoe_core.tasks.graph.require import require_tasks
from nmoe_core.tasks.prep import is_remote, source_mark

_CHECKED = dg.DagsterEventType.ASSET_CHECK_EVALUATION
_MAX_TEXT = 1000


def source_watch(
    run: Run,
    sources: list[SourcePlan],
    prep: list[TaskJob],
    follow: TaskJob,
    definitions: Mapping[str, AssetJob],
) -> dg.SensorDefinition:
    """Requests prep of each source whose input changed since the last tick, and in the same run
    the assets behind it that automation makes again; the cursor has the listing digest of each
    source, and the time of the listing if the source is remote.

    Local files are listed at each tick, other sources every `source_poll_interval_s`.

    A source without a digest in the cursor may have changed before the first tick, so prep is
    requested, which does no work if the source is current.
    """

    @dg.sensor(
        name=prefixed(run, "source_watch"),
        jobs=[definitions[job.name] for job in (*prep, follow)],
        minimum_interval_seconds=run.config.automation.poll_interval_s,
        default_status=sensor_status(run),
        description="Requests prep of a source with new input files or a moved revision, and what "
        "follows it.",
    )
    def watch(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        listed = _listed(context.cursor)
        requests = []
        may_follow = cache(lambda: _may_follow(run))  # looks at the files of all sources
        made = cache(lambda: _made(context.instance, follow.keys))
        now = int(time.time())
        for source in sources:
            before, listed_at = listed.get(source.name, (None, 0))
            if 0 <= now - listed_at < run.config.automation.source_poll_interval_s:
                continue
            try:
                mark = source_mark(run, source)
            except (NmoeError, OSError) as error:
                context.log.error(f"{source.name} cannot be listed: {error}")
                continue
            shards = asset_key(run, [source.name, "shards"])
            # The first run is not automatic.
            if before != mark and shards in made():
                mark_now = f"{mark}:{now}"
                behind = _behind(run, made(), source.name, sources) if may_follow() else []
                requests += _requests(run, prep, follow, behind, source.name, mark_now)
            listed[source.name] = mark, now if is_remote(run, source) else 0
        cursor = json.dumps(listed, sort_keys=True)
        skipped = None if requests else dg.SkipReason("no input changed")
        return dg.SensorResult(run_requests=requests, skip_reason=skipped, cursor=cursor)

    return watch


def _listed(cursor: str | None) -> dict[str, tuple[str, int]]:
    """The digest and the time of the last listing of each source; earlier cursors have only the
    digest."""
    values = json.loads(cursor or "{}").items()
    return {name: (one, 0) if isinstance(one, str) else tuple(one) for name, one in values}


def _made(instance: dg.DagsterInstance, keys: Sequence[dg.AssetKey]) -> list[dg.AssetKey]:
    """Those assets that were ever made. Read at once: asking Dagster about each asset of each
    source takes longer than a tick may."""
    entries = (record.asset_entry for record in instance.get_asset_records(keys))
    found = {entry.asset_key for entry in entries if entry.last_materialization_record}
    return [key for key in keys if key in found]


def _requests(
    run: Run,
    prep: list[TaskJob],
    follow: TaskJob,
    behind: list[dg.AssetKey],
    source: str,
    mark: str,
) -> Iterator[dg.RunRequest]:
    """Requests of prep of a source, in one run with the assets `behind` it."""
    jobs = [
        replace(job, keys=[key for key in job.keys if first_name(run, key) == source])
        for job in prep
    ]
    prepared = {key for job in prep for key in job.keys}
    behind = [key for key in behind if key not in prepared]
    if behind:
        chain = [key for job in jobs for key in job.keys if key in follow.keys]
        jobs = [replace(job, keys=[k for k in job.keys if k not in chain]) for job in jobs]
        jobs.append(replace(follow, keys=[*chain, *behind]))
    for job in jobs:
        if job.keys:
            yield dg.RunRequest(
                run_key=f"{job.name}:{source}:{mark}",
                job_name=job.name,
                asset_selection=list(job.keys),
                tags=job.run_tags(),
            )


def _may_follow(run: Run) -> bool:
    """Whether one run may make all that follows prep: not if it must not make all partitions, or if
    grading or curation would refuse inputs that were made with other settings, since these inputs
    are made first."""
    if run.config.automation.max_partitions_per_run is not None:
        return False
    try:
        require_tasks(run, ("prep", "grade", "curate"))
    except NmoeError:
        return False
    return True


def _behind(
    run: Run, made: list[dg.AssetKey], source: str, sources: list[SourcePlan]
) -> list[dg.AssetKey]:
    """Those of the assets `made` that are of a source or of the whole mixture."""
    others = {plan.name for plan in sources} - {source}
    return [key for key in made if first_name(run, key) not in others]


def failure_notices(run: Run) -> list[dg.SensorDefinition]:
    """One line about each failed run, to the sensor's log and to the webhook.

    One sensor reports the runs that this location started. The other sensor reports runs of
    `dagster job execute`. These runs may fail before they have a location, so the other sensor
    monitors all locations.
    """

    @dg.run_failure_sensor(
        name=prefixed(run, "failure_notice"),
        default_status=sensor_status(run),
        minimum_interval_seconds=15,
        description="Reports a failed run in the log, and to NMOE_FAILURE_WEBHOOK if it is set.",
    )
    def notice(context: dg.RunFailureSensorContext, notifier: Notifier) -> dg.SkipReason | None:
        if COMMAND in context.dagster_run.tags:
            return dg.SkipReason("a run of the command line")
        if not is_of_mixture(run, context.dagster_run):
            return dg.SkipReason("a run of another mixture")
        _report(context, notifier)
        return None

    @dg.run_failure_sensor(
        name=prefixed(run, "failure_notice_of_commands"),
        default_status=sensor_status(run),
        minimum_interval_seconds=15,
        monitor_all_code_locations=True,
        description="Reports failed runs of the command line as `failure_notice` does.",
    )
    def notice_of_commands(
        context: dg.RunFailureSensorContext, notifier: Notifier
    ) -> dg.SkipReason | None:
        found = context.dagster_run
        if found.remote_job_origin is not None and COMMAND not in found.tags:
            return dg.SkipReason("a run of a code location")
        if not is_of_mixture(run, context.dagster_run):
            return dg.SkipReason("a run of another mixture")
        if PART_OF in context.dagster_run.tags:
            return dg.SkipReason("a part of the pipeline, whose run is reported instead")
        _report(context, notifier)
        return None

    return [notice, notice_of_commands]


def _report(context: dg.RunFailureSensorContext, notifier: Notifier) -> None:
    text = notice_text(context)
    context.log.error(text)
    notifier.send(text)


def notice_text(context: dg.RunFailureSensorContext) -> str:
    """The job, the run, the assets that the run was making, the root error of the first failed
    step, and what failed checks found."""
    run = context.dagster_run
    assets = sorted("/".join(key.path) for key in run.asset_selection or ())
    what = f"{run.job_name} ({', '.join(assets[:3])})" if assets else run.job_name
    errors = (step_error(event) for event in context.get_step_failure_events())
    first = next(filter(None, errors), None) or context.failure_event.message or "no message"
    logged = context.instance.all_logs(run.run_id, of_type=_CHECKED)
    verdicts = (one.get_dagster_event().asset_check_evaluation_data for one in logged)
    found = [
        f"{one.asset_key.to_user_string()}: {one.check_name}: {one.description}"
        for one in verdicts
        if not one.passed and one.severity is dg.AssetCheckSeverity.ERROR
    ]
    told = " ".join("; ".join([first, *found]).split())[:_MAX_TEXT]
    is_lost = run.tags.get("dagster/will_retry") == "true"
    end = f"; Dagster restarts it (run {run.run_id})" if is_lost else f" (run {run.run_id})"
    return f"{what} failed: {told}{end}"
