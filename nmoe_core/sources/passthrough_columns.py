"""Passthrough columns: fields of records, besides text and id, that are stored with the documents.

Arrow columns keep their type. JSON values are transferred as JSON text, because the type of a
column is known only at the end of the split. If all values of a column are booleans, 64-bit
integers, floats or texts, the column has this type. Else the column is text, and lists, objects and
values of other types are written as JSON. So types and bytes do not depend on how a source is cut
into blocks.
"""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from nmoe_core.base.errors import SourceError
from nmoe_core.base.jsonl import encodable

if TYPE_CHECKING:
    import pyarrow as pa

MISSING = object()
_AS_JSON = {b"encoding": b"json"}
_INT64 = range(-(2**63), 2**63)


class Kept(NamedTuple):
    """The passthrough columns of the records of a block."""

    rows: "pa.RecordBatch"
    """One row per record."""
    types: "pa.Schema"
    """Types of the values."""
    absent: frozenset[str]
    """Columns that no record has."""

    def take(self, numbers: Sequence[int]) -> "Kept":
        """The rows of some records; types and absent columns still describe the whole block."""
        import pyarrow as pa

        return self._replace(rows=self.rows.take(pa.array(numbers, pa.int64())))

    def values(self, name: str, numbers: Sequence[int]) -> list[Any]:
        """The values of a column in some rows, see `plain`; None for a missing value."""
        if name not in self.rows.schema.names:
            return [None] * len(numbers)
        values = self.take(numbers).rows.column(name).to_pylist()
        if self.rows.schema.metadata == _AS_JSON:
            # Lists and objects stay JSON, as in the column that is stored.
            values = [v if v is None or v[0] in "[{" else orjson.loads(v) for v in values]
        return [*map(plain, values)]


def plain(value: Any) -> Any:
    """A text, a number, a boolean or None as it is; another value as text."""
    return value if value is None or isinstance(value, str | int | float) else str(value)


def json_columns(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> Kept:
    """The columns of JSON records, each given as a row of values in the order of `names`."""
    import pyarrow as pa

    columns = list(zip(*rows)) or [()] * len(names)
    texts = [pa.array(list(map(_json, column)), pa.large_string()) for column in columns]
    types = [pa.field(name, _json_type(column)) for name, column in zip(names, columns)]
    absent = {name for name, column in zip(names, columns) if all(v is MISSING for v in column)}
    schema = pa.schema([(name, pa.large_string()) for name in names], metadata=_AS_JSON)
    kept = pa.RecordBatch.from_arrays(texts, schema=schema)
    return Kept(kept, pa.schema(types, metadata=_AS_JSON), frozenset(absent))


def arrow_columns(names: Sequence[str], rows: "pa.RecordBatch") -> Kept:
    """The columns of Arrow records; `rows` may lack some of them."""
    absent = frozenset(names) - set(rows.schema.names)
    return Kept(rows, rows.schema.remove_metadata(), absent)


def common_types(one: "pa.Schema | None", other: "pa.Schema", where: str) -> "pa.Schema":
    """For each column, the type that can represent the values of both given types. Raises
    SourceError if a column has incompatible types (E-SOURCE-FIELD)."""
    import pyarrow as pa

    if one is None or one.equals(other, check_metadata=True):
        return other
    if one.metadata == _AS_JSON:
        pairs = ((field, other.field(field.name).type) for field in one)
        fields = [field.with_type(_common_json(field.type, type_)) for field, type_ in pairs]
        return pa.schema(fields, metadata=_AS_JSON)
    try:
        return pa.unify_schemas([one, other], promote_options="permissive")
    except pa.ArrowTypeError as error:
        raise SourceError(
            f"a passthrough column has incompatible types: {error}",
            where=where,
            do="split the files into one source per type, or leave the column out",
            code="E-SOURCE-FIELD",
        ) from error


def as_types(rows: "pa.RecordBatch", types: "pa.Schema") -> "pa.RecordBatch":
    """Rows converted from their transfer types to their final types; a missing column is null."""
    import pyarrow as pa

    is_json = rows.schema.metadata == _AS_JSON
    arrays = []
    for field in types:
        place = rows.schema.get_field_index(field.name)
        if place < 0:
            arrays.append(pa.nulls(len(rows), field.type))
        elif is_json:
            arrays.append(_parsed(rows.column(place), field.type))
        else:
            arrays.append(rows.column(place).cast(field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=types)


def _json(value: Any) -> str | None:
    if value is None or value is MISSING:
        return None
    if isinstance(value, str):
        value = encodable(value)
    try:
        return orjson.dumps(value).decode()
    # for integers of more than 64 bits, and lone surrogates inside lists and objects
    except TypeError:
        return json.dumps(value, separators=(",", ":"))


def _json_type(values: Sequence[Any]) -> "pa.DataType":
    import pyarrow as pa

    kinds = {type(value) for value in values} - {type(None), type(MISSING)}
    if not kinds:
        return pa.null()
    if kinds == {bool}:
        return pa.bool_()
    if kinds <= {int, float}:
        whole = [value for value in values if type(value) is int]
        if all(value in _INT64 for value in whole):
            return pa.float64() if float in kinds else pa.int64()
    return pa.string()


def _common_json(one: "pa.DataType", other: "pa.DataType") -> "pa.DataType":
    import pyarrow as pa

    if pa.types.is_null(one) or one == other:
        return other
    if pa.types.is_null(other):
        return one
    return pa.float64() if {one, other} == {pa.int64(), pa.float64()} else pa.string()


def _parsed(texts: "pa.Array", kind: "pa.DataType") -> "pa.Array":
    import pyarrow as pa

    values = texts.to_pylist()
    if not pa.types.is_string(kind):
        numbers = [None if text is None else orjson.loads(text) for text in values]
        is_float = pa.types.is_floating(kind)
        return pa.array([float(n) if is_float and n is not None else n for n in numbers], kind)
    return pa.array([orjson.loads(t) if t and t[0] == '"' else t for t in values], kind)
