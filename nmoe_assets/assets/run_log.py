"""Forwards the log of nmoe_core and its worker processes to the run's log."""

import logging
from contextlib import AbstractContextManager
from typing import Any

import dagster as dg

from nmoe_core.base.compute.logs import LOGGER
from nmoe_core.base.progress import logged_to


class _RunLog(logging.Handler):
    """A log handler that passes records to the log of a Dagster run."""

    def __init__(self, log: dg.DagsterLogManager) -> None:
        super().__init__(logging.INFO)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        """Log a record's message at its level. As in any handler, an error of logging does not stop
        the step."""
        try:
            self._log.log(record.levelno, self.format(record))
        except Exception:  # noqa: BLE001
            self.handleError(record)


def run_log(context: Any) -> AbstractContextManager[None]:  # the context of an asset or of an op
    """Copy nmoe_core's log records to the log of this run while the block runs."""
    return logged_to(_RunLog(context.log), LOGGER)
