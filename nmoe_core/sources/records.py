"""Records of a source: numbered, in an order that never changes, in blocks.

A block is small, pickles, and is read and turned into records in a worker process. Row numbers
count the raw records of the source from 0, read or not, so ids do not depend on what was skipped.
Blocks are the same whatever position the reading starts at, so a journalled position resumes it.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from nmoe_core.base.errors import SourceError
from nmoe_core.base.fingerprint import sha256_json
from nmoe_core.base.jsonl import marked_encoding
from nmoe_core.sources.passthrough_columns import MISSING, Kept, json_columns

OnError = Literal["fail", "skip", "replace"]
DEFAULT_MAX_RECORD_MB = 256


class Reading(NamedTuple):
    """Reading settings of a source's records."""

    source: str
    """Name of the source, first part of generated ids."""
    text_field: str = "text"
    id_field: str | None = None
    """None: a field `id` of JSON, else the record's place."""
    on_error: OnError = "fail"
    max_record_bytes: int = DEFAULT_MAX_RECORD_MB * 2**20
    """A longer line, cell or text file is refused; one may never be held whole."""
    kept: tuple[str, ...] = ()
    """Other fields that are kept, as columns; dots lead into objects."""

    @property
    def digest(self) -> str:
        """Digest of the settings that decide which document a record is."""
        return sha256_json([self.source, self.text_field, self.id_field, self.on_error])

    @property
    def columns(self) -> list[str]:
        """The fields that are read: the text, perhaps the id, and the kept columns."""
        ids = () if self.id_field is None else (self.id_field,)
        return [self.text_field, *ids, *self.kept]

    def decode(self, payload: bytes) -> tuple[str, bool]:
        """The text, and whether bytes of it were replaced. It is UTF-8, unless a byte order mark
        says otherwise. Raises UnicodeDecodeError if bytes are no text, and `on_error` is not
        `replace`."""
        encoding = marked_encoding(payload)
        try:
            return payload.decode(encoding), False
        except UnicodeDecodeError:
            if self.on_error != "replace":
                raise
            return payload.decode(encoding, "replace"), True

    def too_long(self, where: str) -> SourceError:
        """The error for a record past the limit."""
        return SourceError(
            "a record is longer than this source allows",
            where=where,
            expected=f"at most {self.max_record_bytes // 2**20} MiB",
            do="split or remove it, or raise max_record_mb of this source",
            code="E-SOURCE-RECORD",
        )


Sample = Mapping[str, str | None]
"""A record by its fields, with paths into objects: the text that a field holds, or None."""
SAMPLED_RECORDS = 50  # of each file


class Position(NamedTuple):
    """A place between two records of a source; all counts cover the records before it."""

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
    """One raw document of a source; `is_replaced` if bytes that are not UTF-8 were replaced."""

    row: int
    id: str
    text: str
    is_replaced: bool = False
    kept: tuple[Any, ...] = ()
    """Values of the kept fields if the block does not hold them as columns."""
    is_placed: bool = False
    """Whether its id is the place of a line."""


class BadRecord(NamedTuple):
    """A record that could not be read, and why; left out and counted."""

    row: int
    where: str
    reason: str

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


@dataclass(slots=True)
class RecordColumns:
    """Records of a block as columns: a list is filled and read faster than objects are made."""

    rows: list[int] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    """"" if the record could not be read; its text is then "" too."""
    texts: list[str] = field(default_factory=list)
    kept: list[tuple[Any, ...]] = field(default_factory=list)
    """Values of the kept fields, if the block holds them by record."""
    replaced: list[int] = field(default_factory=list)
    """Places in the lists of records with replaced bytes."""
    placed: list[int] = field(default_factory=list)
    """Places of the records whose id is the place of a line."""
    bad: dict[int, BadRecord] = field(default_factory=dict)
    """Records that could not be read, by place."""

    @classmethod
    def of(cls, records: Iterable[Record | BadRecord]) -> "RecordColumns":
        """The columns of records."""
        columns = cls()
        for record in records:
            place = len(columns.rows)
            if isinstance(record, BadRecord):
                columns.bad[place] = record
                record = Record(record.row, "", "")
            columns.rows.append(record.row)
            columns.ids.append(record.id)
            columns.texts.append(record.text)
            if record.is_replaced:
                columns.replaced.append(place)
        return columns

    def records(self) -> Iterator[Record | BadRecord]:
        """One object for each."""
        replaced = set(self.replaced)
        placed = set(self.placed)
        for i, (row, id_, text) in enumerate(zip(self.rows, self.ids, self.texts)):
            kept = self.kept[i] if self.kept else ()
            yield self.bad.get(i) or Record(row, id_, text, i in replaced, kept, i in placed)


