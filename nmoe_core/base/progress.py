"""Logs the progress of long work; commands print it, and Dagster shows it in the log of a run."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LOGGER = "nmoe_core.progress"
_FIRST_S = 5.0
_SHARE = 0.05
_log = logging.getLogger(LOGGER)


class Meter:
    """Logs the completed amount, its rate and the time left: first after 5 s, then when at least 5
    s and 5 % of the elapsed time have passed, so about 70 lines in an hour.

    Args:
        what: The work, such as `grade web`.
        total: The total amount; None if it is unknown.
        unit: What is counted, in the plural.
    """

    def __init__(self, what: str, total: int | None, unit: str = "documents") -> None:
        self.what = what
        self.total = total
        self.unit = unit
        self.done = 0
        self._started = time.monotonic()
        self._next = self._started + _FIRST_S

    def add(self, count: int = 1) -> None:
        """Add to the completed amount."""
        self.done += count
        self.say(self.line)

    def say(self, line: Callable[[float], str]) -> None:
        """Log `line(seconds since the start)` if enough time has passed since the last line."""
        now = time.monotonic()
        if now >= self._next:
            seconds = now - self._started
            self._next = now + max(_FIRST_S, _SHARE * seconds)
            _log.info("%s: %s", self.what, line(seconds))

    def line(self, seconds: float) -> str:
        """The log line after some seconds of work.

        >>> meter = Meter("grade web", 900)
        >>> meter.done = 300
        >>> meter.line(60.0)
        '300 of 900 documents, 5.0 per second, 2 min 0 s left'
        """
        rate = self.done / max(seconds, 1e-9)
        total = "" if self.total is None else f" of {self.total:,}"
        parts = [f"{self.done:,}{total} {self.unit}"]
        parts.append(f"{rate:,.1f} per second" if rate >= 0.1 else f"{60 * rate:,.1f} per minute")
        if self.total is not None and self.done:
            parts.append(f"{time_left((self.total - self.done) / rate)} left")
        return ", ".join(parts)


@contextmanager
def logged_to(handler: logging.Handler, name: str = LOGGER) -> Iterator[None]:
    """Pass a logger's records, from INFO on, to a handler while the block runs."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def time_left(seconds: float) -> str:
    """`12 s`, `3 min 5 s`, `2 h 10 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {whole % 60} s"
