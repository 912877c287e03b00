"""Dagster's SQLite event log, written in fewer and larger steps.

Dagster opens the file anew, makes a new engine of SQLAlchemy and compiles the same statements for
every event, and commits each by itself. Here the engine of a file is kept, and events that are told
together are one transaction a file. Files, tables and rows are Dagster's own: this class and
Dagster's read what the other wrote.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import dagster as dg
from dagster._core.storage.event_log.sqlite.sqlite_event_log import SqliteEventLogStorage
from dagster._core.storage.sqlite import SQLITE_BUSY_TIMEOUT_SECONDS
from dagster._serdes import ConfigurableClassData
from dagster._utils.concurrency import ConcurrencyClaimStatus
from sqlalchemy import Connection, Engine, NullPool, create_engine

from nmoe_assets.launcher import is_gone

# A process writes to the index and to the runs it executes; a webserver looks at any number.
_MAX_ENGINES = 16


class BatchedSqliteEventLogStorage(SqliteEventLogStorage):
    """`event_log_storage` of dagster.yaml; `home` is the DAGSTER_HOME."""

    def __init__(self, base_dir: str, inst_data: ConfigurableClassData | None = None) -> None:
        self._engines: OrderedDict[str, Engine] = OrderedDict()
        self._batch: _Batch | None = None
        super().__init__(base_dir, inst_data)
        self._db_lock = threading.RLock()  # a batch holds it over what it stores

    @classmethod
    def config_type(cls) -> dict[str, Any]:
        """Where the files are, as Dagster lays them out below its home."""
        return {"home": dg.StringSource}

    @classmethod
    def from_config_value(
        cls, inst_data: ConfigurableClassData | None, config_value: Mapping[str, Any]
    ) -> "BatchedSqliteEventLogStorage":
        """Made by Dagster."""
        return cls(str(Path(config_value["home"], "history", "runs")), inst_data)

    def store_event_batch(self, events: Sequence[dg.EventLogEntry]) -> None:
        """Store them in one transaction for each file; an error on the way leaves none of them."""
        with self._db_lock, ExitStack() as stack:
            self._batch = _Batch(self._engine, stack)
            try:
                super().store_event_batch(events)
                self._batch.commit()
            finally:
                self._batch = None

    def claim_concurrency_slot(
        self, concurrency_key: str, run_id: str, step_key: str, priority: int | None = None
    ) -> ConcurrencyClaimStatus:
        """Claim a slot of a pool; one that a run which is gone still holds is taken back first.

        The daemon does so too, but a job of the command line may run without one, and would wait
        for ever for the slot of a run that was killed.
        """
        info = self.get_concurrency_info(concurrency_key)
        others = (info.active_run_ids | info.pending_run_ids | info.assigned_run_ids) - {run_id}
        for other in others:
            if is_gone(self._instance, other):
                self.free_concurrency_slots_for_run(other)
        return super().claim_concurrency_slot(concurrency_key, run_id, step_key, priority)

    @contextmanager
    def _connect(self, shard: str) -> Iterator[Connection]:
        with self._db_lock:
            if self._batch is not None:
                yield self._batch.connection(shard)
            else:
                with self._engine(shard).begin() as connection:
                    yield connection

    def _engine(self, shard: str) -> Engine:
        if shard not in self._engines:
            # No pool, as Dagster has it: files may be deleted with their runs.
            self._engines[shard] = create_engine(
                self.conn_string_for_shard(shard),
                poolclass=NullPool,
                connect_args={"timeout": SQLITE_BUSY_TIMEOUT_SECONDS},
            )
        if shard not in self._initialized_dbs:
            self._initdb(self._engines[shard])
            self._initialized_dbs.add(shard)
        self._engines.move_to_end(shard)
        if len(self._engines) > _MAX_ENGINES:
            self._engines.popitem(last=False)[1].dispose()
        return self._engines[shard]


class _Batch:
    """One open connection a file."""

    def __init__(self, engine: Callable[[str], Engine], stack: ExitStack) -> None:
        self._engine, self._stack = engine, stack
        self._connections: dict[str, Connection] = {}

    def connection(self, shard: str) -> Connection:
        if shard not in self._connections:
            opened = self._stack.enter_context(self._engine(shard).connect())
            opened.begin()  # or Dagster would begin and commit around each event
            self._connections[shard] = opened
        return self._connections[shard]

    def commit(self) -> None:
        """Commit the files in the order they came up: a run's own before the index."""
        for connection in self._connections.values():
            connection.commit()
