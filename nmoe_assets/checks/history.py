"""The verdicts of a check that Dagster holds, and which of them it takes for the newest.

Dagster takes the execution whose run was created last, and only where it is about the newest
materialisation. Of runs of one asset that overlap, that is not the one that ended last: the verdict
of the others would not count, or would hold up the assets that follow.
"""

from collections.abc import Iterable
from typing import Any

import dagster as dg

from nmoe_assets.dagster_private import CheckTarget

FAILED_PARTITIONS = "failed_partitions"
_VERDICTS = ("SUCCEEDED", "FAILED")
_LOOK_BACK = 40  # executions of runs that overlapped, those that gave no verdict included


def failed_partitions(instance: dg.DagsterInstance, check: dg.AssetCheckKey) -> list[str]:
    """Partitions that the verdict given last names."""
    history = instance.event_log_storage.get_asset_check_execution_history(check, _LOOK_BACK)
    verdicts = [record for record in history if record.status.value in _VERDICTS]
    newest = max(verdicts, key=_logged_at, default=None)
    if newest is None or newest.evaluation is None:
        return []
    named = newest.evaluation.metadata.get(FAILED_PARTITIONS)
    return str(named.value).split(", ") if named else []


def _logged_at(record: Any) -> float:  # Dagster does not export the type of an execution
    return record.event.timestamp


def evaluation(
    result: dg.AssetCheckResult, target: CheckTarget | None = None
) -> dg.AssetCheckEvaluation:
    """A check's result as the event that Dagster makes of it."""
    assert result.asset_key is not None
    assert result.check_name is not None
    return dg.AssetCheckEvaluation(
        asset_key=result.asset_key,
        check_name=result.check_name,
        passed=result.passed,
        metadata=dict(result.metadata),
        target_materialization_data=target,
        severity=result.severity,
        description=result.description,
    )


def make_newest(
    instance: dg.DagsterInstance, run_id: str, results: Iterable[dg.AssetCheckResult]
) -> None:
    """Give a run's verdicts once more where the check has an execution of a run created later."""
    for result in results:
        verdict = evaluation(result)
        history = instance.event_log_storage.get_asset_check_execution_history(
            verdict.asset_check_key, 1
        )
        if history and history[0].run_id != run_id:
            target = _newest_materialization(instance, verdict.asset_key)
            instance.report_runless_asset_event(evaluation(result, target))


def _newest_materialization(instance: dg.DagsterInstance, asset: dg.AssetKey) -> CheckTarget | None:
    for newest in instance.fetch_materializations(asset, limit=1).records:
        return CheckTarget(
            storage_id=newest.storage_id, run_id=newest.run_id, timestamp=newest.timestamp
        )
    return None
