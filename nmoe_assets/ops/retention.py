"""Deletes old runs with their events, but keeps the history of every current asset.

Dagster stores a materialisation in the events of its run, so deleting the run deletes it. A run is
kept if it is recent, if it is among the last of its job, or if a current asset depends on it:

* it made the version of an asset or partition that was current at the cutoff, or a later version;
* it made an input of such a version, since Dagster compares output and input to find stale outputs;
* it is the last attempt of a partition that failed, or the last execution of a check.
"""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import dagster as dg

from nmoe_assets.dagster_private import event_files
from nmoe_assets.names import is_of_mixture, prefixed
from nmoe_core.config.run import Run

_PAGE = 500
_FINISHED = [dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED]
_POINTER = "dagster/input_event_pointer/"
JOB_NAME = "retention"


class RetentionConfig(dg.Config):
    """Run config: days to keep a run, number of runs to keep per job; `dry_run` only reports."""

    keep_days: int = 30
    keep_last: int = 20
    dry_run: bool = False


@dataclass(frozen=True)
class _Record:
    """A materialisation or observation; `made_from`: the newest event of each input at that
    time."""

    storage_id: int
    kind: str
    partition: str | None
    run_id: str
    timestamp: float
    made_from: dict[dg.AssetKey, int]


def retention_job(
    run: Run, check_keys: Callable[[], Iterable[dg.AssetCheckKey]]
) -> dg.JobDefinition:
    """`retention`: delete runs of this mixture that no current asset depends on.

    Args:
        run: The run of the mixture.
        check_keys: Returns the checks of the mixture; called in a run, after all definitions exist.
    """
    table = run.config.retention
    op_name = prefixed(run, "delete_old_runs")

    @dg.op(name=op_name, out=dg.Out(dg.Nothing))
    def delete_old_runs(context: dg.OpExecutionContext, config: RetentionConfig) -> None:
        before = datetime.now(UTC) - timedelta(days=config.keep_days)
        found, kept = deletable_runs(context.instance, before, config.keep_last, list(check_keys()))
        found = [old for old in found if is_of_mixture(run, old)]
        jobs = Counter(old.job_name for old in found)
        for name, count in jobs.most_common():
            context.log.info(f"{name}: {count} runs")
        if not config.dry_run:
            for old in found:
                delete_run(context.instance, old.run_id)
        context.add_output_metadata({"deleted": 0 if config.dry_run else len(found), **kept})
        verb = "would be deleted" if config.dry_run else "deleted"
        context.log.info(f"{len(found)} runs older than {before:%Y-%m-%d} {verb}; kept: {kept}")

    @dg.job(
        name=prefixed(run, JOB_NAME),
        executor_def=dg.in_process_executor,
        description="Deletes old runs and their events, unless a current asset depends on them.",
        config={
            "ops": {
                op_name: {"config": {"keep_days": table.keep_days, "keep_last": table.keep_last}}
            }
        },
    )
    def retention() -> None:
        delete_old_runs()

    return retention


def deletable_runs(
    instance: dg.DagsterInstance, before: datetime, keep_last: int, checks: list[dg.AssetCheckKey]
) -> tuple[list[dg.DagsterRun], dict[str, int]]:
    """Finished runs to delete, and the number of old runs to keep, by reason.

    Args:
        instance: The instance of the runs.
        before: Runs that were updated later are kept.
        keep_last: Number of runs of each job that are kept at any age.
        checks: The checks whose last executions are kept.
    """
    finished = dg.RunsFilter(statuses=_FINISHED, updated_before=before)
    old = [record.dagster_run for record in instance.get_run_records(finished)]
    reasons = {
        "last_of_its_job": _last_of_jobs(instance, {run.job_name for run in old}, keep_last),
        "holds_what_is_current": _holding(instance, before.timestamp()),
        "last_attempt": _last_attempts(instance),
        "last_check": _last_checks(instance, checks),
    }
    kept: Counter[str] = Counter(dict.fromkeys(reasons, 0))
    gone = []
    for run in old:
        reason = next((name for name, ids in reasons.items() if run.run_id in ids), None)
        if reason is None:
            gone.append(run)
        else:
            kept[reason] += 1
    return gone, dict(kept)


def delete_run(instance: dg.DagsterInstance, run_id: str) -> None:
    """Delete a run, its events, and their files. If a deletion is interrupted, the next cleanup
    completes it."""
    files = event_files(instance, run_id)  # Dagster does not delete these files, only their rows
    instance.compute_log_manager.delete_logs(prefix=[run_id])
    instance.delete_run(run_id)
    for path in files:
        path.unlink(missing_ok=True)


def _last_of_jobs(instance: dg.DagsterInstance, jobs: set[str], count: int) -> set[str]:
    last = set()
    for job in jobs if count else ():
        runs = instance.get_runs(dg.RunsFilter(job_name=job), limit=count)
        last |= {run.run_id for run in runs}
    return last


def _holding(instance: dg.DagsterInstance, cutoff: float) -> set[str]:
    """Runs that hold the last event before the cutoff, or any later event, of each partition; and
    runs that made the inputs of these events."""
    needed: set[str] = set()
    # An observation does not replace a materialisation, so the latest event of each kind is needed.
    by_partition: dict[dg.AssetKey, dict[tuple[str | None, str], list[_Record]]] = {}
    seen: defaultdict[dg.AssetKey, set[int]] = defaultdict(set)
    for key in instance.all_asset_keys():
        parts: defaultdict[tuple[str | None, str], list[_Record]] = defaultdict(list)
        for record in _records(instance, key):
            parts[record.partition, record.kind].append(record)
        for records in parts.values():
            records.sort(key=lambda record: record.storage_id)
            num_old = bisect_right(records, cutoff, key=lambda record: record.timestamp)
            for record in records[max(num_old - 1, 0) :]:
                needed.add(record.run_id)
                for read, storage_id in record.made_from.items():
                    seen[read].add(storage_id)
        by_partition[key] = parts
    for key, storage_ids in seen.items():
        for records in by_partition.get(key, {}).values():
            places = [record.storage_id for record in records]
            for storage_id in storage_ids:
                if place := bisect_right(places, storage_id):
                    needed.add(records[place - 1].run_id)
    return needed


def _records(instance: dg.DagsterInstance, key: dg.AssetKey) -> Iterator[_Record]:
    for fetch in (instance.fetch_materializations, instance.fetch_observations):
        cursor = None
        has_more = True
        while has_more:
            page = fetch(key, limit=_PAGE, cursor=cursor)
            cursor = page.cursor
            has_more = page.has_more
            for found in page.records:
                made_from = {}
                for name, storage_id in (found.event_log_entry.tags or {}).items():
                    if name.startswith(_POINTER) and storage_id != "NULL":
                        key_text = name.removeprefix(_POINTER)
                        made_from[dg.AssetKey.from_user_string(key_text)] = int(storage_id)
                yield _Record(
                    found.storage_id,
                    fetch.__name__,
                    found.partition_key,
                    found.run_id,
                    found.timestamp,
                    made_from,
                )


def _last_attempts(instance: dg.DagsterInstance) -> set[str]:
    storage = instance.event_log_storage
    attempts_of = (
        storage.get_latest_asset_partition_materialization_attempts_without_materializations
    )
    last = set()
    for key in instance.all_asset_keys():
        last |= {run_id for run_id, _ in attempts_of(key).values()}
    return last


def _last_checks(instance: dg.DagsterInstance, checks: list[dg.AssetCheckKey]) -> set[str]:
    latest = instance.event_log_storage.get_latest_asset_check_execution_by_key(checks)
    return {execution.run_id for execution in latest.values()}
