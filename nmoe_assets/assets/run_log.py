"""Forwards the log of nmoe_core and its worker processes to the run's log."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import dagster as dg

from nmoe_core.compute.logs import LOGGER


class _RunLog(logging.Handler):
    """Hands records to the log of a Dagster run."""

    def __init__(self, log: dg.DagsterLogManager) -> None:
        super().__init__(logging.INFO)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        """Log a record's message at its level; as any handler's, a failure ends no work."""
        try:
            self._log.log(record.levelno, self.format(record))
        except Exception:  # noqa: BLE001
            self.handleError(record)


@contextmanager
def run_log(context: Any) -> Iterator[None]:  # of an asset or of an op
    """Show what nmoe_core logs while the block runs in the log of this run."""
    package, handler = logging.getLogger(LOGGER), _RunLog(context.log)
    level = package.level
    package.addHandler(handler)
    package.setLevel(logging.INFO)
    try:
        yield
    finally:
        package.removeHandler(handler)
        package.setLevel(level)
