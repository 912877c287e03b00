"""A run over partitions tells of those that are finished, however it ends."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import dagster as dg
import pytest

from nmoe_assets.events import each_partition
from nmoe_assets.resources import Machine
from nmoe_core.stages.result import Output
from nmoe_core.stages.shards import Attempt

pytestmark = pytest.mark.filterwarnings("ignore:Parameter `backfill_policy`")
KEY = dg.AssetKey("scores")
KEYS = [f"{number:04d}" for number in range(4)]
Show = Callable[[str, Output], Mapping[str, Any]]


class _NoChecks:
    """Checks of an asset that has none."""

    def results(self, keys: Sequence[str]) -> Iterator[dg.AssetCheckResult]:
        return iter(())


def _run(
    instance: dg.DagsterInstance, show: Show, seconds: float = 0.0, pause_s: float = 0.0
) -> dg.ExecuteInProcessResult:
    """Make all partitions; each is said to have taken so long."""

    def make(keys: Sequence[str]) -> Iterator[Attempt]:
        for key in keys:
            time.sleep(pause_s)
            yield Attempt(key, Output(f"digest of {key}", {"documents": 3}), None, seconds, seconds)

    @dg.asset(
        key=KEY,
        partitions_def=dg.StaticPartitionsDefinition(KEYS),
        backfill_policy=dg.BackfillPolicy.single_run(),
    )
    def scores(context: dg.AssetExecutionContext) -> Iterator[Any]:
        machine = Machine(usd_per_hour=3600.0)  # a dollar a second
        yield from each_partition(context, machine, make, _NoChecks(), show)

    tags = {
        "dagster/asset_partition_range_start": KEYS[0],
        "dagster/asset_partition_range_end": KEYS[-1],
    }
    job = dg.define_asset_job("grade", executor_def=dg.in_process_executor)
    definition = dg.Definitions([scores], jobs=[job]).resolve_job_def("grade")
    return definition.execute_in_process(instance=instance, tags=tags, raise_on_error=False)


def _versions(instance: dg.DagsterInstance) -> dict[str, str]:
    """Partition -> data version of its newest materialisation."""
    records = instance.fetch_materializations(KEY, limit=100).records
    return {
        record.partition_key: record.asset_materialization.tags["dagster/data_version"]
        for record in reversed(records)
    }


def test_each_partition_has_the_version_of_its_own_content(instance: dg.DagsterInstance) -> None:
    assert _run(instance, lambda key, output: {}).success
    assert _versions(instance) == {key: f"digest of {key}" for key in KEYS}


@pytest.mark.parametrize("error", [ZeroDivisionError("a defect"), KeyboardInterrupt()])
def test_what_was_finished_before_an_unforeseen_end_is_told(
    instance: dg.DagsterInstance, error: BaseException
) -> None:
    def show(key: str, output: Output) -> Mapping[str, Any]:
        if key == KEYS[2]:
            raise error
        return {}

    assert not _run(instance, show).success
    assert _versions(instance) == {key: f"digest of {key}" for key in KEYS[:2]}


def test_partitions_made_at_once_share_the_cost_of_the_machine(
    instance: dg.DagsterInstance,
) -> None:
    """Four that are said to take 100 s each, in a run that took far less: they ran at once."""
    started = time.perf_counter()
    assert _run(instance, lambda key, output: {}, seconds=100.0, pause_s=0.1).success
    took_s = time.perf_counter() - started
    records = instance.fetch_materializations(KEY, limit=4).records
    metadata = [record.asset_materialization.metadata for record in records]
    assert [one["seconds"].value for one in metadata] == [100.0] * 4
    assert 0.4 <= sum(one["cost_usd"].value for one in metadata) <= took_s
