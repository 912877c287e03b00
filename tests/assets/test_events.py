"""A run over partitions tells of those that are finished, however it ends, and checks them."""

import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import dagster as dg
import pytest

from nmoe_assets.assets import events
from nmoe_assets.assets.cost import Cost
from nmoe_assets.assets.events import materialize_partitions
from nmoe_assets.checks.asset_checks import Checks
from nmoe_assets.resources import Machine
from nmoe_core.base.errors import FormatError, LockedError
from nmoe_core.base.result import Result
from nmoe_core.config.run import Run
from nmoe_core.tasks.checks import Verdict, Verdicts
from nmoe_core.tasks.shards import Attempt

pytestmark = pytest.mark.filterwarnings("ignore:Parameter `backfill_policy`")
KEY = dg.AssetKey("scores")
CHECK = dg.AssetCheckKey(KEY, "counts")
KEYS = [f"{number:04d}" for number in range(4)]
Show = Callable[[str, Result], Mapping[str, Any]]


class _Shards:
    """An asset over partitions of which some are bad, being written, or do not pass a check."""

    def __init__(self, check: str = "counts") -> None:
        self.check_name = check
        self.errors: dict[str, Exception] = {}
        self.not_passing: set[str] = set()
        self.interrupts = False
        self.facts: dict[str, Any] = {"documents": 3}
        self.checked: list[str] = []
        self.show: Show = lambda key, output: {}
        self.seconds = 0.0

    def _make(self, keys: Sequence[str]) -> Iterator[Attempt]:
        for key in keys:
            output = None if key in self.errors else Result(f"digest of {key}", self.facts)
            yield Attempt(key, output, self.errors.get(key), self.seconds, self.seconds)

    def _check(self, keys: Sequence[str]) -> Verdicts:
        self.checked += keys
        if self.interrupts:
            raise KeyboardInterrupt
        bad = sorted(self.not_passing.intersection(keys))
        return {self.check_name: Verdict(not bad, f"not right: {', '.join(bad)}")}

    def run(
        self, instance: dg.DagsterInstance, first: str = KEYS[0], last: str = KEYS[-1]
    ) -> dg.ExecuteInProcessResult:
        """Make the partitions from the first to the last."""
        self.checked = []
        run = Run("demo")
        checks = Checks(run, KEY.path, (self.check_name,), self._check)

        @dg.asset(
            key=KEY,
            partitions_def=dg.StaticPartitionsDefinition(KEYS),
            backfill_policy=dg.BackfillPolicy.single_run(),
            check_specs=checks.specs(),
        )
        def scores(context: dg.AssetExecutionContext) -> Iterator[Any]:
            machine = Machine(usd_per_hour=3600.0)  # a dollar a second
            yield from materialize_partitions(context, machine, self._make, checks, self.show)

        tags = {
            "dagster/asset_partition_range_start": first,
            "dagster/asset_partition_range_end": last,
        }
        job = dg.define_asset_job("grade", executor_def=dg.in_process_executor)
        definition = dg.Definitions([scores], jobs=[job]).resolve_job_def("grade")
        return definition.execute_in_process(instance=instance, tags=tags, raise_on_error=False)


def _raising(error: BaseException) -> Show:
    """What a run shows of its partitions, until it ends at the third."""

    def show(key: str, output: Result) -> Mapping[str, Any]:
        if key == KEYS[2]:
            raise error
        return {}

    return show


def _told(instance: dg.DagsterInstance) -> list[str]:
    """Partition of each materialisation in the log."""
    records = instance.fetch_materializations(KEY, limit=1000).records
    return sorted(record.partition_key for record in records)


def _verdict(done: dg.ExecuteInProcessResult) -> tuple[bool, str]:
    [evaluation] = done.get_asset_check_evaluations()
    failed = evaluation.metadata.get("failed_partitions")
    return evaluation.passed, str(failed.value) if failed else ""


def _versions(instance: dg.DagsterInstance) -> dict[str, str]:
    """Partition -> data version of its newest materialisation."""
    records = instance.fetch_materializations(KEY, limit=100).records
    return {
        record.partition_key: record.asset_materialization.tags["dagster/data_version"]
        for record in reversed(records)
    }


