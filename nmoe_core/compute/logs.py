"""Log records of worker processes, handled in the process that asked for the work.

A worker has one handler. On this machine it writes each record to a pipe as one line of at most
PIPE_BUF bytes, which the kernel keeps whole: no lock is shared, so a worker killed while it writes
does not block the others. On another machine records are kept and returned with the result. Either
way they are handled by the loggers of their names here, as if the work had been done here.
"""

from __future__ import annotations

import logging
import os
import select
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import orjson

LOGGER = "nmoe_core"
_END = b"\n"
_formatter = logging.Formatter()
_printing = logging.Handler()


class PipeHandler(logging.Handler):
    """Writes records to a pipe that a `relayed` reads."""

    def __init__(self, writer: Connection) -> None:
        super().__init__()
        self._writer = writer  # closed with its last reference

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record; one that does not fit is cut."""
        if (fields := _fields(self, record)) is None:
            return
        while len(line := orjson.dumps(fields) + _END) > select.PIPE_BUF:
            message = fields["msg"]
            fields["msg"] = message[: len(message) * 3 // 4] + " ..."
        os.write(self._writer.fileno(), line)


class KeepingHandler(logging.Handler):
    """Keeps records until they are taken."""

    def __init__(self) -> None:
        super().__init__()
        self._records: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record."""
        if (fields := _fields(self, record)) is not None:
            self._records.append(fields)

    def take(self) -> list[dict[str, Any]]:
        """The records since the last call."""
        taken, self._records = self._records, []
        return taken


def send_to(handler: logging.Handler, level: int) -> None:
    """Make `handler` this process's only one; `level` is that of the package's loggers."""
    package = logging.getLogger(LOGGER)
    logging.root.handlers[:] = [handler]
    package.handlers.clear()
    package.setLevel(level)


def package_level() -> int:
    """The level of the package's loggers here."""
    return logging.getLogger(LOGGER).getEffectiveLevel()


def handle(fields: dict[str, Any]) -> None:
    """Handle a worker's record with the logger of its name here."""
    logger = logging.getLogger(fields["name"])
    record = logging.makeLogRecord(fields)
    if logger.isEnabledFor(record.levelno):
        try:
            logger.handle(record)
        except Exception:  # noqa: BLE001 a handler that is broken must not stop who reads the pipe
            _printing.handleError(record)


@contextmanager
def relayed(reader: Connection, writer: Connection) -> Iterator[None]:
    """Handle what comes through a pipe while the block runs, in a thread."""
    thread = threading.Thread(target=_relay, args=(reader,), name="worker-logs", daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.write(writer.fileno(), _END)  # an empty line: no record follows
        thread.join()
        writer.close()
        reader.close()


def _relay(reader: Connection) -> None:
    rest = b""
    while True:
        *lines, rest = (rest + os.read(reader.fileno(), 1 << 16)).split(_END)
        for line in lines:
            if not line:
                return
            handle(orjson.loads(line))


def _fields(handler: logging.Handler, record: logging.LogRecord) -> dict[str, Any] | None:
    """What is sent of a record; None where its arguments do not fit it, which is printed."""
    try:
        message = record.getMessage()
    except (TypeError, ValueError, KeyError):  # what formatting raises; the work goes on
        handler.handleError(record)
        return None
    if record.exc_info:
        message += "\n" + _formatter.formatException(record.exc_info)
    return {
        "name": record.name,
        "levelno": record.levelno,
        "levelname": record.levelname,
        "msg": message.encode(errors="replace").decode(),
        "created": record.created,
        "process": record.process,
        "processName": f"worker {record.process}",
    }
