"""The versions of a step's inputs at its start, for events and automation."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import dagster as dg

from nmoe_core.config.run import Run

CHANGED_MEANWHILE = "nmoe/inputs_changed_meanwhile"
PIPELINE = "nmoe/pipeline"
REBUILD = "nmoe/rebuild"
_CHECK_WAIT_S = 10
_CHECK_LOOKS = 60


def forget_tagged(
    context: dg.AssetExecutionContext,
    run: Run,
    key: Sequence[str],
    partitions: Sequence[str] = ("",),
) -> None:
    """In a run with the tag `nmoe/rebuild`, remove the records of its outputs, so that current
    outputs are made again too. Raises as `forget`."""
    if context.run.tags.get(REBUILD, "") in ("", "false"):
        return
    from nmoe_core.tasks.graph.records import forget  # imported late, so that definitions load fast

    name = "/".join(key)
    forget(run, [f"{name}:{partition}".rstrip(":") for partition in partitions])


class _Newest(NamedTuple):
    storage_id: int | None
    data_version: str


class CurrentInputs:
    """The newest materialisation of each input of a step, read when the object is created.

    Raises:
        dg.Failure: In a run of the pipeline, an input did not pass a blocking check.
        dg.RetryRequested: A blocking check of an input has not finished yet.
    """

    def __init__(self, context: dg.AssetExecutionContext) -> None:
        if PIPELINE in context.run.tags:
            _require_checked_inputs(context)
        self._context = context
        self._newest = self._read()

    def version_tags(self) -> dict[str, str]:
        """The event tags by which Dagster detects that an input has changed."""
        tags: dict[str, str] = {}
        for key, (storage_id, data_version) in self._newest.items():
            name = key.to_user_string()
            tags[f"dagster/input_data_version/{name}"] = data_version
            tags[f"dagster/input_event_pointer/{name}"] = str(storage_id or "NULL")
        return tags

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Tag the run if an input is made again while the block runs, even if the block fails. The
        output may then be made from the old input, so automation does not treat it as current
        (`nmoe_assets.automation`).
        """
        try:
            yield
        finally:
            if self._read() != self._newest:
                tags = {CHANGED_MEANWHILE: "true"}
                self._context.instance.add_run_tags(self._context.run.run_id, tags)

    def _read(self) -> dict[dg.AssetKey, _Newest]:
        context = self._context
        found = {}
        for key in sorted(context.assets_def.asset_deps[context.asset_key]):
            records = context.instance.fetch_materializations(key, limit=1).records
            made = records[0].asset_materialization if records else None
            version = (made.tags or {}).get("dagster/data_version") if made else None
            found[key] = _Newest(records[0].storage_id if records else None, version or "INITIAL")
        return found


def _require_checked_inputs(context: dg.AssetExecutionContext) -> None:
    """Raise dg.Failure if a blocking check of an input failed. In Dagster a check blocks only
    assets of the same run; with this function, it also stops later runs of the pipeline."""
    graph = context.repository_def.asset_graph
    inputs = context.assets_def.asset_deps[context.asset_key]
    blocking = [key for key in graph.get_check_keys_for_assets(inputs) if graph.get(key).blocking]
    found = context.instance.event_log_storage.get_latest_asset_check_execution_by_key(blocking)
    for key in sorted(blocking, key=str):
        record = found.get(key)
        if record is None or record.status.value == "SUCCEEDED":
            continue
        run = context.instance.get_run_by_id(record.run_id)
        if record.status.value == "PLANNED" and run is not None and not run.is_finished:
            raise dg.RetryRequested(_CHECK_LOOKS, _CHECK_WAIT_S)
        asset = key.asset_key.to_user_string()
        raise dg.Failure(
            f"{asset} did not pass the check {key.name}: correct the cause and make it again",
            allow_retries=False,
        )
