"""Old runs go; what assets, partitions and checks are said to be stays the same."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from nmoe_assets.ops.retention import delete_run, retention_job
from nmoe_assets.ops.schedules import schedules
from nmoe_core.config.run import Run
from tests.assets.dagster_internals import stale_causes

KEYS = dg.StaticPartitionsDefinition(["a", "b", "c"])
_version: dict[str, str] = {}


def _versioned(name: str) -> dg.MaterializeResult:
    return dg.MaterializeResult(data_version=dg.DataVersion(_version.get(name, "1")))


@dg.asset(partitions_def=KEYS)
def shards(context: dg.AssetExecutionContext) -> dg.MaterializeResult:
    if context.partition_key == "c":
        raise dg.Failure("a bad shard", allow_retries=False)
    return _versioned("shards")


@dg.asset(deps=[shards], partitions_def=KEYS)
def scores() -> dg.MaterializeResult:
    return _versioned("scores")


@dg.asset(deps=[scores])
def plan() -> dg.MaterializeResult:
    return _versioned("plan")


@dg.asset_check(asset=plan)
def readable() -> dg.AssetCheckResult:
    return dg.AssetCheckResult(passed=True)


@dg.op
def nothing() -> None:
    pass


@dg.job
def unrelated() -> None:
    nothing()


class Platform:
    """Assets on an instance, run as a person would over some weeks."""

    def __init__(self, instance: dg.DagsterInstance) -> None:
        self.instance = instance
        run = Run("demo")
        retention = retention_job(run, lambda: self.defs.resolve_asset_graph().asset_check_keys)
        assets = [shards, scores, plan]
        jobs = [dg.define_asset_job(asset.key.path[0], [asset]) for asset in assets]
        check = dg.define_asset_job("check", dg.AssetSelection.checks(readable))
        self.defs = dg.Definitions(
            assets=assets, asset_checks=[readable], jobs=[*jobs, check, unrelated, retention]
        )

    def run(self, job: str, partition: str | None = None, config: Any = None) -> str:
        """Run a job; return the run's id."""
        done = self.defs.resolve_job_def(job).execute_in_process(
            run_config=config, instance=self.instance, partition_key=partition, raise_on_error=False
        )
        return done.run_id

    def retain(self, **config: Any) -> set[str]:
        """The runs that the job deletes."""
        before = self.runs()
        asked = {"keep_days": 0, "keep_last": 0, **config}
        ops = {"delete_old_runs": {"config": asked}}
        own = self.run("retention", config={"ops": ops})
        record = self.instance.get_run_by_id(own)
        assert record is not None
        assert record.is_success
        return before - self.runs()

    def runs(self) -> set[str]:
        """Ids of all runs but those of the retention itself."""
        return {r.run_id for r in self.instance.get_runs() if r.job_name != "retention"}

    def shown(self) -> dict[str, Any]:
        """What a person sees of all assets: fresh, stale or missing and why, failed, checked."""
        causes = stale_causes(self.instance, self.defs)
        found: dict[str, Any] = {f"{key.path[0]} {part}": causes[key, part] for key, part in causes}
        for asset in (shards, scores):
            found[asset.key.path[0]] = self.instance.get_status_by_partition(
                asset.key, KEYS.get_partition_keys(), KEYS
            )
        check = dg.AssetCheckKey(plan.key, "readable")
        storage = self.instance.event_log_storage
        execution = storage.get_latest_asset_check_execution_by_key([check])[check]
        found["readable"] = (execution.status, execution.run_id in self.runs())
        return found


@pytest.fixture(params=["memory", pytest.param("files", marks=pytest.mark.slow)])
def platform(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Platform]:
    _version.clear()
    make = dg.DagsterInstance
    opened = make.ephemeral() if request.param == "memory" else make.local_temp(str(tmp_path))
    with opened as instance:
        yield Platform(instance)


def test_superseded_runs_are_deleted_without_visible_change(
    platform: Platform, tmp_path: Path
) -> None:
    first = {key: platform.run("shards", key) for key in "abc"}
    unseen = platform.run("shards", "b")
    graded = {key: platform.run("scores", key) for key in "ab"}
    plans = [platform.run("plan") for _ in range(3)]
    again = [platform.run("shards", "a") for _ in range(3)]  # same content: nothing is stale
    _version["shards"] = "2"
    changed = platform.run("shards", "b")  # other content: its scores are stale
    checks = [platform.run("check") for _ in range(3)]
    others = [platform.run("unrelated") for _ in range(2)]
    before = platform.shown()
    assert before["scores a"] == ("FRESH", [])
    assert before["scores b"][0] == "STALE"
    assert before["shards"]["c"].value == "FAILED"

    gone = {first["b"], *again[:-1], *plans[:-1], *checks[:-1], *others}
    assert platform.retain(dry_run=True) == set()
    assert platform.retain() == gone
    assert platform.shown() == before
    # What scores of `a` were made from, and what those of `b` were, still tells them apart.
    assert {first["a"], unseen, again[-1], changed, graded["a"], first["c"]} <= platform.runs()
    history = tmp_path / "history" / "runs"
    assert not [path for run in gone for path in history.glob(f"{run}*")]
    assert not [run for run in gone if (tmp_path / "storage" / run).exists()]


def test_young_runs_and_the_last_of_each_job_stay(platform: Platform) -> None:
    runs = [platform.run("unrelated") for _ in range(4)]
    assert platform.retain(keep_days=1) == set()
    assert platform.retain(keep_last=3) == {runs[0]}


def test_a_run_whose_logs_could_not_be_deleted_goes_with_the_next(
    platform: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, instance = platform.run("unrelated"), platform.instance

    def refused(*_: object, **__: object) -> None:
        raise PermissionError

    with monkeypatch.context() as patch:
        patch.setattr(type(instance.compute_log_manager), "delete_logs", refused)
        with pytest.raises(PermissionError):
            delete_run(instance, old)
    assert platform.retain() == {old}


def test_retention_runs_by_itself_only_where_a_time_is_named() -> None:
    run = Run("demo")
    assert [schedule.job_name for schedule in schedules(run)] == ["verify"]
    named = run.with_settings({"retention.cron": "0 4 * * *", "retention.keep_days": 7})
    [_, schedule] = schedules(named)
    assert schedule.cron_schedule == "0 4 * * *"
    assert schedule.job_name == "retention"
