"""Arrow columns as records: what the parquet, arrow and huggingface kinds have in common.

A block holds the text, id and kept columns of consecutive rows, about 2 MiB of them, as Arrow
buffers, which pickle without being copied row by row; a worker decodes them. Texts are carried as
bytes, so that bad UTF-8 is the record's fault and not the file's.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from nmoe_core.base.errors import SourceError
from nmoe_core.base.jsonl import checked_id
from nmoe_core.sources.kept import Kept, arrow_columns
from nmoe_core.sources.records import (
    SAMPLED_RECORDS,
    BadRecord,
    Block,
    Position,
    Reading,
    Record,
    Sample,
)

BLOCK_BYTES = 2 * 2**20
MAX_BLOCK_ROWS = 8192


class Place(NamedTuple):
    """Origin of rows: the file's name in errors, and the prefix of ids."""

    where: str
    id_prefix: str


class Group(NamedTuple):
    """Consecutive rows that are stored together: a row group or a record batch."""

    offset: int
    """`Position.offset` of its rows."""
    end_offset: int
    """That of what follows it."""
    first_line: int
    num_rows: int
    size_bytes: int
    pieces: Iterable[Any]
    """Its columns as `cut_batch` gives them."""


@dataclass(frozen=True, slots=True)
class ColumnsBlock(Block):
    """Consecutive rows as a record batch: text, perhaps id, and those kept columns that it has."""

    place: Place
    columns: Any

    def records(self) -> Iterator[Record | BadRecord]:
        """Decode each row's text and check its id."""
        texts = self.columns.column(0).to_pylist()
        ids = self.columns.column(1).to_pylist() if self.reading.id_field else [None] * len(texts)
        for i, (text, id_) in enumerate(zip(texts, ids)):
            yield self._record(i, text, id_)

    def kept(self, records: Sequence[Record | BadRecord]) -> Kept:
        """Rows of the kept columns."""
        places = range(1 + (self.reading.id_field is not None), self.columns.num_columns)
        kept = arrow_columns(self.reading.kept, self.columns.select(list(places)))
        return kept.take([record.row - self.start.row for record in records])

    def _record(self, i: int, text: bytes | None, id_: Any) -> Record | BadRecord:
        row, line = self.start.row + i, self.start.line + i
        # An Arrow text may hold any bytes; only ids and texts that are UTF-8 are records.
        try:
            id_ = id_.decode() if isinstance(id_, bytes) else id_
            decoded, is_replaced = self.reading.decode(text or b"")
        except UnicodeDecodeError as error:
            where = f"{self.place.where}: row {line}"
            return BadRecord(row, where, f"not UTF-8 at byte {error.start}")
        default_id = f"{self.place.id_prefix}:{line}"
        id_ = checked_id(id_, self.reading.id_field or "id", default_id)
        return Record(row, id_, decoded, is_replaced)


def column_blocks(
    reading: Reading, place: Place, groups: Iterable[Group], start: Position
) -> Iterator[ColumnsBlock]:
    """The blocks of a file from `start` on, which lies in the first group."""
    rows_before = start.row - start.line
    for group in groups:
        line, last = group.first_line, group.first_line + group.num_rows
        at = Position(start.file, group.offset, line, rows_before + line)
        for columns in group.pieces:
            line += len(columns)
            offset = group.end_offset if line == last else group.offset
            end = Position(start.file, offset, line, rows_before + line)
            if line > start.line:
                size_bytes = group.size_bytes * len(columns) // max(group.num_rows, 1)
                yield ColumnsBlock(reading, at, end, size_bytes, place, columns)
            at = end


def check_fields(schema: Any, reading: Reading, where: str) -> None:
    """Refuse a schema without the fields, or with ones that hold no text and no id. Raises
    SourceError: E-SOURCE-FIELD, with the columns that are there."""
    import pyarrow as pa

    for name, is_text in ((reading.text_field, True), (reading.id_field, False)):
        if name is None:
            continue
        what, found = None, find_field(schema, name)
        if found is None:
            what = "field is missing"
        else:
            kind = _value_type(pa, found.kind)
            if not _holds_text(pa, kind) and (is_text or not pa.types.is_integer(kind)):
                what = f"field is {kind}, not {'text' if is_text else 'text or whole numbers'}"
        if what is not None:
            raise SourceError(
                what,
                where=where,
                found=", ".join(field_names(schema)),
                expected=name,
                do="set text_field or id_field of this source",
                code="E-SOURCE-FIELD",
            )


