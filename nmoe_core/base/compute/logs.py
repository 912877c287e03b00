"""Log records of worker processes, handled in the process that started the work.

On this machine a worker writes each record to a pipe as one line of at most PIPE_BUF bytes, which
the kernel keeps whole: no lock is shared, so a worker killed while it writes does not block the
others. On another machine records are kept and returned with the result.
"""

import logging
import os
import select
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import orjson

LOGGER = "nmoe_core"
_END = b"\n"
_formatter = logging.Formatter()
_printing = logging.Handler()


class WorkerHandler(logging.Handler):
    """Passes the kept fields of each record to a function."""

    def __init__(self, send: Callable[[dict[str, Any]], object]) -> None:
        super().__init__()
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record; print it if its arguments do not fit it, and continue."""
        try:
            message = record.getMessage()
        except (TypeError, ValueError, KeyError):  # what formatting raises
            self.handleError(record)
            return
        if record.exc_info:
            message += "\n" + _formatter.formatException(record.exc_info)
        self._send(
            {
                "name": record.name,
                "levelno": record.levelno,
                "levelname": record.levelname,
                "msg": message.encode(errors="replace").decode(),
                "created": record.created,
                "process": record.process,
                "processName": f"worker {record.process}",
            }
        )


def write_to(pipe: Connection, fields: dict[str, Any]) -> None:
    """Write a record to a pipe that a `relayed` reads; one that does not fit is cut."""
    while len(line := orjson.dumps(fields) + _END) > select.PIPE_BUF:
        message = fields["msg"]
        fields["msg"] = message[: len(message) * 3 // 4] + " ..."
    os.write(pipe.fileno(), line)


def send_all(send: Callable[[dict[str, Any]], object], level: int) -> None:
    """Send this process's records, and print none; `level` is the level of the package's
    loggers."""
    package = logging.getLogger(LOGGER)
    logging.root.handlers[:] = [WorkerHandler(send)]
    package.handlers.clear()
    package.setLevel(level)


def package_level() -> int:
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
