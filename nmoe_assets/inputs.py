"""Whether an output's inputs changed while it was made."""

from collections.abc import Iterator
from contextlib import contextmanager

import dagster as dg

CHANGED_MEANWHILE = "nmoe/inputs_changed_meanwhile"


@contextmanager
def inputs_watched(context: dg.AssetExecutionContext) -> Iterator[None]:
    """Tag the run where an input was made again while the block ran.

    What was made may then be of the input as it was, so automation does not take it as made
    (`nmoe_assets.automation`).
    """
    before = _newest(context)
    try:
        yield
    finally:  # what was finished before an interrupt is told as well
        _tag_if_changed(context, before)


def _tag_if_changed(
    context: dg.AssetExecutionContext, before: dict[dg.AssetKey, int | None]
) -> None:
    if _newest(context) != before:
        context.instance.add_run_tags(context.run.run_id, {CHANGED_MEANWHILE: "true"})


def _newest(context: dg.AssetExecutionContext) -> dict[dg.AssetKey, int | None]:
    """Storage id of the last materialisation of each input."""
    inputs = context.assets_def.asset_deps[context.asset_key]
    records = context.instance.get_asset_records(list(inputs)) if inputs else ()
    return {
        record.asset_entry.asset_key: record.asset_entry.last_materialization_storage_id
        for record in records
    }
