"""How assets tell Dagster what they made: exact data versions and metadata per partition.

A run has one data version for all its partitions. An event logged after the asset's own result
wins, so each partition gets its own: a partition whose bytes did not change keeps its version, and
nothing downstream of it goes stale.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import dagster as dg


@dataclass(frozen=True)
class Made:
    """One partition's output: the digest of its content, and what people look at."""

    data_version: str
    metadata: Mapping[str, Any]


def partition_results(
    context: dg.AssetExecutionContext,
    made: Mapping[str, Made],
    read: Mapping[dg.AssetKey, str] | None = None,
    **run_metadata: Any,
) -> Iterator[dg.MaterializeResult]:
    """Report every partition of this run with its own version and metadata.

    Args:
        context: The asset's context.
        made: Result by partition key.
        read: Versions of external inputs as this run saw them.
        run_metadata: Facts about the whole run, shown on each partition.
    """
    yield dg.MaterializeResult(metadata=run_metadata)
    for external, version in (read or {}).items():
        report_external(context, external, version)
    for key, output in made.items():
        context.log_event(
            dg.AssetMaterialization(
                asset_key=context.asset_key,
                partition=key,
                metadata=_with_row_count({**output.metadata, **run_metadata}),
                tags=_version_tags(context, output.data_version, read or {}),
            )
        )


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
        dg.DataVersion(data_version), code_version or context.run_id, inputs, True
    )


def report_external(context: dg.AssetExecutionContext, key: dg.AssetKey, version: str) -> None:
    """Record the version of an external asset, unless it is the one on record."""
    from dagster._core.definitions.data_version import extract_data_version_from_entry

    record = context.instance.get_latest_data_version_record(key, is_source=False)
    known = extract_data_version_from_entry(record.event_log_entry) if record else None
    if known is None or known.value != version:
        tags = {"dagster/data_version": version}
        context.log_event(dg.AssetMaterialization(key, tags=tags))


def result(data_version: str, metadata: Mapping[str, Any]) -> dg.MaterializeResult:
    """An unpartitioned output with the digest of its content."""
    return dg.MaterializeResult(
        data_version=dg.DataVersion(data_version), metadata=_with_row_count(metadata)
    )


def _with_row_count(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The number of documents also under the name that Dagster draws over time."""
    if "documents" not in metadata:
        return dict(metadata)
    return {"dagster/row_count": metadata["documents"], **metadata}
