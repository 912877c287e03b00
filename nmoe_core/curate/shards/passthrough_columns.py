"""Writes the passthrough columns of a curated shard: one row per document, in the new order."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from nmoe_core.base.docid import DocId
from nmoe_core.config.tree import ShardPaths
from nmoe_core.shards.manifest import COLUMNS_NAME
from nmoe_core.shards.writer import ShardWriter


def add_columns(
    writer: ShardWriter,
    shard: ShardPaths,
    parent: Path,
    numbers: np.ndarray,
    documents: Sequence[tuple[int, str]],
) -> dict[str, str]:
    """Write `columns.parquet` beside the files of a writer; return the file's entry for the
    manifest.

    Args:
        writer: Holds all documents of the curated shard.
        shard: The shard in the data tree.
        parent: The file of the parent shard's columns, in the data tree.
        numbers: Row numbers in `parent`, int64, in the new order. These rows become the end of the
            curated shard; the consumed rows before them are copied from the existing curated shard.
        documents: Tokens and text hash of every document of the curated shard.
    """
    import pyarrow as pa

    from nmoe_core.config.attributes import KEYS
    from nmoe_core.shards.attribute_file import Documents, read_attribute
    from nmoe_core.shards.columns import write_columns

    rows = read_attribute(parent).drop_columns(list(KEYS))
    count = len(documents) - len(numbers)
    before = rows.schema.empty_table()
    if count:
        path = shard.curated / COLUMNS_NAME
        known = read_attribute(path).drop_columns(list(KEYS)) if path.is_file() else None
        nulls = {field.name: pa.nulls(count, field.type) for field in rows.schema}
        before = pa.table(nulls, rows.schema)
        if known is not None and known.schema.equals(rows.schema):
            before = known.slice(0, count)
    table = pa.concat_tables([before, rows.take(pa.array(numbers, pa.int64()))])
    doc_ids = []
    lengths = iter(documents)
    for name, num_documents in writer.files:
        rel = f"{shard.source}/train/{shard.name}/{name}"
        start = 0
        for _ in range(num_documents):
            end = start + next(lengths)[0]
            doc_ids.append(str(DocId(shard.source, rel, start, end)))
            start = end
    named = Documents(doc_ids, [digest for _, digest in documents])
    return write_columns(writer.staged, named, rows.schema, table.combine_chunks().to_batches())
