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
from nmoe_assets.ops.pipeline import step_error
from nmoe_assets.partitions import range_tags
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

    def __init__(self, instance: dg.DagsterInstance, check: str = "counts") -> None:
        self.instance, self.check_name = instance, check
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
        self, first: int = 0, last: int = 3, tags: Mapping[str, str] | None = None
    ) -> dg.ExecuteInProcessResult:
        """Make the partitions from the first to the last, or those of tags."""
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

        tags = range_tags(KEYS[first : last + 1]) if tags is None else tags
        job = dg.define_asset_job("grade", executor_def=dg.in_process_executor)
        definition = dg.Definitions([scores], jobs=[job]).resolve_job_def("grade")
        return definition.execute_in_process(
            instance=self.instance, tags=tags, raise_on_error=False
        )

    def made(self) -> list[Any]:
        """Materialisations in the log, the newest first."""
        return list(self.instance.fetch_materializations(KEY, limit=1000).records)

    def told(self) -> list[str]:
        """Partition of each materialisation in the log."""
        return sorted(record.partition_key for record in self.made())

    def versions(self) -> dict[str, str]:
        """Partition -> data version of its newest materialisation."""
        return {
            record.partition_key: record.asset_materialization.tags["dagster/data_version"]
            for record in reversed(self.made())
        }

    def history(self, limit: int) -> list[Any]:
        """The newest verdicts in the log."""
        return list(self.instance.event_log_storage.get_asset_check_execution_history(CHECK, limit))


@pytest.fixture
def shards(instance: dg.DagsterInstance) -> _Shards:
    return _Shards(instance)


def _raising(error: BaseException) -> Show:
    """What a run shows of its partitions, until it ends at the third."""

    def show(key: str, output: Result) -> Mapping[str, Any]:
        if key == KEYS[2]:
            raise error
        return {}

    return show


def _verdict(done: dg.ExecuteInProcessResult) -> tuple[bool, str]:
    [evaluation] = done.get_asset_check_evaluations()
    failed = evaluation.metadata.get("failed_partitions")
    return evaluation.passed, str(failed.value) if failed else ""


def test_each_partition_has_the_version_and_the_rows_of_its_own_content(shards: _Shards) -> None:
    assert shards.run().success
    assert shards.versions() == {key: f"digest of {key}" for key in KEYS}
    assert shards.told() == KEYS, "one event each: no moment at which one has another's version"
    records = shards.made()
    assert len({record.timestamp for record in records}) == len(KEYS), "the UI lists each of them"
    for record in records:
        assert record.asset_materialization is not None
        metadata = record.asset_materialization.metadata
        assert metadata["dagster/partition_row_count"].value == 3
        assert "dagster/row_count" not in metadata, "that is of the whole asset"
    assert len(shards.history(10)) == 1, "a run alone gives one verdict"


def test_the_good_partitions_of_a_failed_run_are_logged_and_checked(shards: _Shards) -> None:
    shards.errors[KEYS[3]] = FormatError("torn", where="shard", do="make it again")
    shards.not_passing.add(KEYS[0])
    done = shards.run()
    assert not done.success
    assert shards.told() == KEYS[:3]
    assert _verdict(done) == (False, KEYS[0])


def test_a_run_that_names_no_partitions_is_refused(shards: _Shards) -> None:
    [failed] = [event for event in shards.run(tags={}).all_events if event.is_step_failure]
    assert step_error(failed).startswith("this run names no partitions: launch it with")
    assert shards.run(tags={"dagster/partition": KEYS[1]}).success
    assert shards.told() == [KEYS[1]]


def test_a_run_of_a_partition_that_does_not_exist_is_refused_in_one_line(shards: _Shards) -> None:
    done = shards.run(tags={"dagster/partition": "absent"})
    [failed] = [event for event in done.all_events if event.is_step_failure]
    told = step_error(failed)
    assert "has no such partitions: " in told
    assert "absent" in told
    assert told.endswith(f"choose from {KEYS[0]} to {KEYS[-1]}")
    assert shards.told() == []


def test_a_partition_that_did_not_pass_is_not_forgotten_by_runs_of_others(shards: _Shards) -> None:
    shards.not_passing.add(KEYS[0])
    assert _verdict(shards.run(0, 1)) == (False, KEYS[0])
    for number in (1, 2, 3):
        done = shards.run(number, number)
        assert not done.success
        assert _verdict(done) == (False, KEYS[0])
        assert shards.checked == [KEYS[number]], "only what it made"
    shards.not_passing.clear()
    done = shards.run(0, 0)
    assert done.success
    assert _verdict(done) == (True, "")


def test_a_verdict_is_remembered_though_its_run_was_created_before_others(shards: _Shards) -> None:
    """The order of check executions is that of their runs."""
    others = _Shards(shards.instance)
    shards.not_passing.add(KEYS[0])
    shards.show = lambda key, output: {"other": others.run(1, 1).run_id}
    assert _verdict(shards.run(0, 0)) == (False, KEYS[0])
    assert _verdict(others.run(2, 2)) == (False, KEYS[0])


