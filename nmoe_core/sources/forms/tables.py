"""Source kind `csv`: one record per row of a table, whose values are text.

The first row names the columns, unless the source names them. The delimiter is that of the source,
a comma by default and a tab for `.tsv`. A quoted value may have line ends; errors name the line of
the file at which a row starts. A row with more or fewer values than there are columns is a bad
record. The main process splits rows, and workers decode their values. Memory: rows of about 2 MiB,
or one longer row of up to `max_record_bytes` a value and line.
"""

import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from nmoe_core.base.errors import SourceError
from nmoe_core.base.jsonl import encodable, id_of, not_utf8, value_of
from nmoe_core.sources.file_sources import BLOCK_BYTES, FileSource
from nmoe_core.sources.formats import suffixes
from nmoe_core.sources.forms.encoding import HEAD_BYTES, as_utf8, encoding_of
from nmoe_core.sources.passthrough_columns import MISSING
from nmoe_core.sources.records import (
    SAMPLED_RECORDS,
    BadRecord,
    Block,
    Position,
    Reading,
    Record,
    Sample,
)
from nmoe_core.sources.storage import TORN, SourceFile, decompressed, reader_of, stream_of, torn

_MOST_ROWS = 8192  # of a block


class Row(NamedTuple):
    """A row of a file, and the line at which it starts, from 1."""

    line: int
    values: list[str]


@dataclass(frozen=True, slots=True)
class RowsBlock(Block):
    """Consecutive rows of one file."""

    file: SourceFile
    names: tuple[str, ...]
    rows: tuple[Row, ...]
    encoding: str

    @property
    def detected(self) -> str:
        return self.encoding if self.start.line == 0 else ""

    def records(self) -> Iterator[Record | BadRecord]:
        """Decode the values of each row; an empty row is not a record but counts as a row."""
        for number, row in enumerate(self.rows, self.start.row):
            if not row.values:
                continue
            try:
                yield self._record(number, row.values)
            except UnicodeDecodeError as error:
                yield BadRecord(number, self.where(number), not_utf8(error))
            except ValueError as error:
                yield BadRecord(number, self.where(number), str(error))

    def where(self, row: int) -> str:
        return f"{self.file.where}:{self.rows[row - self.start.row].line}"

    def _record(self, number: int, values: list[str]) -> Record:
        reading = self.reading
        if len(values) != len(self.names):
            raise ValueError(f"{len(values)} values in a table of {len(self.names)} columns")
        fields = dict(zip(self.names, values))
        text, is_replaced = _decoded(fields[reading.text_field], reading)
        line = self.start.line + number - self.start.row
        place = encodable(f"{reading.source}/{self.file.name}:{line}")
        id_ = id_of(fields, reading.id_field, place)
        found = (value_of(fields, name, MISSING) for name in reading.kept)
        kept = tuple(one if one is MISSING else _decoded(one, reading)[0] for one in found)
        return Record(number, id_, text, is_replaced, kept)


def _decoded(value: str, reading: Reading) -> tuple[str, bool]:
    """The value, and whether bytes of it were replaced. Raises UnicodeDecodeError if they are not
    UTF-8 and the source does not replace them."""
    try:
        value.encode()
        return value, False
    except UnicodeEncodeError:
        payload = value.encode("utf-8", "surrogateescape")
    return payload.decode("utf-8", reading.replaces), True


