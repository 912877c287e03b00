"""The documents that a plan reads, grouped by any column that `nmoe sql` knows.

Numbers with many values are cut at the quartiles of the documents. A document gets the values of
the document of the data tree with the same ingest id: of a document that the run read in an earlier
version, these are the values of today.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from loader.plan.tables import unknown_name
from loader.rows.documents import DocumentFile, DocumentTable
from nmoe_core.attributes.where import spellings
from nmoe_core.audit.readings.names import Groups, by_source, ids_of
from nmoe_core.base.errors import ConfigError, FormatError
from nmoe_core.config.run import Run
from nmoe_core.config.tree import ShardPaths
from nmoe_core.prep.mixture import run_sources
from nmoe_core.tasks.selection.view import read_columns, run_schema

NONE = "(none)"
MOST_VALUES = 20
MOST_NAMES = 1000
_ID = "documents.ingest_id"


def by_column(run: Run, table: DocumentTable, column: str) -> Groups:
    """The groups of a column, named as in `nmoe sql`; `source` works without any column.

    Raises:
        ConfigError: The column is unknown, holds lists, or has more than `MOST_NAMES` texts.
        FormatError: The plan reads files without ids or outside the run's shards (E-SHARD-IDS,
            E-DOCID), or an attribute is missing or stale (E-ATTRIBUTE-...).
    """
    if column == "source":
        return by_source(table)
    schema: dict[str, pa.DataType] = {}
    for source in run_sources(run):
        schema |= {**run_schema(run, source.name), **schema}
    labels = spellings({label: label for label in schema})
    if column not in labels:
        raise unknown_name("column", column, labels, "--by")
    label = labels[column]
    wanted = list(dict.fromkeys([_ID, label]))
    read = lru_cache(1)(partial(read_columns, run, schema=schema, labels=wanted))
    parts = [
        [_values(run, table, file, read).column(label) for file in table.files(source)]
        for source in range(len(table.stream.source_names))
    ]
    sizes = [sum(map(len, own)) for own in parts]
    # A source may lack the column: its values are then null, of the type that others have.
    kinds = {part.type for own in parts for part in own if not pa.types.is_null(part.type)}
    kind = next(iter(kinds), pa.null())
    if len(kinds) > 1 or pa.types.is_nested(kind):
        found = ", ".join(sorted(map(str, kinds)))
        raise ConfigError("no groups of this type", where=f"--by {column}", found=found)
    chunks = [chunk for own in parts for part in own for chunk in part.cast(kind).chunks]
    every = pa.chunked_array(chunks, kind)
    names, codes = _named(every, column)
    return Groups(column, names, np.split(codes, np.cumsum(sizes)[:-1]))


def _values(
    run: Run, table: DocumentTable, file: DocumentFile, read: Callable[[ShardPaths], pa.Table]
) -> pa.Table:
    """The values of the documents of a token file."""
    ids = ids_of(table, file)
    manifest, entry = table.stream.index.entries[file.number]
    path = manifest.shard_path(entry)
    if ids is None:
        raise FormatError(
            "documents without ids have no columns",
            where=path,
            do="leave out --by, or prepare the source with this project",
            code="E-SHARD-IDS",
        )
    rows = read(run.tree.shard_of(Path(*path.parts[-4:]).as_posix()))
    own = pa.array([one for one, _ in ids], pa.string())
    return rows.take(_places(own, rows.column(_ID)))


def _places(values: pa.Array | pa.ChunkedArray, among: pa.Array | pa.ChunkedArray) -> pa.Array:
    """The place of each value among others, null if it is not there: int32 `[n]`."""
    known = among.combine_chunks() if isinstance(among, pa.ChunkedArray) else among
    found = pc.call_function("index_in", [values], pc.SetLookupOptions(value_set=known))
    return found.combine_chunks() if isinstance(found, pa.ChunkedArray) else found


def _named(values: pa.ChunkedArray, column: str) -> tuple[list[str], np.ndarray]:
    """Names of the groups, and the group of each value: int32 `[n]`."""
    distinct = values.unique().drop_null()
    is_number = pa.types.is_integer(values.type) or pa.types.is_floating(values.type)
    if is_number and len(distinct) > MOST_VALUES:
        return _quartiles(values.cast(pa.float64()).to_numpy())
    if len(distinct) > MOST_NAMES:
        raise ConfigError(
            "too many values to group by",
            where=f"--by {column}",
            found=f"{len(distinct):,} values",
            expected=f"at most {MOST_NAMES:,}",
        )
    distinct = distinct.sort()
    codes = _places(values, distinct).fill_null(len(distinct)).to_numpy()
    names = [str(value) for value in distinct.to_pylist()]
    return [*names, NONE][: int(codes.max(initial=0)) + 1], codes


def _quartiles(values: np.ndarray) -> tuple[list[str], np.ndarray]:
    is_known = ~np.isnan(values)
    edges = np.unique(np.quantile(values[is_known], [0.25, 0.5, 0.75]))
    codes = np.where(is_known, np.searchsorted(edges, values, "right"), len(edges) + 1)
    shown = [f"{edge:.4g}" for edge in edges]
    inner = [f"{low} to {high}" for low, high in pairwise(shown)]
    names = [f"below {shown[0]}", *inner, f"{shown[-1]} or more", NONE]
    return names[: int(codes.max(initial=0)) + 1], codes.astype(np.int32)
