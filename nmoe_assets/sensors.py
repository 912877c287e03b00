"""Sensors and the schedule: what the daemon asks for besides what follows changed content.

New input or a moved revision asks for prep of that source; prep compares content and does no work
where only times changed. Failed label slices are asked for again, a bounded number of times and
ever more slowly. A failed run is told in one line, to the log and to a webhook if one is set.

A run key that was used once is never run again, so keys hold the second of the request: an input
that comes back to what it was is a change too.
"""

import json
import time
from collections.abc import Mapping
from typing import Any

import dagster as dg

from nmoe_assets.automation import sensor_status
from nmoe_assets.jobs import PART_OF, StageJob, innermost_error
from nmoe_assets.partitions import label_partitions
from nmoe_assets.resources import Notifier
from nmoe_core.base.errors import NmoeError
from nmoe_core.config.run import Run
from nmoe_core.prep.mixture import SourcePlan
from nmoe_core.tasks.watch import source_mark

LABELS = dg.AssetKey(["hydra", "oracle_labels"])
_FIRST_WAIT_S = 60
_MAX_TEXT = 500
# Dagster does not export the type of what define_asset_job returns.
AssetJob = Any
AssetJobs = Mapping[str, AssetJob]


def source_watch(
    run: Run, sources: list[SourcePlan], prep: list[StageJob], definitions: AssetJobs
) -> dg.SensorDefinition:
    """Prep of each source whose input changed since the tick before; its cursor is their marks.

    A source without a mark may have changed while nobody watched: it is prepared, which does no
    work where it is current.
    """
    jobs = {
        source.name: [job for job in prep if job.keys[0][0] == source.name] for source in sources
    }

    @dg.sensor(
        name="source_watch",
        jobs=[definitions[job.name] for job in prep],
        minimum_interval_seconds=run.config.automation.watch_every_s,
        default_status=sensor_status(run),
        description="New input files or a moved revision: prep of that source.",
    )
    def watch(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        before: dict[str, str] = json.loads(context.cursor or "{}")
        marks, requests, now = dict(before), [], int(time.time())
        for source in sources:
            try:
                mark = source_mark(run, source)
            except (NmoeError, OSError) as error:
                context.log.error(f"{source.name} cannot be listed: {error}")
                continue
            if before.get(source.name) != mark and _is_prepared(context.instance, source.name):
                requests += [_run_request(job, mark, now) for job in jobs[source.name]]
            marks[source.name] = mark
        cursor = json.dumps(marks, sort_keys=True)
        skipped = None if requests else dg.SkipReason("no input changed")
        return dg.SensorResult(run_requests=requests, skip_reason=skipped, cursor=cursor)

    return watch


def _is_prepared(instance: dg.DagsterInstance, source: str) -> bool:
    """Whether a person had it prepared once; before that, new input asks for nothing."""
    return instance.get_latest_materialization_event(dg.AssetKey([source, "shards"])) is not None


def _run_request(job: StageJob, mark: str, now: int) -> dg.RunRequest:
    key = f"{job.name}:{mark}:{now}"
    return dg.RunRequest(run_key=key, job_name=job.name, tags=job.tags())


def label_retries(run: Run, label: AssetJob) -> dg.SensorDefinition:
    """Failed label slices again; its cursor holds, of each, the tries and when the next may be.

    The wait counts from when the failure was seen; 0 says that the last try is not seen to have
    failed yet.
    """
    budget = run.config.automation.label_retries

    @dg.sensor(
        name="label_retries",
        job=label,
        minimum_interval_seconds=30,
        default_status=sensor_status(run),
        description=f"Failed slices of oracle labels again, at most {budget} times each.",
    )
    def retry(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        keys = label_partitions.get_partition_keys()
        statuses = context.instance.get_status_by_partition(LABELS, keys, label_partitions) or {}
        tries: dict[str, list[float]] = json.loads(context.cursor or "{}")
        now, requests, spent = time.time(), [], []
        for key in keys:
            status = statuses.get(key)
            name = status.value if status else None
            if name == "MATERIALIZED":
                tries.pop(key, None)
            if name != "FAILED":
                continue
            count, not_before = tries.get(key, (0, 0.0))
            if count >= budget:
                spent.append(key)
            elif not not_before:
                tries[key] = [count, now + _FIRST_WAIT_S * 2**count]
            elif now >= not_before:
                tries[key] = [count + 1, 0.0]
                run_key = f"{key}:{count + 1}:{int(now)}"
                tags = {"dagster/partition": key}
                requests.append(dg.RunRequest(run_key=run_key, tags=tags))
        if spent:
            context.log.warning(f"tried {budget} times, left for a person: {', '.join(spent)}")
        skipped = None if requests else dg.SkipReason("no failed slice to try")
        return dg.SensorResult(
            run_requests=requests, skip_reason=skipped, cursor=json.dumps(tries, sort_keys=True)
        )

    return retry


def failure_notices(run: Run) -> list[dg.SensorDefinition]:
    """One line about each failed run, to the sensor's log and to the webhook.

    One sensor is for runs that this location started. Those that `dagster job execute` started
    belong to no location, so the other looks at all and leaves those of locations to them.
    """

    @dg.run_failure_sensor(
        name="failure_notice",
        default_status=sensor_status(run),
        minimum_interval_seconds=15,
        description="Tells of a failed run: in the log, and to NMOE_FAILURE_WEBHOOK if it is set.",
    )
    def notice(context: dg.RunFailureSensorContext, notifier: Notifier) -> None:
        _tell(context, notifier)

    @dg.run_failure_sensor(
        name="failure_notice_of_commands",
        default_status=sensor_status(run),
        minimum_interval_seconds=15,
        monitor_all_code_locations=True,
        description="Tells of failed runs of the command line as `failure_notice` does.",
    )
    def notice_of_commands(
        context: dg.RunFailureSensorContext, notifier: Notifier
    ) -> dg.SkipReason | None:
        if context.dagster_run.remote_job_origin is not None:
            return dg.SkipReason("a run of a code location")
        if PART_OF in context.dagster_run.tags:
            return dg.SkipReason("a part of a named job, which fails with it and is told of")
        _tell(context, notifier)
        return None

    return [notice, notice_of_commands]


def _tell(context: dg.RunFailureSensorContext, notifier: Notifier) -> None:
    text = notice_text(context)
    context.log.error(text)
    notifier.send(text)


def notice_text(context: dg.RunFailureSensorContext) -> str:
    """Job, run, what it was making, and the innermost error of the step that failed first."""
    run = context.dagster_run
    assets = sorted("/".join(key.path) for key in run.asset_selection or ())
    what = f"{run.job_name} ({', '.join(assets[:3])})" if assets else run.job_name
    errors = (innermost_error(event) for event in context.get_step_failure_events())
    first = next(filter(None, errors), None) or context.failure_event.message or "no message"
    is_lost = run.tags.get("dagster/will_retry") == "true"
    end = f"; it is started again (run {run.run_id})" if is_lost else f" (run {run.run_id})"
    return f"{what} failed: {' '.join(first.split())[:_MAX_TEXT]}{end}"


def nightly_verify(run: Run, job: AssetJob) -> dg.ScheduleDefinition:
    """The verify job, by the run's `[automation] verify_cron`."""
    starts = run.config.automation.starts
    status = dg.DefaultScheduleStatus
    return dg.ScheduleDefinition(
        name="nightly_verify",
        job=job,
        cron_schedule=run.config.automation.verify_cron,
        execution_timezone=run.config.automation.verify_timezone,
        default_status=status.RUNNING if starts else status.STOPPED,
        description="Reads every manifest's files again and says what is no longer as it was.",
    )
