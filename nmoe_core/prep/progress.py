"""Progress of a pass: its figures as a line of text."""

from collections.abc import Callable
from dataclasses import dataclass

from nmoe_core.base.progress import Meter, time_left


@dataclass(frozen=True, slots=True)
class PrepProgress:
    """State of a pass after a block; all counts except `seconds` include the work of earlier
    runs."""

    documents: int
    tokens: int
    size_bytes: int
    """Bytes of the source that have been read, as stored."""
    total_bytes: int | None
    """Size of the source in bytes; None if it is not known in advance."""
    seconds: float
    resumed_bytes: int = 0
    """Part of `size_bytes` that an earlier run read."""
    max_tokens: int | None = None
    """Token budget, which may end the pass before the end of the source."""

    @property
    def rate(self) -> float:
        """Source bytes per second in this run."""
        return (self.size_bytes - self.resumed_bytes) / self.seconds if self.seconds > 0 else 0.0

    @property
    def share(self) -> float | None:
        """Finished share of the pass, 0 to 1, by source bytes or by budget."""
        shares = [self.size_bytes / self.total_bytes] if self.total_bytes else []
        shares += [self.tokens / self.max_tokens] if self.max_tokens else []
        return min(1.0, max(shares)) if shares else None

    @property
    def eta_s(self) -> float | None:
        """Remaining seconds at the current rate."""
        if not self.share or self.rate <= 0:
            return None
        return self.size_bytes * (1 / self.share - 1) / self.rate

    def line(self) -> str:
        """One line of text.

        >>> PrepProgress(1200, 3_400_000, 5 * 10**6, 10**7, 2.0).line()
        '50 %, 1,200 documents, 3.4M tokens, 2.5 MB/s, 2 s left'
        """
        parts = [] if self.share is None else [f"{self.share:.0%}".replace("%", " %")]
        parts += [f"{self.documents:,} documents", f"{_short(self.tokens)} tokens"]
        parts.append(f"{self.rate / 1e6:.1f} MB/s")
        if self.eta_s is not None:
            parts.append(f"{time_left(self.eta_s)} left")
        return ", ".join(parts)


Progress = Callable[[PrepProgress], None]


def logged_progress(what: str) -> Progress:
    """A callback that passes each line to a `Meter`, which logs some of them."""
    meter = Meter(what, None)

    def say(progress: PrepProgress) -> None:
        meter.say(lambda _: progress.line())

    return say


def _short(count: int) -> str:
    for suffix, unit in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if count >= unit:
            return f"{count / unit:.1f}{suffix}"
    return str(count)
