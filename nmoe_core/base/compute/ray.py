"""`map_shards` on Ray: items as tasks of a cluster, results in the order of the items.

Ray retries an item on another worker or node if its worker was lost, and recomputes a result that
was lost with its node. A task sees only the GPUs that Ray assigned to it. The number of items in
flight follows the current size of the cluster, so nodes may join and leave. Outputs are files that
are committed atomically, never objects of Ray.
"""

import importlib
import logging
import os
import signal
import socket
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from nmoe_core.base.compute import logs as worker_logs
from nmoe_core.base.compute.pool import (
    GRACE_SECONDS,
    MAX_WAITING,
    Initializer,
    Item,
    Map,
    Result,
    Worker,
    sendable,
)
from nmoe_core.base.compute.tables import RayTable
from nmoe_core.base.errors import ConfigError, NmoeError, one_line

ADDRESS_VARIABLE = "RAY_ADDRESS"
_CONNECT_SECONDS = 10.0
_COUNT_EVERY_SECONDS = 1.0


@contextmanager
def open_ray_pool(options: RayTable, initializer: Initializer) -> Iterator[Map]:
    """A pool on Ray; an existing connection is used and left open. Raises ConfigError if Ray is not
    installed or cannot be reached, or if no node has the resources of one item (E-CONFIG-RAY)."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray = importlib.import_module("ray")
    except ModuleNotFoundError:
        raise ConfigError(
            "Ray is not installed",
            where='[compute] backend = "ray"',
            do="pip install 'nmoe-data[ray]'",
            code="E-CONFIG-RAY",
        ) from None
    is_ours = not ray.is_initialized()
    if is_ours:
        _connect(ray, options)
    try:
        epoch = os.environ.get("SOURCE_DATE_EPOCH")
        start = _Start(uuid.uuid4().hex, initializer, worker_logs.package_level(), epoch)
        yield _RayPool(ray, options, start).map
    finally:
        if is_ours:
            ray.shutdown()


class _Start(NamedTuple):
    """Prepare a worker before its first item of a pool."""

    pool: str
    initializer: Initializer
    log_level: int
    epoch: str | None
    """SOURCE_DATE_EPOCH of the main process: a worker has the environment of its node."""


class _Answer(NamedTuple):
    """Outcome of an item, with its log records."""

    result: Any
    error: Exception | None
    records: list[dict[str, Any]]


class _RayPool:
    def __init__(self, ray: Any, options: RayTable, start: _Start) -> None:
        self._ray = ray
        self._options = options
        self._start = ray.put(start)
        self._task = ray.remote(_run).options(
            num_cpus=options.cpus_per_task,
            num_gpus=options.gpus_per_task,
            max_retries=options.max_retries,
            name="nmoe",
        )
        self._most = 0
        self._counted_at = 0.0
        if not self._room():
            have = ray.cluster_resources()
            raise ConfigError(
                "no node of the cluster has the resources of one item",
                where="[compute.ray]",
                found=f"{have.get('CPU', 0):g} CPUs, {have.get('GPU', 0):g} GPUs in all",
                expected=f"cpus_per_task {options.cpus_per_task:g}, "
                f"gpus_per_task {options.gpus_per_task:g}",
                do="add a node with these resources, or lower cpus_per_task and gpus_per_task",
                code="E-CONFIG-RAY",
            )

    def map(
        self, fn: Callable[..., Result], items: Iterable[Item]
    ) -> Generator[Result, None, None]:
        function = self._ray.put(fn)
        pending: deque[Any] = deque()
        try:
            for item in items:
                pending.append(self._task.remote(self._start, function, item))
                if len(pending) >= self._most_in_flight():
                    yield self._result(pending.popleft())
            while pending:
                yield self._result(pending.popleft())
        finally:
            self._cancel(list(pending))

    def _result(self, reference: Any) -> Any:
        errors = self._ray.exceptions
        try:
            answer: _Answer = self._ray.get(reference)
        except errors.RayTaskError as error:  # raised if the result of `fn` cannot be pickled
            raise error.as_instanceof_cause() from None
        except errors.RayError as error:
            raise NmoeError(
                "a worker process was lost",
                where="Ray",
                found=f"{type(error).__name__}, {self._options.max_retries} retries",
                do="it may have run out of memory: raise cpus_per_task, and run again",
                code="E-WORKER-LOST",
            ) from error
        for fields in answer.records:
            worker_logs.handle(fields)
        if answer.error is not None:
            raise answer.error
        return answer.result

    def _cancel(self, references: list[Any]) -> None:
        """Interrupt running tasks, so that they clean up; kill the tasks that do not end."""
        if not references or not self._ray.is_initialized():
            return
        for reference in references:
            self._ray.cancel(reference)
        _, running = self._ray.wait(
            references, num_returns=len(references), timeout=GRACE_SECONDS, fetch_local=False
        )
        for reference in running:
            self._ray.cancel(reference, force=True)

    def _most_in_flight(self) -> int:
        now = time.monotonic()
        if now - self._counted_at > _COUNT_EVERY_SECONDS:
            room = max(1, self._room())  # if the cluster has no node at all, wait for a node
            self._most = room + min(room, MAX_WAITING)
            self._counted_at = now
        return self._most

    def _room(self) -> int:
        """Number of items that fit into the cluster at once."""
        asked = {"CPU": self._options.cpus_per_task, "GPU": self._options.gpus_per_task}
        asked = {name: amount for name, amount in asked.items() if amount}
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        return sum(
            int(min(node.get(name, 0.0) / amount for name, amount in asked.items()))
            for node in nodes
        )


_kept: list[dict[str, Any]] = []
_of_pool: tuple[str, Worker] | None = None


def _run(start: _Start, fn: Callable[..., Any], item: Any) -> _Answer:
    global _of_pool
    try:
        if _of_pool is None or _of_pool[0] != start.pool:
            worker_logs.send_all(_kept.append, start.log_level)
            if start.epoch is not None:
                os.environ["SOURCE_DATE_EPOCH"] = start.epoch
            _of_pool = start.pool, Worker(start.initializer)
        result = _of_pool[1].run(fn, item)
        failure = None
    except Exception as error:  # noqa: BLE001 - raised again when the result is read
        result = None
        failure = sendable(error)
    records = _kept.copy()
    _kept.clear()
    return _Answer(result, failure, records)


def _connect(ray: Any, options: RayTable) -> None:
    address = options.address or os.environ.get(ADDRESS_VARIABLE) or None
    is_main = threading.current_thread() is threading.main_thread()
    on_terminate = signal.getsignal(signal.SIGTERM)
    try:
        _require_listener(address)
        ray.init(address=address, include_dashboard=False, logging_level=logging.WARNING)
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(
            "Ray cannot be reached",
            where=f"address {address or '(none: a Ray of this machine)'}",
            found=one_line(error),
            do=f"start a cluster (ray start --head), set {ADDRESS_VARIABLE} or [compute.ray] "
            "address, and use the same Python and Ray everywhere",
            code="E-CONFIG-RAY",
        ) from error
    finally:
        if is_main:  # Ray installs its own handler, which would end a run without its clean-up
            signal.signal(signal.SIGTERM, on_terminate)


def _require_listener(address: str | None) -> None:
    """Raise OSError if no process listens: Ray itself would try to connect for five minutes."""
    host, colon, port = (address or "").removeprefix("ray://").rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
