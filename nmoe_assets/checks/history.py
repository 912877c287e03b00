"""The verdicts of a check in Dagster, and the verdict that Dagster uses.

Dagster uses the execution of the run that was created last, and only if this execution checked the
newest materialisation. If runs of an asset overlap, another run may end last; then its verdicts
would be ignored, or old verdicts would block the assets that follow.
"""

from collections.abc import Iterable
from typing import Any

import dagster as dg

from nmoe_assets.dagster_private import CheckTarget

FAILED_PARTITIONS = "failed_partitions"
_VERDICTS = ("SUCCEEDED", "FAILED")
_LOOK_BACK = 40  # number of executions to read, including executions without a verdict


def failed_partitions(instance: dg.DagsterInstance, check: dg.AssetCheckKey) -> list[str]:
    """The failed partitions that the last verdict names."""
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
    """A check's result as the event that Dagster would log."""
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
    """Report a run's verdicts again if a run that was created later has executed the check."""
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
