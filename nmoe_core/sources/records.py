"""What every source gives: numbered records, in an order that never changes, in blocks.

A block is small, pickles, and is turned into records in a worker process. Row numbers count the
raw records of the source from 0, read or not, so ids do not depend on what was skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from nmoe_core.errors import SourceError

OnError = Literal["fail", "skip", "replace"]


class Record(NamedTuple):
    """One raw document of a source."""

    row: int
    id: str
    text: str


class BadRecord(NamedTuple):
    """A record that could not be read, and why; counted under `on_error = "skip"`."""

    row: int
    where: str
    reason: str

    def error(self) -> SourceError:
        """The error that stops the run under `on_error = "fail"`."""
        return SourceError(
            self.reason,
            where=self.where,
            do='mend the record, or set on_error = "skip" for this source',
            code="E-SOURCE-RECORD",
        )


class Fields(NamedTuple):
    """Fields that hold the text and the id; with no id field, a source has its own rule."""

    text: str = "text"
    id: str | None = None


def make_record(
    row: int, where: str, fields: Fields, text: Any, id_: Any, default_id: str
) -> Record | BadRecord:
    """A record of the values found; None is an empty text, and None or "" takes the default id.

    Only text and whole numbers are ids: a float or a list has more than one spelling.
    """
    if text is not None and not isinstance(text, str):
        return BadRecord(row, where, f"field {fields.text!r} is {type(text).__name__}, not text")
    if isinstance(id_, bool) or not isinstance(id_, str | int | None):
        reason = f"is {type(id_).__name__}, not text or a whole number"
        return BadRecord(row, where, f"field {fields.id or 'id'!r} {reason}")
    return Record(row, default_id if id_ in (None, "") else str(id_), text or "")


class Block(Protocol):
    """A run of consecutive records, still raw."""

    @property
    def first_row(self) -> int:
        """Row number of the block's first raw record."""
        ...

    def records(self) -> Iterator[Record | BadRecord]:
        """Parse the block."""
        ...


class Source(Protocol):
    """A readable source of documents."""

    name: str

    def revision(self) -> str:
        """Digest of what the source holds now; changes when any record may have changed."""
        ...

    def check(self) -> None:
        """Open the source and read its first records' shape; raises as `blocks()` would."""
        ...

    def num_rows(self) -> int:
        """Number of raw records; may cost one pass over the source."""
        ...

    def blocks(self) -> Iterator[Block]:
        """All blocks in order."""
        ...


@dataclass(frozen=True, slots=True)
class Rows:
    """The raw rows a split consists of: `[start, stop)` less one excluded range."""

    start: int = 0
    stop: int | None = None
    excluded: tuple[int, int] | None = None

    def __contains__(self, row: int) -> bool:
        if row < self.start or (self.stop is not None and row >= self.stop):
            return False
        return self.excluded is None or not self.excluded[0] <= row < self.excluded[1]
