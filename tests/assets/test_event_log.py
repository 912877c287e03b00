"""The event log holds what Dagster's own would hold, in fewer transactions."""

from __future__ import annotations

import sqlite3
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.events import EngineEventData
from dagster._core.storage.event_log.sqlite.sqlite_event_log import SqliteEventLogStorage

from nmoe_assets import event_log
from nmoe_assets.event_log import BatchedSqliteEventLogStorage

KEY = dg.AssetKey(["docs", "quality_scores"])
QUERIES = {
    "event_logs": "SELECT run_id, event, dagster_event_type, step_key, asset_key, partition",
    "asset_keys": "SELECT asset_key, last_run_id, asset_details, wipe_timestamp",
    "asset_event_tags": "SELECT asset_key, key, value, event_id",
    "asset_check_executions": "SELECT asset_key, check_name, run_id, execution_status",
}


@pytest.fixture
def entries(instance: dg.DagsterInstance) -> list[dg.EventLogEntry]:
    """What a run with a partitioned asset and a check tells."""

    @dg.asset(key=KEY, partitions_def=dg.StaticPartitionsDefinition(["0000", "0001", "0002"]))
    def scores() -> dg.MaterializeResult:
        return dg.MaterializeResult(metadata={"documents": 3}, data_version=dg.DataVersion("v"))

    @dg.asset_check(asset=KEY)
    def counts() -> dg.AssetCheckResult:
        return dg.AssetCheckResult(passed=True)

    job = dg.define_asset_job("grade", executor_def=dg.in_process_executor)
    made = dg.Definitions([scores], jobs=[job], asset_checks=[counts])
    tags = {
        "dagster/asset_partition_range_start": "0000",
        "dagster/asset_partition_range_end": "0002",
    }
    done = made.resolve_job_def("grade").execute_in_process(instance=instance, tags=tags)
    assert done.success
    return list(instance.all_logs(done.run_id))


def _rows(directory: Path) -> dict[str, list[Any]]:
    rows = {}
    for path in sorted(directory.glob("*.db")):
        with closing(sqlite3.connect(path)) as database:
            for table, query in QUERIES.items():
                found = database.execute(f"{query} FROM {table} ORDER BY id").fetchall()
                rows[f"{path.name} {table}"] = found
    return rows


def _storage(kind: type[SqliteEventLogStorage], directory: Path, like: dg.DagsterInstance) -> Any:
    storage = kind(str(directory))
    storage.register_instance(like)
    return storage


@pytest.mark.parametrize("batch", [1, 4, 1000])
def test_the_rows_are_those_of_the_storage_of_dagster(
    instance: dg.DagsterInstance, entries: list[dg.EventLogEntry], tmp_path: Path, batch: int
) -> None:
    theirs = _storage(SqliteEventLogStorage, tmp_path / "theirs", instance)
    ours = _storage(BatchedSqliteEventLogStorage, tmp_path / "ours", instance)
    for entry in entries:
        theirs.store_event(entry)
    for first in range(0, len(entries), batch):
        ours.store_event_batch(entries[first : first + batch])
    expected = _rows(tmp_path / "theirs")
    assert _rows(tmp_path / "ours") == expected
    index = {name.split()[1]: len(rows) for name, rows in expected.items() if "index" in name}
    assert index == {
        "event_logs": 10,
        "asset_keys": 1,
        "asset_event_tags": 3,
        "asset_check_executions": 1,
    }
    again = _storage(SqliteEventLogStorage, tmp_path / "ours", instance)
    assert again.get_logs_for_run(entries[0].run_id) == theirs.get_logs_for_run(entries[0].run_id)
    assert again.get_materialized_partitions(KEY) == {"0000", "0001", "0002"}


@pytest.mark.parametrize("only", [None, dg.DagsterEventType.ASSET_MATERIALIZATION])
def test_a_batch_that_fails_leaves_nothing_and_the_next_is_stored(
    instance: dg.DagsterInstance,
    entries: list[dg.EventLogEntry],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    only: dg.DagsterEventType | None,
) -> None:
    entries = [entry for entry in entries if only in (None, entry.dagster_event_type)]
    ours = _storage(BatchedSqliteEventLogStorage, tmp_path / "ours", instance)
    seen: list[dg.EventLogEntry] = []
    store = SqliteEventLogStorage.store_event

    def fail_at_the_end(self: SqliteEventLogStorage, event: dg.EventLogEntry) -> None:
        store(self, event)
        seen.append(event)
        if len(seen) == len(entries):
            raise OSError("disk full")

    monkeypatch.setattr(SqliteEventLogStorage, "store_event", fail_at_the_end)
    with pytest.raises(OSError, match="disk full"):
        ours.store_event_batch(entries)
    assert not ours.get_logs_for_run(entries[0].run_id)
    assert not ours.get_materialized_partitions(KEY)
    monkeypatch.undo()
    ours.store_event_batch(entries)
    assert len(ours.get_logs_for_run(entries[0].run_id)) == len(entries)


def test_other_threads_wait_for_a_batch_and_then_see_all_of_it(
    instance: dg.DagsterInstance,
    entries: list[dg.EventLogEntry],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours = _storage(BatchedSqliteEventLogStorage, tmp_path / "ours", instance)
    found: list[int] = []
    reader = threading.Thread(
        target=lambda: found.append(len(ours.get_logs_for_run(entries[0].run_id)))
    )
    store = SqliteEventLogStorage.store_event

    def start_the_reader(self: SqliteEventLogStorage, event: dg.EventLogEntry) -> None:
        store(self, event)
        if event is entries[1]:
            reader.start()
            reader.join(0.2)
            assert reader.is_alive(), "it waits"

    monkeypatch.setattr(SqliteEventLogStorage, "store_event", start_the_reader)
    ours.store_event_batch(entries)
    reader.join(20)
    assert found == [len(entries)]


def test_many_runs_keep_few_engines(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_log, "_MAX_ENGINES", 3)
    runs = [instance.add_run(dg.DagsterRun(job_name="grade")) for _ in range(6)]
    for _ in range(2):
        for run in runs:
            instance.report_engine_event("here", run, EngineEventData({}))
    assert all(len(instance.all_logs(run.run_id)) == 2 for run in runs)
    storage = instance.event_log_storage
    assert isinstance(storage, BatchedSqliteEventLogStorage)
    assert len(storage._engines) == 3


def test_a_deleted_run_is_gone_and_may_be_written_to_again(
    instance: dg.DagsterInstance, entries: list[dg.EventLogEntry]
) -> None:
    assert isinstance(instance.event_log_storage, BatchedSqliteEventLogStorage)
    run = instance.get_run_by_id(entries[0].run_id)
    assert run is not None
    instance.event_log_storage.delete_events(run.run_id)
    assert not instance.all_logs(run.run_id)
    instance.report_engine_event("here", run, EngineEventData({}))
    assert len(instance.all_logs(run.run_id)) == 1