def test_each_partition_has_the_version_and_the_rows_of_its_own_content(
    instance: dg.DagsterInstance,
) -> None:
    assert _Shards().run(instance).success
    assert _versions(instance) == {key: f"digest of {key}" for key in KEYS}
    assert _told(instance) == KEYS, "one event each: no moment at which one has another's version"
    records = instance.fetch_materializations(KEY, limit=100).records
    assert len({record.timestamp for record in records}) == len(KEYS), "the UI lists each of them"
    for record in records:
        assert record.asset_materialization is not None
        metadata = record.asset_materialization.metadata
        assert metadata["dagster/partition_row_count"].value == 3
        assert "dagster/row_count" not in metadata, "that is of the whole asset"
    history = instance.event_log_storage.get_asset_check_execution_history(CHECK, 10)
    assert len(history) == 1, "a run alone gives one verdict"


def test_the_good_partitions_of_a_run_that_failed_are_told_and_checked(
    instance: dg.DagsterInstance,
) -> None:
    shards = _Shards()
    shards.errors[KEYS[3]] = FormatError("torn", where="shard", do="make it again")
    shards.not_passing.add(KEYS[0])
    done = shards.run(instance)
    assert not done.success
    assert _told(instance) == KEYS[:3]
    assert _verdict(done) == (False, KEYS[0])


def test_a_partition_that_did_not_pass_is_not_forgotten_by_runs_over_others(
    instance: dg.DagsterInstance,
) -> None:
    shards = _Shards()
    shards.not_passing.add(KEYS[0])
    assert _verdict(shards.run(instance, KEYS[0], KEYS[1])) == (False, KEYS[0])
    for key in KEYS[1:]:
        done = shards.run(instance, key, key)
        assert not done.success
        assert _verdict(done) == (False, KEYS[0])
        assert shards.checked == [key], "only what it made"
    shards.not_passing.clear()
    done = shards.run(instance, KEYS[0], KEYS[0])
    assert done.success
    assert _verdict(done) == (True, "")


def test_a_verdict_is_remembered_though_its_run_was_created_before_others(
    instance: dg.DagsterInstance,
) -> None:
    """The order of check executions is that of their runs."""
    shards, others = _Shards(), _Shards()
    shards.not_passing.add(KEYS[0])
    shards.show = lambda key, output: {"other": others.run(instance, KEYS[1], KEYS[1]).run_id}
    assert _verdict(shards.run(instance, KEYS[0], KEYS[0])) == (False, KEYS[0])
    assert _verdict(others.run(instance, KEYS[2], KEYS[2])) == (False, KEYS[0])


@pytest.mark.parametrize("passes", [True, False])
def test_of_runs_that_overlap_the_verdict_that_was_given_last_is_the_newest(
    instance: dg.DagsterInstance, passes: bool
) -> None:
    """And is of the newest materialisation: Dagster counts no other."""
    shards, others = _Shards(), _Shards()
    shards.not_passing |= set() if passes else {KEYS[0]}
    shards.show = lambda key, output: {"other": others.run(instance, KEYS[1], KEYS[1]).run_id}
    assert shards.run(instance, KEYS[0], KEYS[0]).success is passes
    [newest] = instance.event_log_storage.get_asset_check_execution_history(CHECK, 1)
    assert newest.status.value == ("SUCCEEDED" if passes else "FAILED")
    assert newest.evaluation is not None
    assert newest.evaluation.target_materialization_data is not None
    [made] = instance.fetch_materializations(KEY, limit=1).records
    assert newest.evaluation.target_materialization_data.storage_id == made.storage_id


def test_what_a_run_was_ended_at_checking_counts_as_not_passing(
    instance: dg.DagsterInstance,
) -> None:
    shards = _Shards()
    shards.interrupts = True
    assert not shards.run(instance, KEYS[0], KEYS[1]).success
    assert _told(instance) == KEYS[:2]
    shards.interrupts = False
    assert _verdict(shards.run(instance, KEYS[2], KEYS[2])) == (False, "0000, 0001")


