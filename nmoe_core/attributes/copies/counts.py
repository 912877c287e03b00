"""Counts the copies of each document, as a column of `duplicates`."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nmoe_core.attributes.columns import NUM_COPIES
from nmoe_core.attributes.copies.duplicates import Shard


def with_counts(shards: Sequence[Shard], tables: Sequence[pa.Table]) -> list[pa.Table]:
    """The tables of `resolve` with the column `num_copies`: the number of documents of each group,
    the kept one and all its copies; 1 for a document without copies."""
    kept_of = [
        pc.call_function("coalesce", [table["exact_of"], table["near_of"]]) for table in tables
    ]
    chunks = [chunk for column in kept_of for chunk in column.chunks]
    found = pa.chunked_array(chunks, pa.string()).drop_null().value_counts()
    options = pc.SetLookupOptions(value_set=found.field("values"))
    sizes = found.field("counts").to_numpy()
    counted = []
    for shard, table, kept in zip(shards, tables, kept_of):
        ids = shard.ingest_ids(np.arange(len(table)))
        own = pa.array([f"{shard.source}//{name}" for name in ids], pa.string())
        names = pc.call_function("coalesce", [kept, own])
        places = pc.call_function("index_in", [names], options)
        numbers = np.ones(len(table), np.int32)
        numbers[np.flatnonzero(places.is_valid())] += sizes[places.drop_null().to_numpy()]
        counted.append(table.append_column(NUM_COPIES, pa.array(numbers)))
    return counted


def without_counts(table: pa.Table | None) -> pa.Table | None:
    """A table of an earlier `with_counts` as `resolve` made it."""
    return None if table is None else table.drop_columns(NUM_COPIES.name)