class CsvSource(FileSource[RowsBlock]):
    """Rows of tables as documents; without an id field, a column `id` is used if present."""

    def check(self) -> None:
        """Read the names of the first file's columns. Raises as `blocks`."""
        for file in self.files[:1]:
            next(self._rows(file), None)

    def file_samples(self, file: SourceFile) -> Iterator[Sample]:
        """The first rows of a file."""
        rows = ((names, row.values) for names, _, row, _ in self._rows(file, is_checked=False))
        for names, values in islice(rows, SAMPLED_RECORDS):
            if len(names) == len(values):
                yield dict(zip(names, values))

    def _file_blocks(self, file: SourceFile, start: Position) -> Iterator[RowsBlock]:
        at = start
        last_bytes = 0
        for names, encoding, rows, read_bytes in self._groups(file, start.line):
            count = len(rows)
            end = Position(at.file, at.line + count, at.line + count, at.row + count)
            size_bytes = read_bytes - last_bytes
            yield RowsBlock(self.reading, at, end, size_bytes, file, names, rows, encoding)
            at = end
            last_bytes = read_bytes

    def _groups(
        self, file: SourceFile, first: int
    ) -> Iterator[tuple[tuple[str, ...], str, tuple[Row, ...], int]]:
        """As `_rows`, with the rows of a block together."""
        held: list[Row] = []
        num_chars = 0
        names: tuple[str, ...] = ()
        encoding = ""
        for names, encoding, row, read_bytes in islice(self._rows(file), first, None):
            held.append(row)
            num_chars += sum(map(len, row.values))
            if num_chars >= BLOCK_BYTES or len(held) >= _MOST_ROWS:
                yield names, encoding, tuple(held), read_bytes
                held = []
                num_chars = 0
        if held:
            yield names, encoding, tuple(held), file.size_bytes()

    def _rows(
        self, file: SourceFile, *, is_checked: bool = True
    ) -> Iterator[tuple[tuple[str, ...], str, Row, int]]:
        """Names of the columns, encoding of the file if it was detected, a row, and the stored
        bytes that were read for it."""
        form = self.reading.table
        with file.open() as stored:
            text, encoding = self._text(file, stored)
            found = _split(text, file, self.reading)
            try:
                names = form.names or tuple(next(found, Row(1, [])).values)
                if is_checked:
                    self._check(names, file)
                for row in found:
                    yield names, encoding, row, stored.tell()
            except TORN as error:
                raise torn(file.where, error) from error

    def _text(self, file: SourceFile, stored: io.BufferedReader) -> tuple[io.TextIOWrapper, str]:
        head = decompressed(stored, file.suffix)(HEAD_BYTES)
        stored.seek(0)
        encoding = encoding_of(head, self.reading.encoding, file.where)
        read = decompressed(stored, file.suffix)
        if self.reading.encoding != "utf-8" and encoding != "utf-8":
            read = reader_of(as_utf8(read, encoding, file.where))
            opened = "utf-8-sig"
        else:
            opened = encoding.replace("utf-8", "utf-8-sig")  # skips a byte order mark
        # Invalid bytes are passed through, so that the error belongs to their row.
        text = io.TextIOWrapper(stream_of(read), opened, "surrogateescape", newline="")
        return text, encoding if self.reading.detects else ""

    def _check(self, names: tuple[str, ...], file: SourceFile) -> None:
        wanted = [self.reading.text_field, *filter(None, [self.reading.id_field])]
        absent = [name for name in wanted if name not in names]
        twice = [name for name in dict.fromkeys(names) if names.count(name) > 1]
        if absent or twice:
            what = f"column {absent[0]!r} is missing" if absent else f"two columns {twice[0]!r}"
            raise SourceError(
                what,
                where=f"{file.where}:1",
                found=", ".join(names)[:200],
                do="set text_field, id_field, csv_delimiter or csv_names of this source",
                code="E-SOURCE-FIELD",
            )


def _split(text: io.TextIOWrapper, file: SourceFile, reading: Reading) -> Iterator[Row]:
    """The rows of a table. Raises SourceError, which names the line, if quotes are not closed or
    are followed by text (E-SOURCE-TORN), or a line or value is too long (E-SOURCE-RECORD)."""
    form = reading.table
    delimiter = form.delimiter or ("\t" if suffixes(file.name)[0].lower() == ".tsv" else ",")
    csv.field_size_limit(
        reading.max_record_bytes
    )  # the library refuses more than 128 KiB by default
    quoting = csv.QUOTE_MINIMAL if form.quote else csv.QUOTE_NONE
    lines = _limited(text, file, reading)
    how = {"delimiter": delimiter, "quotechar": form.quote or None, "quoting": quoting}
    rows = csv.reader(lines, strict=True, **how)
    line = 1
    while True:
        try:
            values = next(rows, None)
        except csv.Error as error:
            where = f"{file.where}:{line}"
            if "field limit" in str(error):
                raise reading.too_long(where) from error
            raise torn(where, error) from error
        if values is None:
            return
        yield Row(line, values)
        line = rows.line_num + 1


def _limited(text: io.TextIOWrapper, file: SourceFile, reading: Reading) -> Iterator[str]:
    limit = reading.max_record_bytes
    for number, line in enumerate(iter(lambda: text.readline(limit + 1), ""), 1):
        if len(line) > limit:
            raise reading.too_long(f"{file.where}:{number}")
        yield line
