"""Progress on standard error: on a terminal one line that is overwritten, else separate lines."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from nmoe_core.base.progress import logged_to


class _StatusLine(logging.Handler):
    """Overwrites the previous record."""

    width = 0

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if sys.stderr.isatty():
            sys.stderr.write("\r" + text.ljust(self.width))
            self.width = len(text)
        else:
            sys.stderr.write(text + "\n")
        sys.stderr.flush()

    def clear(self) -> None:
        """Clear the line for the next output."""
        if self.width:
            sys.stderr.write("\r" + " " * self.width + "\r")


@contextmanager
def progress_shown(*, is_quiet: bool = False) -> Iterator[None]:
    """Show what `Meter` logs while the block runs, unless `is_quiet`."""
    if is_quiet:
        yield
        return
    handler = _StatusLine(logging.INFO)
    with logged_to(handler):
        try:
            yield
        finally:
            handler.clear()
