"""Arrow columns as records: what the parquet, arrow and huggingface kinds have in common.

A block holds the text and id columns of consecutive rows, about 2 MiB of them, still as Arrow
buffers, which pickle without being copied row by row; a worker decodes them. Texts are carried as
bytes, so that bad UTF-8 is the record's fault and not the file's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from nmoe_core.base.errors import SourceError
from nmoe_core.base.jsonl import checked_id
from nmoe_core.sources.records import BadRecord, Fields, OnError, Position, Record

BLOCK_BYTES = 2 * 2**20
_MAX_BLOCK_ROWS = 8192


class Origin(NamedTuple):
    """Where rows come from: how errors name the file, and what ids start with."""

    where: str
    id_prefix: str


@dataclass(frozen=True, slots=True)
class ColumnsBlock:
    """Consecutive rows as a record batch of a text and perhaps an id column."""

    origin: Origin
    columns: Any
    start: Position
    end: Position
    size_bytes: int
    fields: Fields
    on_error: OnError

    def records(self) -> Iterator[Record | BadRecord]:
        """Decode each row's text and check its id."""
        texts = self.columns.column(0).to_pylist()
        ids = self.columns.column(1).to_pylist() if self.fields.id else [None] * len(texts)
        for i, (text, id_) in enumerate(zip(texts, ids)):
            yield self._record(i, text, id_)

    def _record(self, i: int, text: bytes | None, id_: Any) -> Record | BadRecord:
        row, line = self.start.row + i, self.start.line + i
        where = f"{self.origin.where}: row {line}"
        default_id = f"{self.origin.id_prefix}:{line}"
        # An Arrow text may hold any bytes; only ids and texts that are UTF-8 are records.
        is_replaced = False
        try:
            id_ = id_.decode() if isinstance(id_, bytes) else id_
            decoded = "" if text is None else text.decode()
        except UnicodeDecodeError as error:
            if text is None or isinstance(id_, bytes) or self.on_error != "replace":
                return BadRecord(row, where, f"not UTF-8 at byte {error.start}")
            decoded, is_replaced = text.decode("utf-8", "replace"), True
        return Record(
            row, checked_id(id_, self.fields.id or "id", default_id), decoded, is_replaced
        )


def check_fields(schema: Any, fields: Fields, where: str) -> None:
    """Refuse a schema without the fields, or with ones that hold no text and no id.

    Raises:
        SourceError: E-SOURCE-FIELD, with the columns that are there.
    """
    import pyarrow as pa

    for name, is_text in ((fields.text, True), (fields.id, False)):
        if name is None:
            continue
        if schema.names.count(name) != 1:
            raise _wrong_field(schema, name, where, "field is missing")
        kind = schema.field(name).type
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        if not _holds_text(pa, kind) and (is_text or not pa.types.is_integer(kind)):
            expected = "text" if is_text else "text or whole numbers"
            raise _wrong_field(schema, name, where, f"field is {kind}, not {expected}")


def cut_batch(batch: Any, fields: Fields) -> Iterator[Any]:
    """The batch's text and id columns, in pieces of about 2 MiB; texts as bytes, offsets checked.

    Args:
        batch: Record batch that has the fields.
        fields: Names of the columns.

    Raises:
        pyarrow.ArrowInvalid: Buffers and offsets do not fit each other.
    """
    import pyarrow as pa

    names = [name for name in fields if name is not None]
    arrays = [_as_bytes(pa, batch.column(batch.schema.get_field_index(n))) for n in names]
    for array in arrays:
        array.validate(full=True)
    columns = pa.RecordBatch.from_arrays(arrays, [str(i) for i in range(len(arrays))])
    first = 0
    while first < len(columns):
        num_rows = _rows_within(columns, first)
        yield columns.slice(first, num_rows)
        first += num_rows


def _rows_within(columns: Any, first: int) -> int:
    """How many rows from `first` fill a block; one where a row alone is larger."""
    num_rows = min(len(columns) - first, _MAX_BLOCK_ROWS)
    while num_rows > 1 and columns.slice(first, num_rows).nbytes > BLOCK_BYTES:
        num_rows //= 2
    return num_rows


def _as_bytes(pa: Any, array: Any) -> Any:
    kind = array.type
    if pa.types.is_dictionary(kind):
        array.validate(full=True)
        array = array.dictionary_decode()
        kind = array.type
    if pa.types.is_integer(kind):
        return array
    # A cast from text to bytes does not validate UTF-8: the record that is not reports it.
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


def _wrong_field(schema: Any, name: str, where: str, what: str) -> SourceError:
    return SourceError(
        what,
        where=where,
        found=", ".join(schema.names),
        expected=name,
        do="set text_field or id_field of this source",
        code="E-SOURCE-FIELD",
    )
