"""How a run tells Dagster of partitions: an event each, with the version of its own content."""

import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import dagster as dg
from dagster._core.definitions.source_asset import SYSTEM_METADATA_KEY_SOURCE_ASSET_OBSERVATION
from dagster._core.events import (
    DagsterEventBatchMetadata,
    StepMaterializationData,
    generate_event_batch_id,
)

from nmoe_assets.interrupts import interrupts_held_back
from nmoe_assets.metadata import with_row_count

# An asset's result with this key among its metadata is not logged as materialisations by Dagster,
# which would be of one data version: for a moment, or for good where the run is killed then, every
# partition would have that of another. Dagster has it for assets that log their own observations.
IS_TOLD = SYSTEM_METADATA_KEY_SOURCE_ASSET_OBSERVATION


@dataclass(frozen=True)
class Made:
    """One partition's output: the digest of its content, and what people look at."""

    data_version: str
    metadata: Mapping[str, Any]


def log_partitions(
    context: dg.AssetExecutionContext,
    made: Mapping[str, Made],
    read: Mapping[dg.AssetKey, str] | None = None,
    run_metadata: Mapping[str, Any] | None = None,
    unchecked: Sequence[dg.AssetCheckEvaluation] = (),
) -> None:
    """Log a materialisation of each partition, all in one batch and at one time.

    Args:
        context: The asset's context.
        made: Result by partition key.
        read: Versions of external inputs as this run saw them.
        run_metadata: Facts about the whole run, shown on each partition.
        unchecked: Verdicts of a run that ends before it can check what it made.
    """
    materializations = [
        dg.AssetMaterialization(
            asset_key=context.asset_key,
            partition=key,
            metadata=with_row_count({**output.metadata, **(run_metadata or {})}, of_partition=True),
            tags=_version_tags(context, output.data_version, read or {}),
        )
        for key, output in made.items()
    ]
    # Automation compares times of outputs and inputs, in groups of one time.
    batch, now_s, last = generate_event_batch_id(), time.time(), len(materializations) - 1
    with interrupts_held_back():  # or what is in the batch by then would not be told
        for number, materialization in enumerate(materializations):
            event = _step_event(
                context,
                dg.DagsterEventType.ASSET_MATERIALIZATION,
                StepMaterializationData(materialization),
                f"Materialized value {materialization.label}.",  # as Dagster says it
            )
            in_batch = DagsterEventBatchMetadata(batch, number == last)
            context.instance.report_dagster_event(
                event, context.run.run_id, logging.DEBUG, in_batch, now_s
            )
        log_verdicts(context, unchecked)


def log_verdicts(
    context: dg.AssetExecutionContext, verdicts: Iterable[dg.AssetCheckEvaluation]
) -> None:
    """Log verdicts of a step that will not come to give them."""
    for verdict in verdicts:
        event = _step_event(
            context,
            dg.DagsterEventType.ASSET_CHECK_EVALUATION,
            verdict,
            f"Asset check '{verdict.check_name}' did not pass: {verdict.description}",
        )
        context.instance.report_dagster_event(event, context.run.run_id, logging.ERROR)


def _step_event(
    context: dg.AssetExecutionContext, event_type: dg.DagsterEventType, data: Any, message: str
) -> dg.DagsterEvent:
    step = context.op_execution_context.get_step_execution_context()
    event = dg.DagsterEvent(
        event_type_value=event_type.value,
        job_name=step.job_name,
        step_handle=step.step.handle,
        node_handle=step.step.node_handle,
        step_kind_value=step.step.kind.value,
        logging_tags=step.event_tags,
        event_specific_data=data,
        message=message,
        pid=os.getpid(),
    )
    context.op_execution_context._events.append(event)  # for who executes a job in process
    return event


def _version_tags(
    context: dg.AssetExecutionContext, data_version: str, read: Mapping[dg.AssetKey, str]
) -> dict[str, str]:
    """The tags Dagster gives its own events: data and code version, and versions of the inputs.

    Without those of the inputs it calls every partition stale. It has no public call for them, so
    this uses its own functions; a test asks whether anything is stale after a run.
    """
    from dagster._core.execution.plan.execute_step import (
        _build_data_version_tags,
        _get_input_provenance_data,
    )

    step = context.op_execution_context.get_step_execution_context()
    seen = {
        key: {"data_version": dg.DataVersion(version), "storage_id": None}
        for key, version in read.items()
    }
    inputs = {**_get_input_provenance_data(context.asset_key, step), **seen}
    code_version = context.assets_def.code_versions_by_key.get(context.asset_key)
    return _build_data_version_tags(
        dg.DataVersion(data_version), code_version or context.run.run_id, inputs, True
    )


def report_external(context: dg.AssetExecutionContext, key: dg.AssetKey, version: str) -> None:
    """Record the version of an external asset, unless it is the one on record."""
    from dagster._core.definitions.data_version import extract_data_version_from_entry

    record = context.instance.get_latest_data_version_record(key, is_source=False)
    known = extract_data_version_from_entry(record.event_log_entry) if record else None
    if known is None or known.value != version:
        tags = {"dagster/data_version": version}
        context.log_event(dg.AssetMaterialization(key, tags=tags))