@dataclass(frozen=True, slots=True)
class Block(ABC):
    """A run of consecutive records, still raw; cheap to make and to send to a worker."""

    reading: Reading
    start: Position
    end: Position
    """Position of the next block."""
    size_bytes: int
    """Its share of the source's `size_bytes()`."""

    @abstractmethod
    def records(self) -> Iterator[Record | BadRecord]:
        """Read and parse the block; a record that cannot be read is a `BadRecord`."""

    @abstractmethod
    def where(self, row: int) -> str:
        """File and line, or row, of a record, as errors name it."""

    def kept(self, records: Sequence[Record | BadRecord]) -> Kept:
        """The kept columns of its records, one row per record."""
        names = self.reading.kept
        none = (MISSING,) * len(names)
        rows = [record.kept if isinstance(record, Record) else none for record in records]
        return json_columns(names, rows)


class Source(ABC):
    """A readable source of documents."""

    reading: Reading
    changed: Sequence[str] = ()
    """Names of the files that differ between the last two revisions."""
    _marks: Mapping[str, str] | None = None

    @abstractmethod
    def revision(self) -> str:
        """Digest of the source's current content; changes when any record may have changed."""

    def compared(self, marks: Sequence[tuple[str, str]]) -> Sequence[tuple[str, str]]:
        """Note in `changed` how names and marks of files differ from the last ones; returns them
        unchanged."""
        now = dict(marks)
        before = self._marks
        if before is not None:
            names = sorted(now.keys() | before.keys())
            self.changed = [name for name in names if now.get(name) != before.get(name)]
        self._marks = now
        return marks

    @abstractmethod
    def local_files(self) -> list[Path]:
        """Files on this machine whose bytes the revision speaks of."""

    def provenance(self) -> dict[str, str]:
        """Facts about the data read, for the manifest, such as the commit of a repository."""
        return {}

    def check(self) -> None:  # noqa: B027  (text and JSON lines have no shape to check)
        """Open the source and read its first records' shape; raises as `blocks()` would."""

    def samples(self) -> Iterator[Sample]:
        """Some of its first records, of several files."""
        return iter(())

    def field_names(self) -> list[str]:
        """Names of the fields that these have."""
        return list(dict.fromkeys(name for sample in self.samples() for name in sample))

    def num_rows(self) -> int:
        """Number of raw records; may cost one pass over the source."""
        return sum(block.end.row - block.start.row for block in self.blocks())

    def size_bytes(self) -> int | None:
        """Bytes that a whole pass reads; None if that is not known beforehand."""
        return None

    @abstractmethod
    def blocks(self, start: Position = START) -> Iterator[Block]:
        """The blocks from `start`, the end of some block, in order."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The raw rows a split consists of: `[start, stop)` less one excluded range."""

    start: int = 0
    stop: int | None = None
    excluded: tuple[int, int] | None = None

    def __contains__(self, row: int) -> bool:
        return self.overlaps(row, row + 1)

    def overlaps(self, start: int, stop: int) -> bool:
        """Whether any row of `[start, stop)` is one of these."""
        first = max(start, self.start)
        last = stop if self.stop is None else min(stop, self.stop)
        if first >= last or self.excluded is None:
            return first < last
        return first < self.excluded[0] or last > self.excluded[1]

    def count(self, num_rows: int) -> int:
        """Number of selected rows in a source of `num_rows` rows."""
        start = self.start
        stop = num_rows if self.stop is None else min(self.stop, num_rows)
        first, last = self.excluded or (0, 0)
        return max(0, stop - start) - max(0, min(last, stop) - max(first, start))


class Split(NamedTuple):
    """A source, and the rows of it that a split consists of."""

    source: Source
    rows: Rows = Rows()