@pytest.mark.parametrize("passes", [True, False])
def test_of_runs_that_overlap_the_verdict_that_was_given_last_is_the_newest(
    shards: _Shards, passes: bool
) -> None:
    """And is of the newest materialisation: Dagster counts no other."""
    others = _Shards(shards.instance)
    shards.not_passing |= set() if passes else {KEYS[0]}
    shards.show = lambda key, output: {"other": others.run(1, 1).run_id}
    assert shards.run(0, 0).success is passes
    [newest] = shards.history(1)
    assert newest.status.value == ("SUCCEEDED" if passes else "FAILED")
    assert newest.evaluation is not None
    assert newest.evaluation.target_materialization_data is not None
    made = shards.made()[0]
    assert newest.evaluation.target_materialization_data.storage_id == made.storage_id


def test_partitions_whose_check_was_interrupted_count_as_not_passing(shards: _Shards) -> None:
    shards.interrupts = True
    assert not shards.run(0, 1).success
    assert shards.told() == KEYS[:2]
    shards.interrupts = False
    assert _verdict(shards.run(2, 2)) == (False, "0000, 0001")


def test_a_share_of_all_that_a_run_made_is_not_remembered_by_partition(shards: _Shards) -> None:
    shards.check_name = "keep_rate"
    shards.not_passing.add(KEYS[0])
    assert _verdict(shards.run(0, 0)) == (False, "")
    assert _verdict(shards.run(1, 1)) == (True, "")


def test_partitions_of_an_interrupted_run_count_as_not_passing_until_checked(
    shards: _Shards,
) -> None:
    shards.show = _raising(KeyboardInterrupt())
    assert not shards.run().success
    [record] = shards.history(1)
    assert record.status.value == "FAILED"
    shards.show = lambda key, output: {}
    assert _verdict(shards.run(1, 3)) == (False, "0000")
    assert _verdict(shards.run(0, 0)) == (True, "")


def test_an_interrupt_while_events_are_logged_loses_none_of_them(
    shards: _Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle, logged = shards.instance.handle_new_event, []

    def interrupted(event: dg.EventLogEntry, **how: Any) -> None:
        handle(event, **how)
        if event.dagster_event_type == dg.DagsterEventType.ASSET_MATERIALIZATION:
            logged.append(event)
            if len(logged) == 2:
                os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(shards.instance, "handle_new_event", interrupted)
    assert not shards.run().success, "it is interrupted all the same"
    assert set(shards.told()) == set(KEYS)


def test_a_run_that_waits_for_another_logs_only_its_own_work(
    shards: _Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "_LOCK_RETRIES", 3)
    monkeypatch.setattr(events, "_LOCK_WAIT_S", 0)
    shards.errors[KEYS[1]] = LockedError("another run writes it", where="shard")
    shards.facts = {"documents": 3, "changed": False}
    assert not shards.run().success
    assert shards.told() == []
    shards.facts = {"documents": 3, "changed": True}
    assert not shards.run(0, 1).success
    assert set(shards.told()) == {KEYS[0]}
    shards.errors.clear()
    done = shards.run(2, 2)
    assert _verdict(done) == (False, KEYS[0]), "it was not checked"


def test_a_run_that_fails_names_the_partitions_that_another_run_writes_too(shards: _Shards) -> None:
    shards.errors[KEYS[1]] = LockedError("another run writes it", where="shard")
    shards.errors[KEYS[3]] = FormatError("torn", where="shard", do="make it again")
    [failed] = [event for event in shards.run().all_events if event.is_step_failure]
    failure = failed.step_failure_data.user_failure_data
    assert failure.description.startswith("2 of 4 partitions failed; 0003: ")
    assert failure.metadata["failed_partitions"].value == "0003, 0001"


@pytest.mark.parametrize("error", [ZeroDivisionError("a defect"), KeyboardInterrupt()])
def test_partitions_finished_before_an_unexpected_end_are_logged(
    shards: _Shards, error: BaseException
) -> None:
    shards.show = _raising(error)
    assert not shards.run().success
    assert shards.versions() == {key: f"digest of {key}" for key in KEYS[:2]}


def test_partitions_made_at_once_share_the_cost_of_the_machine(
    shards: _Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four that take 100 s each, in a run of 200 s: two ran at once."""
    monkeypatch.setattr(events.Stopwatch, "read", lambda watch: Cost(200.0, 200.0))
    shards.seconds = 100.0
    assert shards.run().success
    metadata = [record.asset_materialization.metadata for record in shards.made()]
    assert [one["seconds"].value for one in metadata] == [100.0] * 4
    assert [one["cost_usd"].value for one in metadata] == [50.0] * 4