def test_a_share_of_all_that_a_run_made_is_not_remembered_by_partition(
    instance: dg.DagsterInstance,
) -> None:
    shards = _Shards("keep_rate")
    shards.not_passing.add(KEYS[0])
    assert _verdict(shards.run(instance, KEYS[0], KEYS[0])) == (False, "")
    assert _verdict(shards.run(instance, KEYS[1], KEYS[1])) == (True, "")


def test_what_an_ended_run_made_counts_as_not_passing_until_it_is_checked(
    instance: dg.DagsterInstance,
) -> None:
    shards = _Shards()
    shards.show = _raising(KeyboardInterrupt())
    assert not shards.run(instance).success
    [record] = instance.event_log_storage.get_asset_check_execution_history(CHECK, 1)
    assert record.status.value == "FAILED"
    shards.show = lambda key, output: {}
    assert _verdict(shards.run(instance, KEYS[1], KEYS[3])) == (False, "0000")
    assert _verdict(shards.run(instance, KEYS[0], KEYS[0])) == (True, "")


def test_an_interrupt_while_events_are_logged_loses_none_of_them(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle, logged = instance.handle_new_event, []

    def interrupted(event: dg.EventLogEntry, **how: Any) -> None:
        handle(event, **how)
        if event.dagster_event_type == dg.DagsterEventType.ASSET_MATERIALIZATION:
            logged.append(event)
            if len(logged) == 2:
                os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(instance, "handle_new_event", interrupted)
    assert not _Shards().run(instance).success, "it is interrupted all the same"
    assert set(_told(instance)) == set(KEYS)


def test_a_run_that_waits_for_another_tells_only_of_what_it_did(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "_LOCK_RETRIES", 3)
    monkeypatch.setattr(events, "_LOCK_WAIT_S", 0)
    shards = _Shards()
    shards.errors[KEYS[1]] = LockedError("another run writes it", where="shard")
    shards.facts = {"documents": 3, "changed": False}
    assert not shards.run(instance).success
    assert _told(instance) == []
    shards.facts = {"documents": 3, "changed": True}
    assert not shards.run(instance, KEYS[0], KEYS[1]).success
    assert set(_told(instance)) == {KEYS[0]}
    shards.errors.clear()
    done = shards.run(instance, KEYS[2], KEYS[2])
    assert _verdict(done) == (False, KEYS[0]), "it was not checked"


def test_a_run_that_fails_names_the_partitions_that_another_run_writes_too(
    instance: dg.DagsterInstance,
) -> None:
    shards = _Shards()
    shards.errors[KEYS[1]] = LockedError("another run writes it", where="shard")
    shards.errors[KEYS[3]] = FormatError("torn", where="shard", do="make it again")
    [failed] = [event for event in shards.run(instance).all_events if event.is_step_failure]
    failure = failed.step_failure_data.user_failure_data
    assert failure.description.startswith("2 of 4 partitions failed; 0003: ")
    assert failure.metadata["failed_partitions"].value == "0003, 0001"


@pytest.mark.parametrize("error", [ZeroDivisionError("a defect"), KeyboardInterrupt()])
def test_what_was_finished_before_an_unforeseen_end_is_told(
    instance: dg.DagsterInstance, error: BaseException
) -> None:
    shards = _Shards()
    shards.show = _raising(error)
    assert not shards.run(instance).success
    assert _versions(instance) == {key: f"digest of {key}" for key in KEYS[:2]}


def test_partitions_made_at_once_share_the_cost_of_the_machine(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four that take 100 s each, in a run of 200 s: two ran at once."""
    monkeypatch.setattr(events.Stopwatch, "read", lambda watch: Cost(200.0, 200.0))
    shards = _Shards()
    shards.seconds = 100.0
    assert shards.run(instance).success
    records = instance.fetch_materializations(KEY, limit=4).records
    metadata = [record.asset_materialization.metadata for record in records]
    assert [one["seconds"].value for one in metadata] == [100.0] * 4
    assert [one["cost_usd"].value for one in metadata] == [50.0] * 4
