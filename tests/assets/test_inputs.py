"""A run says of itself that its inputs changed while it was at work."""

from collections.abc import Callable
from pathlib import Path

import dagster as dg
import pytest

from nmoe_assets.assets.events import materialize_unpartitioned
from nmoe_assets.inputs import CHANGED_MEANWHILE, PIPELINE
from nmoe_assets.ops.pipeline import step_error
from nmoe_assets.resources import Machine
from nmoe_core.base.result import Result
from tests.assets.dagster_internals import job_of_file

HEADS, OTHER = dg.AssetKey("heads"), dg.AssetKey("other")


def _is_tagged(instance: dg.DagsterInstance, while_it_runs: Callable[[], None]) -> bool:
    def make() -> Result:
        while_it_runs()
        return Result("digest", {})

    @dg.asset(deps=[HEADS])
    def calibration(context: dg.AssetExecutionContext) -> dg.MaterializeResult:
        return materialize_unpartitioned(context, Machine(), make)

    done = dg.materialize([calibration], instance=instance, raise_on_error=False)
    run = instance.get_run_by_id(done.run_id)
    assert run is not None
    return CHANGED_MEANWHILE in run.tags


def _made(instance: dg.DagsterInstance, key: dg.AssetKey) -> None:
    instance.report_runless_asset_event(dg.AssetMaterialization(key))


@pytest.mark.parametrize(
    ("made", "is_made_before", "is_tagged"),
    [(HEADS, True, True), (HEADS, False, True), (OTHER, True, False)],
)
def test_a_run_is_tagged_whose_own_input_is_made_meanwhile(
    instance: dg.DagsterInstance, made: dg.AssetKey, *, is_made_before: bool, is_tagged: bool
) -> None:
    if is_made_before:
        _made(instance, HEADS)
    assert _is_tagged(instance, lambda: _made(instance, made)) == is_tagged


def test_a_run_that_ends_early_is_tagged_as_well(instance: dg.DagsterInstance) -> None:
    def make_input_and_end() -> None:
        _made(instance, HEADS)
        raise KeyboardInterrupt

    assert _is_tagged(instance, make_input_and_end)


LOCATION = """
import os
import dagster as dg
from nmoe_assets.assets.events import materialize_unpartitioned
from nmoe_assets.resources import Machine
from nmoe_core.base.result import Result

CHECK = dg.AssetCheckSpec("promotion", asset="heads", blocking=True)

@dg.asset(check_specs=[CHECK])
def heads() -> dg.MaterializeResult:
    verdict = dg.AssetCheckResult(check_name="promotion", passed="PASSES" in os.environ)
    return dg.MaterializeResult(check_results=[verdict])

@dg.asset(deps=[heads])
def calibration(context: dg.AssetExecutionContext) -> dg.MaterializeResult:
    return materialize_unpartitioned(context, Machine(), lambda: Result("digest"))

jobs = [dg.define_asset_job(asset.key.path[0] + "_job", [asset]) for asset in (heads, calibration)]
defs = dg.Definitions([heads, calibration], jobs=jobs, executor=dg.in_process_executor)
"""


def test_the_pipeline_makes_nothing_from_an_input_that_did_not_pass_a_blocking_check(
    instance: dg.DagsterInstance, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each asset in a run of its own, as the backfill launches them."""
    (tmp_path / "location.py").write_text(LOCATION)

    def makes(asset: str) -> bool:
        job = job_of_file(tmp_path / "location.py", f"{asset}_job")
        tags = {PIPELINE: "its run"}
        with dg.execute_job(job, instance, tags=tags, raise_on_error=False) as done:
            told = [step_error(event) for event in done.all_events if event.is_step_failure]
        by_heads = "heads did not pass the check promotion: correct the cause and make it again"
        expected = asset == "calibration" and not done.success
        assert expected == any(by_heads in text for text in told)
        return done.success

    assert not makes("heads")
    assert not makes("calibration")
    monkeypatch.setenv("PASSES", "yes")
    assert makes("heads")
    assert makes("calibration")
