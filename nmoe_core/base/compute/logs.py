"""Log records of worker processes, handled in the process that started the work.

On this machine a worker writes each record to a pipe as one line of at most PIPE_BUF bytes, which
the kernel writes as a whole. So workers share no lock, and a worker that is killed during a write
does not block the others. On other machines records are collected and returned with the result.
"""

import logging
import os
import select
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

import orjson

LOGGER = "nmoe_core"
_END = b"\n"
_LAST = b"last"
_formatter = logging.Formatter()
_printing = logging.Handler()


class WorkerHandler(logging.Handler):
    """A log handler that passes the fields of each record that are sent to a function."""

    def __init__(self, send: Callable[[dict[str, Any]], object]) -> None:
        super().__init__()
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record; if its format and arguments do not match, print the error as `logging`
        does."""
        try:
            message = record.getMessage()
        except (TypeError, ValueError, KeyError):  # errors of formatting
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
    """Write a record to a pipe that `relayed` reads; a record that is too long is truncated."""
    while len(line := orjson.dumps(fields) + _END) > select.PIPE_BUF:
        message = fields["msg"]
        fields["msg"] = message[: len(message) * 3 // 4] + " ..."
    os.write(pipe.fileno(), line)


def send_all(send: Callable[[dict[str, Any]], object], level: int) -> None:
    """Send this process's records instead of printing them; `level` is the level of the package's
    loggers."""
    package = logging.getLogger(LOGGER)
    logging.root.handlers[:] = [WorkerHandler(send)]
    package.handlers.clear()
    package.setLevel(level)


def package_level() -> int:
    return logging.getLogger(LOGGER).getEffectiveLevel()


def handle(fields: dict[str, Any]) -> None:
    """Handle a worker's record in this process, with the logger of the same name."""
    logger = logging.getLogger(fields["name"])
    record = logging.makeLogRecord(fields)
    if logger.isEnabledFor(record.levelno):
        try:
            logger.handle(record)
        except Exception:  # noqa: BLE001 an error of a handler must not end the thread that reads
            _printing.handleError(record)


@contextmanager
def relayed(reader: Connection, writer: Connection) -> Iterator[Callable[[], None]]:
    """Handle the records that arrive through a pipe in a thread while the block runs. Yields a
    function that waits until the records that were sent before are handled."""
    marks: SimpleQueue[None] = SimpleQueue()
    thread = threading.Thread(target=_relay, args=(reader, marks), name="worker-logs", daemon=True)
    thread.start()

    def wait() -> None:
        os.write(writer.fileno(), _END)
        marks.get()

    try:
        yield wait
    finally:
        os.write(writer.fileno(), _LAST + _END)
        thread.join()
        writer.close()
        reader.close()


def _relay(reader: Connection, marks: "SimpleQueue[None]") -> None:
    rest = b""
    while True:
        *lines, rest = (rest + os.read(reader.fileno(), 1 << 16)).split(_END)
        for line in lines:
            if line == _LAST:
                return
            if line:
                handle(orjson.loads(line))
            else:
                marks.put(None)
