"""An output that another run is writing is waited for, and found current when it has ended."""

import fcntl
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import dagster as dg
import pytest

from nmoe_assets.assets import events, sources
from nmoe_assets.checks.asset_checks import Checks
from nmoe_assets.resources import Machine
from nmoe_core.base.atomic import LOCK_NAME, output_lock
from nmoe_core.base.errors import FormatError
from nmoe_core.base.result import Result
from nmoe_core.config.run import Run
from nmoe_core.tasks.shards import attempt

# As the definitions of the project do it.
pytestmark = pytest.mark.filterwarnings("ignore::dagster.BetaWarning")
KEYS = dg.StaticPartitionsDefinition(["0000", "0001", "0002"])
ALL = {"dagster/asset_partition_range_start": "0000", "dagster/asset_partition_range_end": "0002"}


class Writer:
    """Assets that write below a directory, and another run that does."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.tries: list[str] = []
        self.bad = ""
        self._files: dict[str, object] = {}

    def make(self, key: str) -> Result:
        """Write one output under its lock; the other run ends after the second look."""
        self.tries.append(key)
        if self.tries.count(key) > 2:
            self.other_ends(key)
        if key == self.bad:
            raise FormatError("is damaged")
        with output_lock(self.directory / key):
            return Result(f"digest of {key}")

    def other_starts(self, key: str) -> None:
        """Hold the lock of an output."""
        (self.directory / key).mkdir(parents=True, exist_ok=True)
        file = open(self.directory / key / LOCK_NAME, "w")  # noqa: SIM115 - held till it ends
        fcntl.flock(file, fcntl.LOCK_EX)
        self._files[key] = file

    def other_ends(self, key: str) -> None:
        """Give it back."""
        file = self._files.pop(key, None)
        if file is not None:
            file.close()

    def close(self) -> None:
        """Give all back."""
        for key in list(self._files):
            self.other_ends(key)


@pytest.fixture
def writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Writer]:
    monkeypatch.setattr(events, "_LOCK_WAIT_S", 0)
    made = Writer(tmp_path)
    yield made
    made.close()


def _materialize(writer: Writer, instance: dg.DagsterInstance) -> dg.ExecuteInProcessResult:
    run = Run("demo")
    checks = Checks(run, ["shards"], (), lambda made: {})

    @dg.asset(partitions_def=KEYS, backfill_policy=dg.BackfillPolicy.single_run())
    def shards(context: dg.AssetExecutionContext):
        yield from events.materialize_partitions(
            context, Machine(), lambda keys: (attempt(key, writer.make) for key in keys), checks
        )

    return dg.materialize(
        [shards], instance=instance, tags=ALL, raise_on_error=False, partition_key=None
    )


def _retries(done: dg.ExecuteInProcessResult) -> int:
    return sum(event.event_type_value == "STEP_UP_FOR_RETRY" for event in done.all_events)


@pytest.mark.parametrize(
    ("bad", "retries", "made"), [("", 2, {"0000", "0001", "0002"}), ("0002", 0, {"0000"})]
)
def test_a_run_waits_for_partitions_of_another_run_unless_one_is_bad(
    writer: Writer, bad: str, retries: int, made: set[str]
) -> None:
    writer.other_starts("0001")
    writer.bad = bad
    with dg.DagsterInstance.ephemeral() as instance:
        done = _materialize(writer, instance)
        assert (done.success, _retries(done)) == (not bad, retries)
        assert set(instance.get_materialized_partitions(dg.AssetKey(["shards"]))) == made
    assert writer.tries == ["0000", "0001", "0002"] * (retries + 1)


def test_a_run_waits_for_an_output_of_another_run_for_a_limited_time(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    @dg.asset
    def model(context: dg.AssetExecutionContext) -> dg.MaterializeResult:
        return events.materialize_unpartitioned(context, Machine(), lambda: writer.make("model"))

    with dg.DagsterInstance.ephemeral() as instance:
        writer.other_starts("model")
        done = dg.materialize([model], instance=instance)
        assert (done.success, _retries(done)) == (True, 2)
        monkeypatch.setattr(events, "_LOCK_RETRIES", 1)
        writer.tries.clear()
        writer.other_starts("model")
        done = dg.materialize([model], instance=instance, raise_on_error=False)
        assert (done.success, _retries(done)) == (False, 1)


def test_prep_waits_for_the_lock_of_a_split(
    own_project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nmoe_core.prep.mixture import run_sources
    from nmoe_core.tasks import prep

    run = Run(own_project / "run.toml")
    source = next(plan for plan in run_sources(run) if plan.name == "docs")
    shutil.rmtree(run.tree.split("docs", "train"))
    monkeypatch.setattr(events, "_LOCK_WAIT_S", 0)
    make, tries = prep.make_shards, []

    def beside_another(*arguments: object) -> object:
        tries.append(arguments)
        if len(tries) > 1:
            return make(*arguments)  # type: ignore[arg-type]
        with output_lock(run.tree.split("docs", "train")):
            return make(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(sources, "prep", SimpleNamespace(make_shards=beside_another))
    tags = {**ALL, "dagster/asset_partition_range_end": "0001"}
    with dg.DagsterInstance.ephemeral() as instance:
        done = dg.materialize(
            [sources.documents(run, source), sources.shards(run, source, "train")],
            instance=instance,
            tags=tags,
            resources={"machine": Machine()},
        )
        assert (done.success, _retries(done), len(tries)) == (True, 1, 2)
