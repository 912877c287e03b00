"""Sensors that request oracle labels: of new documents, if `[automation] label` is `new`, and of
slices that failed."""

import json
import time
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

import dagster as dg

from nmoe_assets.automation import UNFINISHED, sensor_status
from nmoe_assets.names import asset_key, prefixed
from nmoe_assets.ops.jobs import AssetJob
from nmoe_assets.partitions import label_partitions, range_tags
from nmoe_core.config.run import Run
from nmoe_core.labels.cost import Estimate
from nmoe_core.prep.mixture import run_sources
from nmoe_core.tasks.graph.new_labels import new_labels

_FIRST_WAIT_S = 60


def label_new(run: Run, label: AssetJob, behind: Iterable[dg.AssetKey]) -> dg.SensorDefinition:
    """Requests labels of slices with new documents.

    If labels cost more than allowed, or more questions are open than a day allows, the assets
    `behind` the labels get an observation that says what they wait for, and nothing fails. The
    cursor has the state of slices and labels that was looked at, the day, the questions requested
    on this day, and the last observation. Slices are looked at again only if something changed.
    """
    labels = asset_key(run, ["hydra", "oracle_labels"])
    slices = [asset_key(run, [source.name, "docid_slices"]) for source in run_sources(run)]
    shards = [asset_key(run, [source.name, "shards"]) for source in run_sources(run)]
    made_first = {labels, *slices, *shards}
    per_day = run.config.automation.max_labels_per_day

    @dg.sensor(
        name=prefixed(run, "label_new"),
        job=label,
        minimum_interval_seconds=run.config.automation.poll_interval_s,
        default_status=sensor_status(run),
        description="Requests labels of new documents, within max_cost and max_labels_per_day.",
    )
    def request(context: dg.SensorEvaluationContext) -> dg.SensorResult | dg.SkipReason:
        before: dict[str, Any] = json.loads(context.cursor or "{}")
        now = time.time()
        day = datetime.fromtimestamp(now, UTC).date().isoformat()
        unfinished = context.instance.get_runs(dg.RunsFilter(statuses=UNFINISHED))
        if any(_makes(one, made_first) for one in unfinished):
            return dg.SkipReason("shards, slices or labels are being made")
        seen = _last_made(context.instance, [labels, *slices])
        if before.get("seen") == seen and before.get("day") == day:
            return dg.SkipReason(before["told"] or "no new documents")
        asked_today = before["asked"] if before.get("day") == day else 0
        found = new_labels(run)
        keys = [] if found.waits else _within(found.slices, per_day - asked_today)
        num_asked = sum(found.slices[key].questions for key in keys)
        told = ""
        if found.waits:
            told = f"waits for labels{found.size}: {found.waits}"
        elif len(keys) < len(found.slices):
            today = f"{asked_today:,} of {per_day:,} questions of this day"
            told = f"waits for labels{found.size}: {today} are requested"
        cursor = {"seen": seen, "day": day, "asked": asked_today + num_asked, "told": told}
        requests = []
        if keys:
            requests = [dg.RunRequest(run_key=f"new:{keys[0]}:{int(now)}", tags=range_tags(keys))]
        events = []
        if told and told != before.get("told"):
            state = {"state": dg.MetadataValue.text(told)}
            events = [dg.AssetObservation(key, metadata=state) for key in behind]
        return dg.SensorResult(
            run_requests=requests,
            skip_reason=None if requests else dg.SkipReason(told or "no new documents"),
            cursor=json.dumps(cursor, sort_keys=True),
            asset_events=events,
        )

    return request


def _within(slices: Mapping[str, Estimate], num_questions: int) -> list[str]:
    """The first slices that have at most this number of questions together."""
    keys = []
    for key, estimate in slices.items():
        num_questions -= estimate.questions
        if num_questions < 0:
            break
        keys.append(key)
    return keys


def _makes(run: dg.DagsterRun, keys: set[dg.AssetKey]) -> bool:
    """Whether a run may make one of these assets."""
    return not run.asset_selection or not keys.isdisjoint(run.asset_selection)


def _last_made(instance: dg.DagsterInstance, keys: list[dg.AssetKey]) -> dict[str, int]:
    """The place of the last materialization of each asset in the event log, in one query."""
    entries = (record.asset_entry for record in instance.get_asset_records(keys))
    made = ((one.asset_key, one.last_materialization_record) for one in entries)
    return {key.to_user_string(): last.storage_id for key, last in made if last is not None}


def label_retries(run: Run, label: AssetJob) -> dg.SensorDefinition:
    """Requests failed label slices again; the cursor has the number of tries of each slice and the
    time of the next try.

    The wait starts when this sensor finds the failure. A time of 0 means that the sensor has not
    found the failure of the last try yet.
    """
    budget = run.config.automation.label_retries
    labels = asset_key(run, ["hydra", "oracle_labels"])

    @dg.sensor(
        name=prefixed(run, "label_retries"),
        job=label,
        minimum_interval_seconds=30,
        default_status=sensor_status(run),
        description=f"Requests failed slices of oracle labels again, at most {budget} times each.",
    )
    def retry(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        keys = label_partitions.get_partition_keys()
        statuses = context.instance.get_status_by_partition(labels, keys, label_partitions) or {}
        tries: dict[str, list[float]] = json.loads(context.cursor or "{}")
        now = time.time()
        requests = []
        spent = []
        for key in keys:
            status = statuses.get(key)
            name = status.value if status else None
            if name == "MATERIALIZED":
                tries.pop(key, None)
            if name != "FAILED":
                continue
            count, not_before = tries.get(key, (0, 0.0))
            wait_s = _FIRST_WAIT_S * 2**count
            if count >= budget:
                spent.append(key)
            elif not not_before:
                tries[key] = [count, now + wait_s]
            elif now >= not_before or now < not_before - wait_s:  # the clock was set back
                tries[key] = [count + 1, 0.0]
                run_key = f"{key}:{count + 1}:{int(now)}"
                requests.append(dg.RunRequest(run_key=run_key, tags=range_tags([key])))
        if spent:
            context.log.warning(f"no more retries after {budget} failures: {', '.join(spent)}")
        skipped = None if requests else dg.SkipReason("no failed slice to retry")
        return dg.SensorResult(
            run_requests=requests, skip_reason=skipped, cursor=json.dumps(tries, sort_keys=True)
        )

    return retry
