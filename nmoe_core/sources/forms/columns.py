"""Converts Arrow columns to records: the common part of the kinds parquet, arrow and huggingface.

A block has the text, id and passthrough columns of consecutive rows (about 2 MiB) as Arrow buffers,
which can be pickled without copying rows; a worker decodes them. Texts are transferred as bytes, so
that invalid UTF-8 is an error of the record, not of the file.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from nmoe_core.base.errors import SourceError
from nmoe_core.base.jsonl import checked_id
from nmoe_core.sources.forms.chat import renderer
from nmoe_core.sources.passthrough_columns import Kept, arrow_columns
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
    """The origin of rows: the file's name in errors, and the prefix of ids."""

    where: str
    id_prefix: str


class Group(NamedTuple):
    """Consecutive rows stored together: a row group or a record batch."""

    offset: int
    """`Position.offset` of the rows of the group."""
    end_offset: int
    """`Position.offset` of the rows after the group."""
    first_line: int
    num_rows: int
    size_bytes: int
    pieces: Iterable[Any]
    """The columns of the group, as `cut_batch` returns them."""


@dataclass(frozen=True, slots=True)
class ColumnsBlock(Block):
    """Consecutive rows as a record batch: text or messages, optionally id, and the passthrough
    columns that exist."""

    place: Place
    columns: Any

    def records(self) -> Iterator[Record | BadRecord]:
        """Decode each row's text and check its id."""
        texts = self.columns.column(0).to_pylist()
        ids = self.columns.column(1).to_pylist() if self.reading.id_field else [None] * len(texts)
        template = self.reading.chat_template
        render = None if template is None else renderer(template, self.reading.source)
        for i, (text, id_) in enumerate(zip(texts, ids)):
            try:
                text = text if render is None else render(_without_nulls(text)).encode()
            except ValueError as error:
                row = self.start.row + i
                yield BadRecord(row, self.where(row), str(error))
            else:
                yield self._record(i, text, id_)

    def where(self, row: int) -> str:
        return f"{self.place.where}: row {self.start.line + row - self.start.row}"

    def kept(self, records: Sequence[Record | BadRecord]) -> Kept:
        """Rows of the passthrough columns."""
        places = range(1 + (self.reading.id_field is not None), self.columns.num_columns)
        kept = arrow_columns(self.reading.kept, self.columns.select(list(places)))
        return kept.take([record.row - self.start.row for record in records])

    def _record(self, i: int, text: bytes | None, id_: Any) -> Record | BadRecord:
        row = self.start.row + i
        line = self.start.line + i
        # An Arrow text may have any bytes; a record needs a valid UTF-8 id and text.
        try:
            id_ = id_.decode() if isinstance(id_, bytes) else id_
            decoded, is_replaced = self.reading.decode(text or b"")
        except UnicodeDecodeError as error:
            return BadRecord(row, self.where(row), f"not UTF-8 at byte {error.start}")
        default_id = f"{self.place.id_prefix}:{line}"
        id_ = checked_id(id_, self.reading.id_field or "id", default_id)
        return Record(row, id_, decoded, is_replaced)


def column_blocks(
    reading: Reading, place: Place, groups: Iterable[Group], start: Position
) -> Iterator[ColumnsBlock]:
    """The blocks of a file from the position `start` on; `start` is in the first of the
    `groups`."""
    rows_before = start.row - start.line
    for group in groups:
        line = group.first_line
        last = group.first_line + group.num_rows
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
    """Raise SourceError, with the existing columns, if a schema lacks a field or a field has a
    wrong type (E-SOURCE-FIELD)."""
    import pyarrow as pa

    for name, is_text in ((reading.text_field, True), (reading.id_field, False)):
        if name is None:
            continue
        what = None
        found = find_field(schema, name)
        if found is None:
            what = "field is missing"
        else:
            kind = _value_type(pa, found.kind)
            if is_text and reading.chat_template is not None:
                is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
                if not is_list or not pa.types.is_struct(kind.value_type):
                    what = f"field is {kind}, not a list of messages"
            elif is_text and reading.tokens is not None:
                what = None if _holds_tokens(pa, kind) else f"field is {kind}, not a list of tokens"
            elif not _holds_text(pa, kind) and (is_text or not pa.types.is_integer(kind)):
                what = f"field is {kind}, not {'text' if is_text else 'text or whole numbers'}"
        if what is not None:
            raise SourceError(
                what,
                where=where,
                found=", ".join(field_names(schema)),
                expected=name,
                do="set text_field, tokens_field or id_field of this source",
                code="E-SOURCE-FIELD",
            )


