"""Attribute files: Parquet with one row per document of a shard, in the order of the shard.

The first columns are `doc_id` and `text_sha256`, followed by the attribute's own columns. The
footer has, as JSON under `nmoe`, the name, the fingerprints of the inputs, and the digest of the
rows. The digest covers values and types, so it does not depend on the pyarrow version, which
Parquet files contain. Memory: one row group of 65,536 rows.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from loader.files.nested import json_value
from loader.files.regular import open_file, regular
from nmoe_core.base.atomic import atomic_file
from nmoe_core.base.errors import FormatError, one_line
from nmoe_core.base.fingerprint import Fingerprints
from nmoe_core.config.attributes import KEYS

ROWS = 2**16
_FOOTER = b"nmoe"
# The key in a Parquet footer, and the mark of the text that follows, as Thrift's compact protocol
# writes two strings of a struct.
_KEY = b"\x18\x04nmoe\x18"
_KEY_FIELDS = (pa.field("doc_id", pa.string()), pa.field("text_sha256", pa.binary(32)))


class Documents(NamedTuple):
    """The documents of a shard, in order."""

    doc_ids: Sequence[str] | pa.Array
    text_sha256: Sequence[str] | pa.Array
    """Hexadecimal, or an array of 32-byte values."""


@dataclass(frozen=True)
class Footer:
    """The footer of an attribute file. The schema and the number of rows are read when they are
    needed, which takes ten times as long."""

    path: Path
    name: str
    fingerprints: Fingerprints
    digest: str
    """SHA-256 of the rows' types and values."""

    @cached_property
    def schema(self) -> pa.Schema:
        """Schema of all columns. Raises FormatError as `read_footer`."""
        with _opened(self.path) as file:
            return file.schema_arrow.remove_metadata()

    @cached_property
    def num_rows(self) -> int:
        """Number of rows. Raises FormatError as `read_footer`."""
        with _opened(self.path) as file:
            return file.metadata.num_rows


def write_attribute(
    path: Path,
    name: str,
    fingerprints: Fingerprints,
    documents: Documents,
    schema: pa.Schema,
    batches: Iterable[pa.RecordBatch],
) -> str:
    """Write the file atomically; return the digest of its rows.

    Args:
        path: The file.
        name: Name of the attribute.
        fingerprints: Fingerprints of its inputs.
        documents: Documents of the shard.
        schema: Schema of the attribute's own columns.
        batches: Rows of these columns, in the order of the documents, in batches of any size.

    Raises:
        FormatError: The number of rows differs from the number of documents (E-ATTRIBUTE-ROWS).
    """
    whole = pa.schema([*_KEY_FIELDS, *schema])
    digest = _started(whole)
    first = 0
    last = 0
    path.parent.mkdir(parents=True, exist_ok=True)
    with (
        atomic_file(path) as file,
        pq.ParquetWriter(file, whole, compression="zstd", store_schema=True) as writer,
    ):
        for rows in _row_groups(schema, batches):
            last = first + rows.num_rows
            part = Documents(*(ids[first:last] for ids in documents))
            if len(part.doc_ids) != rows.num_rows:
                break  # there are more rows than documents
            table = with_keys(part, rows.cast(schema))
            for column in table.columns:
                _update(digest, column.combine_chunks())
            writer.write_table(table, row_group_size=ROWS)
            first = last
        if first != last or last != len(documents.doc_ids):
            raise FormatError(
                f"attribute {name} does not have one row per document",
                where=path,
                found=f"{last} rows",
                expected=f"{len(documents.doc_ids)} documents",
                code="E-ATTRIBUTE-ROWS",
            )
        found = digest.hexdigest()
        footer = {"name": name, "fingerprints": fingerprints, "digest": found}
        writer.add_key_value_metadata({_FOOTER.decode(): json.dumps(footer, sort_keys=True)})
    return found


def read_footer(path: Path) -> Footer:
    """The footer of a file. Raises FormatError if the file is missing (E-ATTRIBUTE-MISSING) or not
    an attribute file (E-ATTRIBUTE-FORMAT)."""
    try:
        with open_file(path, buffering=0) as file:
            size_bytes = os.fstat(file.fileno()).st_size
            file.seek(max(0, size_bytes - 8))
            end = file.read(8)
            file.seek(max(0, size_bytes - 8 - int.from_bytes(end[:4], "little")))
            payload = file.read(int.from_bytes(end[:4], "little")) if end[4:] == b"PAR1" else b""
    except FileNotFoundError:
        raise _no_file(path) from None
    except OSError as error:
        raise _not_ours(path, one_line(error)) from None
    try:
        # After the key, statistics with values of documents cannot follow.
        start = payload.rindex(_KEY) + len(_KEY)
        length = shift = 0
        while True:  # a number in pieces of seven bits, the lowest first
            length |= (payload[start] & 0x7F) << shift
            shift += 7
            start += 1
            if payload[start - 1] < 0x80:
                break
        footer = json_value(payload[start : start + length])
        return Footer(path, footer["name"], footer["fingerprints"], footer["digest"])
    except (KeyError, IndexError, ValueError, TypeError):
        raise _not_ours(path, "a Parquet file without an attribute footer") from None


