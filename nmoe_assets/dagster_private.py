"""Every private name of Dagster 1.13 that this package uses; no other file uses one.

| name | benefit | public alternative | without it |
|---|---|---|---|
| `SUPPRESS_DEFAULT_EVENT` | a run over partitions logs one event per partition, each with the data version of its own bytes | `output_required=False`, which skips the assets that follow in the run | Dagster adds events in which all partitions have one version: rewritten partitions look changed |
| `CheckTarget` | a verdict of a run that overlapped another run counts for the newest materialisation | none | automation waits for a check that passed, or does not wait for a check that failed |
| `CheckRunHealthResult`, `WorkerStatus` | the launcher can report that the process of a run has ended | none | runs that a power cut ended stay "started" for ever |
| `location_is_silent` | a run that ended with its code location is started again when that is back | none | Dagster gives the run up, since it cannot ask the location for it |
| `partitions_of_backfills` | automation leaves alone what a backfill will make | the webserver's query of backfills, whose address a sensor does not know | a sensor and a backfill would request one output twice |
| `failed_partitions` | a partition that Dagster counts as failed gets an event when its output is current again | `DagsterInstance.get_status_by_partition`, which hides failures while a run is at work | a repaired partition stays failed in the UI |
| `launch_backfill` | `pipeline`, started in the UI, becomes a backfill if runs belong on other machines | the mutation `launchPartitionBackfill` of the webserver, whose address a run does not know | `pipeline` would run all tasks in one process, on one machine |
| `show_under_location` | a run from the command line appears on its job's page and in the timeline | the tag `.dagster/repository`, which the page reads but the timeline does not | the timeline omits runs of `dagster job execute`, such as the demo |
| `find_migrations_once` | a process that opens the SQLite instance for every tick keeps its size | none | alembic keeps a function for each opening until the process ends: some 50 MB a day for a code location |
| `change_commands_of_dev` | the webserver of `nmoe ui` asks for a token | none: `dagster dev` has no option for its webserver | `nmoe ui` would have to start, watch and end three processes of Dagster itself |
| `event_files` | the files of a deleted run are deleted too | none | an empty SQLite file stays for each run that `retention` deleted |
"""  # noqa: E501

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import dagster as dg
from dagster._core.definitions.asset_checks.asset_check_evaluation import (
    AssetCheckEvaluationTargetMaterializationData as CheckTarget,
)
from dagster._core.definitions.source_asset import (
    SYSTEM_METADATA_KEY_SOURCE_ASSET_OBSERVATION as SUPPRESS_DEFAULT_EVENT,
)
from dagster._core.errors import DagsterUserCodeUnreachableError
from dagster._core.launcher.base import CheckRunHealthResult, WorkerStatus
from dagster._core.remote_origin import GrpcServerCodeLocationOrigin
from dagster._core.storage import sql

__all__ = [
    "SUPPRESS_DEFAULT_EVENT",
    "CheckRunHealthResult",
    "CheckTarget",
    "WorkerStatus",
    "change_commands_of_dev",
    "event_files",
    "failed_partitions",
    "find_migrations_once",
    "launch_backfill",
    "location_is_silent",
    "partitions_of_backfills",
    "show_under_location",
]


def find_migrations_once() -> None:
    """Pass the migrations of the storage as a path. Dagster passes them as a package resource; then
    alembic registers an exit function each time that an SQLite instance is opened, and memory
    grows."""
    sql.ALEMBIC_SCRIPTS_LOCATION = str(Path(sql.__file__).with_name("alembic"))
    sql.get_alembic_config.cache_clear()


def location_is_silent(run: dg.DagsterRun) -> bool:
    """Whether a run's code location is a server at a port, such as a container, that does not
    answer now. The sockets of `dagster dev` have new names after a restart and never answer
    again."""
    job = run.remote_job_origin
    location = job.repository_origin.code_location_origin if job else None
    if not isinstance(location, GrpcServerCodeLocationOrigin) or location.port is None:
        return False
    try:
        location.create_client().ping("")
    except DagsterUserCodeUnreachableError:
        return True
    return False


