"""The private names of Dagster that tests use, to report what a run would and to ask what it shows.

The UI asks for staleness through the same resolver; events and origins have no public constructor.
"""

import logging
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dagster as dg
import grpc
import pytest
from dagster._core.definitions.asset_checks.asset_check_evaluation import (
    AssetCheckEvaluationPlanned,
)
from dagster._core.definitions.data_version import CachingStaleStatusResolver
from dagster._core.definitions.partitions.context import partition_loading_context
from dagster._core.definitions.reconstruct import ReconstructableJob, ReconstructableRepository
from dagster._core.events import (
    AssetMaterializationPlannedData,
    EngineEventData,
    StepMaterializationData,
)
from dagster._core.instance.ref import InstanceRef
from dagster._core.loader import LoadingContextForTest
from dagster._core.remote_origin import (
    GrpcServerCodeLocationOrigin,
    RemoteJobOrigin,
    RemoteRepositoryOrigin,
)
from dagster._core.storage.compute_log_manager import ComputeIOType
from dagster._daemon.monitoring.run_monitoring import monitor_starting_run
from dagster._grpc.__generated__ import dagster_api_pb2
from dagster._grpc.__generated__.dagster_api_pb2_grpc import (
    DagsterApiServicer,
    add_DagsterApiServicer_to_server,
)
from dagster._serdes import ConfigurableClassData

__all__ = [
    "AssetCheckEvaluationPlanned",
    "AssetMaterializationPlannedData",
    "ComputeIOType",
    "ConfigurableClassData",
    "InstanceRef",
    "StepMaterializationData",
    "answering_location",
    "at_work",
    "job_of_file",
    "run_of_another_location",
    "stale_causes",
    "time_out_start",
]


def at_work(instance: dg.DagsterInstance, run: dg.DagsterRun, pid: int) -> None:
    """Log that a process executes a run, as Dagster does at its start."""
    instance.report_engine_event("Started", run, EngineEventData.in_process(pid))


def time_out_start(
    instance: dg.DagsterInstance, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the daemon does with a run that did not start within `start_timeout_seconds`."""
    with monkeypatch.context() as patch:
        patch.setattr(type(instance), "run_monitoring_start_timeout_seconds", 0)
        (record,) = instance.get_run_records(dg.RunsFilter(run_ids=[run_id]))
        monitor_starting_run(instance, record, logging.getLogger(__name__))


def ended_process() -> int:
    """The id of a process that was."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@contextmanager
def answering_location() -> Iterator[int]:
    """A server that answers as a code location does, and its port."""

    class Location(DagsterApiServicer):
        def Ping(self, request: Any, context: Any) -> Any:
            return dagster_api_pb2.PingReply(echo=request.echo)

    server = grpc.server(ThreadPoolExecutor(1))
    add_DagsterApiServicer_to_server(Location(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield port
    server.stop(None).wait()


def run_of_another_location(port: int = 1) -> dg.DagsterRun:
    """A run that a code location started."""
    location = GrpcServerCodeLocationOrigin(host="localhost", port=port, location_name="another")
    origin = RemoteJobOrigin(RemoteRepositoryOrigin(location, "__repository__"), "theirs")
    return dg.DagsterRun(job_name="theirs", remote_job_origin=origin)


StaleCauses = dict[tuple[dg.AssetKey, str | None], tuple[str, list[str]]]


def stale_causes(instance: dg.DagsterInstance, definitions: dg.Definitions) -> StaleCauses:
    """(asset, partition) -> FRESH, STALE or MISSING, and why, as the UI shows it."""
    graph = definitions.resolve_asset_graph()
    found = {}
    with _resolver(instance, definitions) as resolver:
        for key in graph.materializable_asset_keys:
            partitions = graph.get(key).partitions_def
            for partition in partitions.get_partition_keys() if partitions else [None]:
                status = resolver.get_status(key, partition).value
                causes = [cause.reason for cause in resolver.get_stale_causes(key, partition)]
                found[key, partition] = status, causes
    return found


@contextmanager
def _resolver(
    instance: dg.DagsterInstance, definitions: dg.Definitions
) -> Iterator[CachingStaleStatusResolver]:
    with partition_loading_context():
        yield CachingStaleStatusResolver(
            instance, definitions.resolve_asset_graph(), LoadingContextForTest(instance)
        )


def job_of_file(path: Path, name: str) -> ReconstructableJob:
    """A job of a code location in a file, as `dagster job execute -f` finds it."""
    location = ReconstructableRepository.for_file(str(path), "defs", str(path.parent))
    return location.get_reconstructable_job(name)
