"""Records of a source: numbered, in a fixed order, grouped into blocks.

A block is small and can be pickled; a worker process reads it and parses its records. Row numbers
count all raw records of the source from 0, even skipped ones, so ids do not depend on skipping.
Blocks are the same for any start position, so reading can resume at a position from the journal.
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


class TableForm(NamedTuple):
    """How the files of a table are written."""

    delimiter: str | None = None
    """None: a tab for `.tsv`, else a comma."""
    quote: str = '"'
    """Empty: quotes are ordinary text."""
    names: tuple[str, ...] = ()
    """Names of the columns; empty: the first row has them."""


class TokenForm(NamedTuple):
    """How files of tokens are written."""

    format: str
    integers: str | None = None
    """Type of tokens in files that do not name it."""
    eos_token_id: int | None = None
    """Token that ends documents."""
    joins: bool = False
    """Whether only this token ends documents, not the end of a row or a sample."""


class Reading(NamedTuple):
    """Reading settings of a source's records."""

    source: str
    """Name of the source, and first part of generated ids."""
    text_field: str = "text"
    id_field: str | None = None
    """Field of the ids. None: the field `id` of JSON lines, else the record's position."""
    on_error: OnError = "fail"
    max_record_bytes: int = DEFAULT_MAX_RECORD_MB * 2**20
    """Limit for a line, cell or text file; a longer one is never read into memory as a whole."""
    kept: tuple[str, ...] = ()
    """Passthrough columns: other fields to store; dots separate nested names."""
    encoding: str = "utf-8"
    """Encoding of files that have no byte order mark; `detect`: found for each file."""
    chat_template: str | None = None
    """Renders the text field, which is then a list of messages."""
    table: TableForm = TableForm()
    tokens: TokenForm | None = None
    """None: records are texts."""

    @property
    def digest(self) -> str:
        """Digest of the settings that determine the document of a record."""
        settings = [self.source, self.text_field, self.id_field, self.on_error]
        more = [self.encoding, self.chat_template, self.table]
        default = ["utf-8", None, TableForm()]
        if self.tokens is not None:
            more.append(self.tokens)
        return sha256_json(settings if more == default else settings + more)

    @property
    def detects(self) -> bool:
        """Whether the encoding of each file is detected."""
        return self.encoding == "detect"

    @property
    def replaces(self) -> str:
        """What decoders do with bytes that do not belong to the encoding."""
        return "replace" if self.on_error == "replace" else "strict"

    @property
    def columns(self) -> list[str]:
        """The fields to read: text, optionally id, and passthrough columns."""
        ids = () if self.id_field is None else (self.id_field,)
        return [self.text_field, *ids, *self.kept]

    def decode(self, payload: bytes, encoding: str | None = None) -> tuple[str, bool]:
        """The text, and whether invalid bytes were replaced. Without `encoding`, it is UTF-8 unless
        a byte order mark says otherwise. Raises UnicodeDecodeError if bytes are invalid and
        `on_error` is not `replace`."""
        encoding = encoding or marked_encoding(payload)
        try:
            return payload.decode(encoding), False
        except UnicodeDecodeError:
            if self.on_error != "replace":
                raise
            return payload.decode(encoding, "replace"), True

    def too_long(self, where: str) -> SourceError:
        """The error for a record above the limit."""
        return SourceError(
            "a record is longer than the limit of this source",
            where=where,
            expected=f"at most {self.max_record_bytes // 2**20} MiB",
            do="split or remove it, or raise max_record_mb of this source",
            code="E-SOURCE-RECORD",
        )


Sample = Mapping[str, str | None]
"""The fields of a record, by dotted name: the text of a field, or None if it is not text."""
SAMPLED_RECORDS = 50  # per file
WARC_FIELDS = ("url", "domain", "warc_date", "content_type", "record_id")
"""The fields of records of web archives."""


class Position(NamedTuple):
    """A position between two records of a source; all counts cover the records before it."""

    file: int = 0
    """Index of the file in the source."""
    offset: int = 0
    """Position in that file in the source's own unit: bytes (uncompressed), row groups or rows."""
    line: int = 0
    """Number of records before it in that file."""
    row: int = 0
    """Number of records before it in the source."""


START = Position()


class Record(NamedTuple):
    """One raw document of a source; `is_replaced` if invalid bytes were replaced."""

    row: int
    id: str
    text: str
    is_replaced: bool = False
    kept: tuple[Any, ...] = ()
    """Values of the passthrough fields, unless the block has them as columns."""
    is_placed: bool = False
    """Whether the id is generated from the position of a line."""
    encoding: str = ""
    """The detected encoding of its file, if the record is a whole file."""
    tokens: Any = None
    """Token ids, with EOS if the file has it: an array of integers. The text is then empty."""