class Field(NamedTuple):
    """Location of a field in a schema: a column, and the path inside it if it is a struct."""

    column: int
    path: list[str]
    kind: Any


def find_field(schema: Any, name: str) -> Field | None:
    """The column of this name, else the nested field with this dotted name; None if no field or
    several fields match."""
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
    """Names of the columns of a schema, and dotted names of the fields of structs."""
    import pyarrow as pa

    names = []
    for field in schema:
        names.append(field.name)
        if pa.types.is_struct(field.type):
            names += [f"{field.name}.{path}" for path in field_names(pa.schema(list(field.type)))]
    return names


def batch_samples(batch: Any) -> list[Sample]:
    """The first rows of a batch, fewer if their texts share long values; the text is None if it is
    not UTF-8."""
    import pyarrow as pa

    batch = batch.slice(0, SAMPLED_RECORDS)
    texts = {}
    for name in field_names(batch.schema):
        field = find_field(batch.schema, name)
        if field is not None and _holds_text(pa, _value_type(pa, field.kind)):
            texts[name] = _as_bytes(pa, _values(pa, batch.column(field.column), field.path))
            texts[name].validate(full=True)
    rows: list[Any] = [{}] * len(batch)
    if texts:
        rows = next(_unshared(pa, pa.RecordBatch.from_pydict(texts)), batch[:0]).to_pylist()
    names = field_names(batch.schema)
    return [{name: _text_or_none(row.get(name)) for name in names} for row in rows]


def _without_nulls(messages: Any) -> Any:
    """Messages without the keys that only other messages have, which Arrow gives as nulls."""
    if not isinstance(messages, list):
        return messages
    return [
        {key: value for key, value in one.items() if value is not None}
        if isinstance(one, dict)
        else one
        for one in messages
    ]


def _text_or_none(value: bytes | None) -> str | None:
    try:
        return None if value is None else value.decode()
    except UnicodeDecodeError:
        return None


def _value_type(pa: Any, kind: Any) -> Any:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def cut_batch(batch: Any, reading: Reading) -> Iterator[Any]:
    """The batch's columns in pieces of about 2 MiB: text as bytes, or messages; id as bytes; and
    the passthrough columns that exist. Checks offsets; raises pyarrow.ArrowInvalid if they do
    not fit the buffers."""
    import pyarrow as pa

    arrays = []
    names = []
    num_first = 1 + (reading.id_field is not None)
    for i, name in enumerate(reading.columns):
        if (field := find_field(batch.schema, name)) is None:
            continue
        array = _values(pa, batch.column(field.column), field.path)
        are_lists = reading.chat_template is not None or reading.tokens is not None
        is_as_stored = i >= num_first or (i == 0 and are_lists)
        arrays.append(array if is_as_stored else _as_bytes(pa, array))
        names.append(str(i) if i < num_first else name)
        arrays[-1].validate(full=True)
    for part in _unshared(pa, pa.RecordBatch.from_arrays(arrays, names)):
        first = 0
        while first < len(part):
            num_rows = min(len(part) - first, MAX_BLOCK_ROWS)
            while num_rows > 1 and part.slice(first, num_rows).nbytes > BLOCK_BYTES:
                num_rows //= 2
            piece = part.slice(first, num_rows)
            # Pickling a slice would send the buffers of the whole batch to the worker.
            yield pa.ipc.read_record_batch(piece.serialize(), piece.schema)
            first += num_rows


