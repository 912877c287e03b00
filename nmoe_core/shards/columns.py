"""The passthrough columns of committed shards: `columns.parquet` in each shard's directory."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from loader.files.format import Manifest
from loader.files.regular import regular
from nmoe_core.base.atomic import atomic_file
from nmoe_core.base.errors import ConfigError
from nmoe_core.config.attributes import KEYS
from nmoe_core.shards.attribute_file import Documents, read_attribute, write_attribute
from nmoe_core.shards.manifest import COLUMNS_NAME, column_files, first_documents
from nmoe_core.shards.shard_file import seal_file
from nmoe_core.sources.passthrough_columns import plain

_EXAMPLE_CHARS = 40


def column_facts(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Name, type, number of missing values and an example value of each column of these files."""
    tables = [read_attribute(path).drop_columns(list(KEYS)) for path in paths]
    if not tables:
        return []
    table = pa.concat_tables(tables)
    return [
        {
            "column": field.name,
            "type": str(field.type),
            "missing": table.column(i).null_count,
            "documents": table.num_rows,
            "example": _example(table.column(i)),
        }
        for i, field in enumerate(table.schema)
    ]


def write_columns(
    directory: Path, documents: Documents, schema: pa.Schema, batches: Iterable[pa.RecordBatch]
) -> dict[str, str]:
    """Write the columns of a shard's documents; return the file's fields in the manifest."""
    path = directory / COLUMNS_NAME
    digest = write_attribute(path, "columns", {}, documents, schema, batches)
    return {
        "columns_path": COLUMNS_NAME,
        "columns_checksum": seal_file(path),
        "columns_digest": digest,
    }


def copy_columns(manifest: Manifest, ingest_ids: Iterator[str], out: Path) -> None:
    """Concatenate the rows of a manifest's documents into one file, with the ingest id of each
    document as the last column, `ingest_id`."""
    paths = [*column_files(manifest)]
    schema = pq.read_schema(regular(paths[0])).remove_metadata()
    with (
        atomic_file(out) as file,
        pq.ParquetWriter(
            file, schema.append(pa.field("ingest_id", pa.string())), compression="zstd"
        ) as writer,
    ):
        for path in paths:
            rows = read_attribute(path).take(_numbers(manifest, path))
            ids = pa.array(islice(ingest_ids, rows.num_rows), pa.string())
            writer.write_table(rows.append_column("ingest_id", ids))


def _numbers(manifest: Manifest, path: Path) -> list[int]:
    """Numbers of the rows of a shard's file of columns that belong to documents of the manifest."""
    found: list[int] = []
    for entry, first in zip(manifest.shards, first_documents(manifest)):
        if manifest.shard_path(entry).parent == path.parent:
            found += range(first, first + entry.num_documents)
    return found


def column_values(manifest: Manifest, names: Sequence[str]) -> dict[str, list[Any]]:
    """The values of passthrough columns of a shard's documents, by name. Raises ConfigError if the
    source does not keep a column (E-CONFIG-KEY)."""
    tables = [read_attribute(path) for path in column_files(manifest)]
    known = {name for table in tables for name in table.column_names} - {*KEYS}
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(
            "a function reads a column that is not kept",
            where=manifest.path.parent,
            found=unknown[0],
            expected=", ".join(sorted(known)) or "no columns",
            do="add it to the columns of [attributes] or of the source",
            code="E-CONFIG-KEY",
        )
    (table,) = tables
    return {name: [*map(plain, table.column(name).to_pylist())] for name in names}


def values_of(path: Path, number: int) -> dict[str, Any]:
    """The values of one document, by its number in the shard."""
    row = read_attribute(path).slice(number, 1)
    return {name: row.column(name)[0].as_py() for name in row.schema.names if name not in KEYS}


def _example(values: pa.ChunkedArray) -> str | None:
    known = values.drop_null()
    if not len(known):
        return None
    text = str(known[0].as_py())
    return text if len(text) <= _EXAMPLE_CHARS else text[: _EXAMPLE_CHARS - 3] + "..."
