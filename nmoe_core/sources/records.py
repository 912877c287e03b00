"""What every source gives: numbered records, in an order that never changes, in blocks.

A block is small, pickles, and is read and turned into records in a worker process. Row numbers
count the raw records of the source from 0, read or not, so ids do not depend on what was skipped.
Blocks are the same whatever position the reading starts at, so a journalled position resumes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

OnError = Literal["fail", "skip", "replace"]


class Position(NamedTuple):
    """A place between two records of a source; all counts are of what lies before it."""

    file: int = 0
    """Index of the file in the source's order."""
    offset: int = 0
    """Place in that file in the source's own unit: bytes (uncompressed), row groups or rows."""
    line: int = 0
    """Records of that file before it."""
    row: int = 0
    """Records of the source before it."""


START = Position()


class Record(NamedTuple):
    """One raw document of a source; `is_replaced` where bytes that are no UTF-8 were replaced."""

    row: int
    id: str
    text: str
    is_replaced: bool = False


class BadRecord(NamedTuple):
    """A record that could not be read, and why; left out and counted."""

    row: int
    where: str
    reason: str

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


class Fields(NamedTuple):
    """Fields that hold the text and the id; with no id field, a source has its own rule."""

    text: str = "text"
    id: str | None = None


class Block(Protocol):
    """A run of consecutive records, still raw; cheap to make and to send to a worker."""

    @property
    def start(self) -> Position:
        """Where its first record starts."""
        ...

    @property
    def end(self) -> Position:
        """Where the next block starts."""
        ...

    @property
    def size_bytes(self) -> int:
        """Its share of the source's `size_bytes()`."""
        ...

    def records(self) -> Iterator[Record | BadRecord]:
        """Read and parse the block; a record that cannot be read is a `BadRecord`."""
        ...


class Source(Protocol):
    """A readable source of documents."""

    name: str

    def revision(self) -> str:
        """Digest of what the source holds now; changes when any record may have changed."""
        ...

    def local_files(self) -> list[Path]:
        """Files on this machine whose bytes the revision speaks of."""
        ...

    def provenance(self) -> dict[str, str]:
        """Facts about what was read, for the manifest, such as the commit of a repository."""
        ...

    def check(self) -> None:
        """Open the source and read its first records' shape; raises as `blocks()` would."""
        ...

    def num_rows(self) -> int:
        """Number of raw records; may cost one pass over the source."""
        ...

    def size_bytes(self) -> int | None:
        """Bytes that a whole pass reads, where that is known beforehand."""
        ...

    def blocks(self, start: Position = START) -> Iterator[Block]:
        """The blocks from `start`, the end of some block, in order."""
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

    def overlaps(self, start: int, stop: int) -> bool:
        """Whether any row of `[start, stop)` is one of these."""
        first, last = max(start, self.start), stop if self.stop is None else min(stop, self.stop)
        if first >= last or self.excluded is None:
            return first < last
        return first < self.excluded[0] or last > self.excluded[1]


class Split(NamedTuple):
    """A source, and the rows of it that a split consists of."""

    source: Source
    rows: Rows = Rows()