def read_attribute(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """The rows of a file, with all columns or the named ones. Raises as `read_footer`."""
    return _read(path, lambda name: columns is None or name in columns)


def read_values(path: Path) -> pa.Table:
    """The attribute's own columns. Raises as `read_footer`."""
    return _read(path, lambda name: name not in KEYS)


def _read(path: Path, is_wanted: Callable[[str], bool]) -> pa.Table:
    with _opened(path) as file:
        read_footer(path)
        names = [name for name in file.schema_arrow.names if is_wanted(name)]
        try:
            table = file.read(names, use_threads=False)
            table.validate(full=True)  # full validation also checks that texts are UTF-8
            return table
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise _not_ours(path, one_line(error)) from None


def _opened(path: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(regular(path))
    except FileNotFoundError:
        raise _no_file(path) from None
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise _not_ours(path, one_line(error)) from None


def _no_file(path: Path) -> FormatError:
    return FormatError(
        "attribute file is missing",
        where=path,
        do="run `nmoe attributes`",
        code="E-ATTRIBUTE-MISSING",
    )


def with_keys(documents: Documents, rows: pa.Table) -> pa.Table:
    """The rows, with the key columns of attribute files (`doc_id`, `text_sha256`) added."""
    hashes = documents.text_sha256
    if not isinstance(hashes, pa.Array):
        hashes = pa.array(map(bytes.fromhex, hashes), pa.binary(32))
    keys = [pa.array(documents.doc_ids, pa.string()), hashes]
    return pa.Table.from_arrays(
        [*keys, *rows.columns], schema=pa.schema([*_KEY_FIELDS, *rows.schema])
    )


def numbers(table: pa.Table) -> dict[str, np.ndarray]:
    """The numeric columns as float64, without nulls."""
    found: dict[str, np.ndarray] = {}
    for field in table.schema:
        if pa.types.is_integer(field.type) or pa.types.is_floating(field.type):
            column = table.column(field.name).drop_null()
            found[field.name] = column.to_numpy().astype(np.float64)
    return found


def positions(values: pa.Array, among: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Index of the first occurrence of each value in `among`; null if it does not occur."""
    options = pc.SetLookupOptions(value_set=among)
    return pc.call_function("index_in", [values], options)


def rows_digest(table: pa.Table) -> str:
    """The digest that `write_attribute` computes for the same rows."""
    digest = _started(table.schema)
    for first in range(0, table.num_rows, ROWS):
        for column in table.slice(first, ROWS).columns:
            _update(digest, column.combine_chunks())
    return digest.hexdigest()


def find_footer(path: Path) -> Footer | None:
    """Like `read_footer`, but returns None if the file is missing or damaged."""
    try:
        return read_footer(path)
    except FormatError:
        return None


def is_attribute_current(path: Path, fingerprints: Fingerprints) -> bool:
    """Whether the file was made from inputs with exactly these fingerprints."""
    footer = find_footer(path)
    return footer is not None and footer.fingerprints == fingerprints


def stale(name: str, path: Path, found: object, expected: str | None = None) -> FormatError:
    """The error for a file whose documents differ from the shard's current ones."""
    return FormatError(
        f"attribute {name} was made from other documents",
        where=path,
        found=found,
        expected=expected,
        do="run `nmoe attributes`",
        code="E-ATTRIBUTE-STALE",
    )


def _started(schema: pa.Schema) -> Any:
    return hashlib.sha256(repr([(field.name, _spelled(field.type)) for field in schema]).encode())


def _spelled(kind: pa.DataType) -> Any:
    """The text of a type, without the names of list items, which Parquet changes."""
    if pa.types.is_struct(kind):
        return [(field.name, _spelled(field.type)) for field in kind]
    if pa.types.is_map(kind):
        return "map", _spelled(kind.key_type), _spelled(kind.item_type)
    return ("list", _spelled(kind.value_type)) if pa.types.is_nested(kind) else str(kind)


def _not_ours(path: Path, found: str) -> FormatError:
    return FormatError(
        "not an attribute file",
        where=path,
        found=found,
        do="delete the file, then make the attribute again",
        code="E-ATTRIBUTE-FORMAT",
    )


def _row_groups(schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """The rows in groups of `ROWS`; the last group may be smaller."""
    held = schema.empty_table()
    for batch in batches:
        held = pa.concat_tables([held, pa.Table.from_batches([batch], schema)])
        while held.num_rows >= ROWS:
            yield held.slice(0, ROWS)
            held = held.slice(ROWS)
    if held.num_rows:
        yield held


def _update(digest: Any, array: pa.Array) -> None:
    """Add an array's validity bits and the bytes of its non-null values, level by level."""
    kind = array.type
    digest.update(_bits(array.is_valid()))
    array = array.drop_null()
    if pa.types.is_struct(kind):
        for inner in array.flatten():
            _update(digest, inner)
    elif pa.types.is_map(kind):
        _update(digest, array.cast(pa.list_(pa.struct([kind.key_field, kind.item_field]))))
    elif pa.types.is_nested(kind):  # a list
        _update(digest, pa.array(array.value_lengths(), pa.int64()))
        _update(digest, array.flatten())
    elif pa.types.is_boolean(kind):
        digest.update(_bits(array))
    elif len(array):
        digest.update(_bytes(array))


def _bits(array: pa.Array) -> bytes:
    return np.packbits(array.to_numpy(zero_copy_only=False)).tobytes()


def _bytes(array: pa.Array) -> bytes:
    """The bytes of an array of numbers, times, texts or byte strings without nulls, including the
    lengths of texts and byte strings."""
    if pa.types.is_null(array.type):
        return b""
    try:
        width = array.type.bit_width // 8
        data = array.buffers()[1]
    except ValueError:  # texts and byte strings, whose lengths vary
        array = array.cast(pa.large_binary())
        _, places, data = array.buffers()
        ends = np.frombuffer(places, np.int64)[array.offset :][: len(array) + 1]
        return np.diff(ends).tobytes() + data.to_pybytes()[int(ends[0]) : int(ends[-1])]
    return data.to_pybytes()[width * array.offset :][: width * len(array)]