def longest_shared(row: Any, names: Sequence[str]) -> int | None:
    """The size in bytes of the longest value in the columns' dictionaries, from a batch of one row.
    None if a dictionary has only this row's value: it may be incomplete."""
    import pyarrow as pa

    longest = 0
    for name in names:
        if (field := find_field(row.schema, name)) is None:
            continue
        array = _values(pa, row.column(field.column), field.path)
        if pa.types.is_dictionary(array.type):
            if len(array.dictionary) < 2:
                return None
            longest = max(longest, int(_lengths(pa, array.dictionary).max()))
    return longest


def _values(pa: Any, array: Any, path: list[str]) -> Any:
    """The values of a column, or of a field of its structs."""
    if path:
        array.validate(full=True)
    for key in path:
        array = array.flatten()[array.type.get_field_index(key)]
    return array.storage if isinstance(array.type, pa.BaseExtensionType) else array


def _unshared(pa: Any, columns: Any) -> Iterator[Any]:
    """The rows with dictionaries and views replaced by the values, in pieces of about 8 MiB. Values
    are replaced piece by piece, since every row of a small file may refer to one long value."""
    sizes = np.zeros(len(columns), np.int64)
    for array in columns.columns:
        sizes += _shared_bytes(pa, array)
    ends = np.cumsum(sizes)
    first = 0
    while first < len(columns):
        most = ends[first] - sizes[first] + 4 * BLOCK_BYTES
        stop = max(first + 1, int(np.searchsorted(ends, most, side="right")))
        part = columns.slice(first, stop - first)
        yield pa.RecordBatch.from_arrays([_own(pa, a) for a in part.columns], columns.schema.names)
        first = stop


def _shared_bytes(pa: Any, array: Any) -> np.ndarray | int:
    """If rows may share values, the size of each row's value in bytes: int64 `[rows]`; else 0."""
    if array.type == pa.binary_view():
        return _lengths(pa, array)
    if not pa.types.is_dictionary(array.type):
        return 0
    lengths = np.append(_lengths(pa, array.dictionary), 0)  # of a null
    return lengths[array.indices.cast(pa.int64()).fill_null(-1)]


def _lengths(pa: Any, array: Any) -> np.ndarray:
    """Upper bound of the bytes of each value: int64 `[values]`."""
    import pyarrow.compute as pc

    if array.type in (pa.binary_view(), pa.string_view()):
        # A view starts with its length; the view of a null may have any bytes.
        views = np.frombuffer(array.buffers()[1] or b"", np.int32).reshape(-1, 4)
        return np.maximum(views[array.offset : array.offset + len(array), 0], 0).astype(np.int64)
    if not _holds_text(pa, array.type) or pa.types.is_null(array.type):
        return np.full(len(array), array.nbytes)
    found = pc.call_function("binary_length", [array]).fill_null(0)
    return found.to_numpy(zero_copy_only=False).astype(np.int64)


def _own(pa: Any, array: Any) -> Any:
    array = array.dictionary_decode() if pa.types.is_dictionary(array.type) else array
    return array.cast(pa.large_binary()) if array.type == pa.binary_view() else array


def _as_bytes(pa: Any, array: Any) -> Any:
    kind = array.type
    if pa.types.is_dictionary(kind):
        return pa.DictionaryArray.from_arrays(array.indices, _as_bytes(pa, array.dictionary))
    if pa.types.is_integer(kind):
        return array
    if pa.types.is_string_view(kind):
        return array.cast(pa.binary_view())
    # The cast from text to bytes does not validate UTF-8: each record reports its own invalid text.
    is_small = pa.types.is_string(kind) or pa.types.is_binary(kind) or pa.types.is_null(kind)
    return array.cast(pa.binary() if is_small else pa.large_binary())


def _holds_tokens(pa: Any, kind: Any) -> bool:
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    is_list = is_list or pa.types.is_fixed_size_list(kind)
    return is_list and pa.types.is_integer(kind.value_type)


def _holds_text(pa: Any, kind: Any) -> bool:
    return (
        pa.types.is_null(kind)
        or pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_string_view(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
    )
