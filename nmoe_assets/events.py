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
    context: dg.AssetExecutionContext, made: Mapping[str, Made], **run_metadata: Any
) -> Iterator[dg.MaterializeResult]:
    """Report every partition of this run with its own version and metadata.

    Args:
        context: The asset's context.
        made: Result by partition key.
        run_metadata: Facts about the whole run, shown on each partition.
    """
    yield dg.MaterializeResult(metadata=run_metadata)
    code_version = context.assets_def.code_versions_by_key.get(context.asset_key)
    code = {"dagster/code_version": code_version} if code_version else {}
    for key, result in made.items():
        context.log_event(
            dg.AssetMaterialization(
                asset_key=context.asset_key,
                partition=key,
                metadata=_with_row_count({**result.metadata, **run_metadata}),
                tags={"dagster/data_version": result.data_version, **code},
            )
        )


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
