"""A run says of itself that its inputs changed while it was at work."""

from collections.abc import Callable

import dagster as dg
import pytest

from nmoe_assets.assets.events import materialize_unpartitioned
from nmoe_assets.assets.inputs import CHANGED_MEANWHILE
from nmoe_assets.resources import Machine
from nmoe_core.base.result import Result

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


@pytest.mark.parametrize("made_before", [True, False])
def test_a_run_whose_input_is_made_meanwhile_is_tagged(
    instance: dg.DagsterInstance, made_before: bool
) -> None:
    if made_before:
        _made(instance, HEADS)
    assert _is_tagged(instance, lambda: _made(instance, HEADS))


def test_a_run_that_ends_early_is_tagged_as_well(instance: dg.DagsterInstance) -> None:
    def make_input_and_end() -> None:
        _made(instance, HEADS)
        raise KeyboardInterrupt

    assert _is_tagged(instance, make_input_and_end)


def test_run_is_not_tagged_when_unrelated_assets_change(instance: dg.DagsterInstance) -> None:
    _made(instance, HEADS)
    assert not _is_tagged(instance, lambda: _made(instance, OTHER))