class BadRecord(NamedTuple):
    """A record that could not be read, with the reason; it is left out and counted."""

    row: int
    where: str
    reason: str
    is_skipped: bool = False
    """Whether the source leaves it out by a rule, such as a page that is not HTML: it is counted by
    its reason, and is no fault of the source."""

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


@dataclass(slots=True)
class RecordColumns:
    """Records of a block as columns: filling lists is faster than creating objects."""

    rows: list[int] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    """Ids; "" if the record could not be read, and then its text is "" too."""
    texts: list[str] = field(default_factory=list)
    kept: list[tuple[Any, ...]] = field(default_factory=list)
    """Values of the passthrough fields, if the block has them per record."""
    replaced: list[int] = field(default_factory=list)
    """Indices of records with replaced bytes."""
    placed: list[int] = field(default_factory=list)
    """Indices of records whose id is generated from the position of a line."""
    bad: dict[int, BadRecord] = field(default_factory=dict)
    """Records that could not be read, by index."""
    tokens: list[Any] = field(default_factory=list)
    """Token ids of each record, if the source has tokens."""

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
            if record.tokens is not None:
                columns.tokens.append(record.tokens)
        return columns

    def records(self) -> Iterator[Record | BadRecord]:
        """One object per record."""
        replaced = set(self.replaced)
        placed = set(self.placed)
        for i, (row, id_, text) in enumerate(zip(self.rows, self.ids, self.texts)):
            kept = self.kept[i] if self.kept else ()
            yield self.bad.get(i) or Record(row, id_, text, i in replaced, kept, i in placed)


@dataclass(frozen=True, slots=True)
class Block(ABC):
    """Consecutive records, not parsed yet; cheap to create and to send to a worker."""

    reading: Reading
    start: Position
    end: Position
    """Position of the next block."""
    size_bytes: int
    """The block's share of the source's `size_bytes()`."""

    @property
    def detected(self) -> str:
        """The detected encoding of the file that starts with this block; empty if the encoding was
        not detected, or the block is not the first of its file."""
        return ""

    @abstractmethod
    def records(self) -> Iterator[Record | BadRecord]:
        """Read and parse the block; a record that cannot be read is a `BadRecord`."""

    @abstractmethod
    def where(self, row: int) -> str:
        """File and line (or row) of a record, for error messages."""

    def kept(self, records: Sequence[Record | BadRecord]) -> Kept:
        """The passthrough columns of the block's records, one row per record."""
        names = self.reading.kept
        none = (MISSING,) * len(names)
        rows = [record.kept if isinstance(record, Record) else none for record in records]
        return json_columns(names, rows)


class Source(ABC):
    """A readable source of documents."""

    reading: Reading
    changed: Sequence[str] = ()
    """Names of files that differ between the last two revisions."""
    _marks: Mapping[str, str] | None = None

    @abstractmethod
    def revision(self) -> str:
        """Digest of the source's current content; it changes if any record may have changed."""

    def compared(self, marks: Sequence[tuple[str, str]]) -> Sequence[tuple[str, str]]:
        """Record in `changed` which files have another mark than in the last call. Returns `marks`
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
        """Files on this machine that the revision covers."""

    def provenance(self) -> dict[str, str]:
        """Facts about the data for the manifest, such as the commit of a repository."""
        return {}

    def check(self) -> None:  # noqa: B027  (text and JSON lines have no shape to check)
        """Open the source and check the fields of its first records. Raises the errors of
        `blocks()`."""

    def samples(self) -> Iterator[Sample]:
        """Some of the first records of several files."""
        return iter(())

    def field_names(self) -> list[str]:
        """Names of the fields of the sampled records."""
        return list(dict.fromkeys(name for sample in self.samples() for name in sample))

    def num_rows(self) -> int:
        """Number of raw records; may need one pass over the source."""
        return sum(block.end.row - block.start.row for block in self.blocks())

    def size_bytes(self) -> int | None:
        """Bytes that a whole pass reads; None if not known in advance."""
        return None

    @abstractmethod
    def blocks(self, start: Position = START) -> Iterator[Block]:
        """The blocks in order from `start`, which must be the end of a block."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The raw rows of a split: `[start, stop)`, without the rows of one excluded range."""

    start: int = 0
    stop: int | None = None
    excluded: tuple[int, int] | None = None

    def __contains__(self, row: int) -> bool:
        return self.overlaps(row, row + 1)

    def overlaps(self, start: int, stop: int) -> bool:
        """Whether any row of `[start, stop)` is in the split."""
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
    """A split of a source: the source, and the rows that belong to the split."""

    source: Source
    rows: Rows = Rows()
