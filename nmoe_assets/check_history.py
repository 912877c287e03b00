"""What Dagster holds of a check, and which verdict it takes for the newest.

Dagster takes the execution whose run was created last, and only where it is of the newest
materialisation. Of runs of one asset that overlap, that is not the one that ended last: the verdict
of the others would count for nothing, or hold up what follows.
"""

from collections.abc import Iterable

import dagster as dg
from dagster._core.definitions.asset_checks.asset_check_evaluation import (
    AssetCheckEvaluationTargetMaterializationData,
)
from dagster._core.storage.asset_check_execution_record import AssetCheckExecutionRecordStatus

FAILED_PARTITIONS = "failed_partitions"
_VERDICTS = {
    AssetCheckExecutionRecordStatus.SUCCEEDED,
    AssetCheckExecutionRecordStatus.FAILED,
}
_LOOK_BACK = 20  # verdicts of runs that overlapped


def failed_partitions(instance: dg.DagsterInstance, check: dg.AssetCheckKey) -> list[str]:
    """Partitions that the verdict that was given last names."""
    history = instance.event_log_storage.get_asset_check_execution_history(
        check, _LOOK_BACK, status=_VERDICTS
    )
    entries = [record.event for record in history if record.event]
    newest = max(entries, key=lambda entry: entry.timestamp, default=None)
    if newest is None or newest.dagster_event is None:
        return []
    named = newest.dagster_event.asset_check_evaluation_data.metadata.get(FAILED_PARTITIONS)
    return str(named.value).split(", ") if named else []


def evaluation(
    result: dg.AssetCheckResult,
    target: AssetCheckEvaluationTargetMaterializationData | None = None,
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


def _newest_materialization(
    instance: dg.DagsterInstance, asset: dg.AssetKey
) -> AssetCheckEvaluationTargetMaterializationData | None:
    for record in instance.get_asset_records([asset]):
        newest = record.asset_entry.last_materialization_record
        if newest is not None:
            return AssetCheckEvaluationTargetMaterializationData(
                storage_id=newest.storage_id, run_id=newest.run_id, timestamp=newest.timestamp
            )
    return None