class Field(NamedTuple):
    """Where a schema has a field: a column, and the path into it where that is a struct."""

    column: int
    path: list[str]
    kind: Any


def find_field(schema: Any, name: str) -> Field | None:
    """The column of that name, else the field that the dots of the name lead to; None if there is
    none, or more than one."""
    import pyarrow as pa

    if schema.names.count(name) == 1:
        return Field(schema.get_field_index(name), [], schema.field(name).type)
    first, *path = name.split(".")
    if not path or schema.names.count(first) != 1:
        return None
    kind = schema.field(first).type
    for key in path:
        if not pa.types.is_struct(kind) or kind.get_field_index(key) < 0:
            return None
        kind = kind.field(key).type
    return Field(schema.get_field_index(first), path, kind)


def field_names(schema: Any) -> list[str]:
    """The columns of a schema, with the paths into its structs."""
    import pyarrow as pa

    names = []
    for field in schema:
        names.append(field.name)
        if pa.types.is_struct(field.type):
            names += [f"{field.name}.{path}" for path in field_names(pa.schema(list(field.type)))]
    return names


def batch_samples(batch: Any) -> list[Sample]:
    """The first rows of a batch; a text that is not UTF-8 is none."""
    import pyarrow as pa

    batch, columns = batch.slice(0, SAMPLED_RECORDS), {}
    for name in field_names(batch.schema):
        columns[name] = [None] * len(batch)
        field = find_field(batch.schema, name)
        if field is not None and _holds_text(pa, _value_type(pa, field.kind)):
            array = _values(pa, batch.column(field.column), field.path)
            columns[name] = [_text_or_none(v) for v in _as_bytes(pa, array).to_pylist()]
    return [dict(zip(columns, row)) for row in zip(*columns.values())]


def _text_or_none(value: bytes | None) -> str | None:
    try:
        return None if value is None else value.decode()
    except UnicodeDecodeError:
        return None


def _value_type(pa: Any, kind: Any) -> Any:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def cut_batch(batch: Any, reading: Reading) -> Iterator[Any]:
    """The batch's columns in pieces of about 2 MiB: text and id as bytes, and the kept ones that it
    has; offsets checked. Raises pyarrow.ArrowInvalid: buffers and offsets do not fit each other."""
    import pyarrow as pa

    arrays, names = [], []
    num_first = 1 + (reading.id_field is not None)
    for i, name in enumerate(reading.columns):
        if (field := find_field(batch.schema, name)) is None:
            continue
        array = _values(pa, batch.column(field.column), field.path)
        arrays.append(_as_bytes(pa, array) if i < num_first else array)
        names.append(str(i) if i < num_first else name)
        arrays[-1].validate(full=True)
    columns = pa.RecordBatch.from_arrays(arrays, names)
    first = 0
    while first < len(columns):
        num_rows = min(len(columns) - first, MAX_BLOCK_ROWS)
        while num_rows > 1 and columns.slice(first, num_rows).nbytes > BLOCK_BYTES:
            num_rows //= 2
        piece = columns.slice(first, num_rows)
        # A slice would go to a worker with the buffers of the whole batch.
        yield pa.ipc.read_record_batch(piece.serialize(), piece.schema)
        first += num_rows


def _values(pa: Any, array: Any, path: list[str]) -> Any:
    """The values of a column, or of a field of the structs in it, without a dictionary."""
    if path:
        array.validate(full=True)
    for key in path:
        array = array.flatten()[array.type.get_field_index(key)]
    if isinstance(array.type, pa.BaseExtensionType):
        array = array.storage
    if pa.types.is_dictionary(array.type):
        array.validate(full=True)
        array = array.dictionary_decode()
    return array


def _as_bytes(pa: Any, array: Any) -> Any:
    kind = array.type
    if pa.types.is_integer(kind):
        return array
    # A cast from text to bytes does not validate UTF-8; a record whose text is not valid reports
    # that itself.
    is_small = pa.types.is_string(kind) or pa.types.is_binary(kind) or pa.types.is_null(kind)
    return array.cast(pa.binary() if is_small else pa.large_binary())


def _holds_text(pa: Any, kind: Any) -> bool:
    return (
        pa.types.is_null(kind)
        or pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_string_view(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
    )