def launch_backfill(
    instance: dg.DagsterInstance,
    definitions: dg.Definitions,
    keys: Iterable[dg.AssetKey],
    title: str,
    tags: dict[str, str],
) -> str:
    """Request a backfill of all partitions of assets from the daemon, in the order of the graph;
    returns the backfill's id."""
    from dagster._core.definitions.selector import PartitionsByAssetSelector
    from dagster._core.execution.backfill import PartitionBackfill
    from dagster._core.utils import make_new_backfill_id

    backfill = PartitionBackfill.from_partitions_by_assets(
        make_new_backfill_id(),
        definitions.resolve_asset_graph(),
        time.time(),
        tags,
        instance,
        [PartitionsByAssetSelector(asset_key=key) for key in keys],
        title,
        None,
        None,
    )
    instance.add_backfill(backfill)
    return backfill.backfill_id


def partitions_of_backfills(
    instance: dg.DagsterInstance, graph: Any
) -> dict[dg.AssetKey, set[str]]:
    """The partitions (`""` for an asset without partitions) that backfills at work will still
    make."""
    from dagster._core.errors import DagsterDefinitionChangedDeserializationError
    from dagster._core.execution.backfill import BulkActionsFilter, BulkActionStatus

    found: dict[dg.AssetKey, set[str]] = {}
    chosen = BulkActionsFilter(statuses=[BulkActionStatus.REQUESTED])
    for backfill in instance.get_backfills(filters=chosen):
        if not backfill.is_asset_backfill:
            continue
        try:
            data = backfill.get_asset_backfill_data(graph)
        except DagsterDefinitionChangedDeserializationError:
            continue  # the daemon fails this backfill
        left = data.target_subset - data.materialized_subset - data.failed_and_downstream_subset
        for one in left.iterate_asset_partitions():
            found.setdefault(one.asset_key, set()).add(one.partition_key or "")
    return found


def failed_partitions(
    instance: dg.DagsterInstance, key: dg.AssetKey, partitions: dg.PartitionsDefinition[str]
) -> set[str]:
    """The partitions of an asset that the UI counts as failed, also if a run makes them again."""
    from dagster._core.storage.partition_status_cache import get_and_update_asset_status_cache_value

    status = get_and_update_asset_status_cache_value(instance, key, partitions)
    if status is None:
        return set()
    return set(status.deserialize_failed_partition_subsets(partitions).get_partition_keys())


def show_under_location(instance: dg.DagsterInstance, run: dg.DagsterRun, location: str) -> None:
    """Set the location of a run without one to the location that has its job."""
    from dagster._core.remote_origin import (
        ManagedGrpcPythonEnvCodeLocationOrigin,
        RemoteJobOrigin,
        RemoteRepositoryOrigin,
    )
    from dagster._core.types.loadable_target_origin import LoadableTargetOrigin

    place = ManagedGrpcPythonEnvCodeLocationOrigin(LoadableTargetOrigin(module_name=location))
    origin = RemoteJobOrigin(RemoteRepositoryOrigin(place, "__repository__"), run.job_name)
    # Dagster can change the repository tag of a run, but cannot add it.
    label = origin.repository_origin.get_label()
    instance.add_run_tags(run.run_id, {".dagster/repository": label})
    if (stored := instance.get_run_by_id(run.run_id)) is not None:
        instance.run_storage.replace_job_origin(stored, origin)


def change_commands_of_dev(changes: Mapping[str, str], variables: Mapping[str, str]) -> None:
    """Replace words in the commands of the processes that `dagster dev` starts. A process whose
    command changes gets these variables too."""
    from dagster._cli import dev

    names = dev.__dict__
    start = names["open_ipc_subprocess"]

    def start_changed(parts: Sequence[str], **options: Any) -> Any:
        if not changes.keys().isdisjoint(parts):
            options["env"] = os.environ | variables
        return start([changes.get(part, part) for part in parts], **options)

    names["open_ipc_subprocess"] = start_changed


def event_files(instance: dg.DagsterInstance, run_id: str) -> list[Path]:
    """SQLite files that hold the events of one run; empty with PostgreSQL."""
    path_of = getattr(instance.event_log_storage, "path_for_shard", None)
    if path_of is None:
        return []
    shard = Path(path_of(run_id))
    return sorted(shard.parent.glob(f"{shard.name}*"))
