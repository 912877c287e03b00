"""What transforms changed in the documents of a shard: `changes.parquet` in its directory.

The file has one row per document. It holds removed text, such as addresses and keys, so no manifest
names it as a file of the shard: it is never curated, exported or published. The manifest has the
digest of its rows, and totals.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from loader.files.format import Manifest
from nmoe_core.base.errors import FormatError
from nmoe_core.shards.attribute_file import Documents, read_attribute, rows_digest, write_attribute
from nmoe_core.shards.manifest import CHANGES_NAME
from nmoe_core.text.transforms.chain import Changed
from nmoe_core.text.transforms.edits import Change

_CHANGE = pa.struct(
    [
        ("step", pa.int16()),
        ("transform", pa.string()),
        ("rule", pa.string()),
        ("start", pa.int64()),
        ("end", pa.int64()),
        ("removed", pa.string()),
        ("replacement", pa.string()),
    ]
)
SCHEMA = pa.schema(
    [
        ("chars_removed", pa.int64()),
        ("original_sha256", pa.binary(32)),
        ("changes", pa.list_(_CHANGE)),
    ]
)


def as_rows(found: Sequence[Changed | None]) -> pa.RecordBatch:
    """The rows of documents in the order of `found`; None for a document without changes."""
    removed = [0 if one is None else one.chars_removed for one in found]
    originals = [None if one is None else one.original_sha256 for one in found]
    changes = [[] if one is None else one.changes for one in found]
    return pa.RecordBatch.from_arrays(
        [
            pa.array(removed, pa.int64()),
            pa.array(originals, pa.binary(32)),
            pa.array(changes, pa.list_(_CHANGE)),
        ],
        schema=SCHEMA,
    )


def write_changes(
    directory: Path, documents: Documents, batches: Iterable[pa.RecordBatch]
) -> dict[str, Any]:
    """Write the file of a shard; return its fields in the manifest: the digest of its rows, and
    the totals of each transform and rule."""
    totals: dict[str, dict[str, int]] = {}
    counted = (_counted(rows, totals) for rows in batches)
    digest = write_attribute(directory / CHANGES_NAME, "changes", {}, documents, SCHEMA, counted)
    return {"changes_digest": digest, "changes": dict(sorted(totals.items()))}


def read_changes(directory: Path) -> pa.Table:
    """The rows of a shard, with columns as in `SCHEMA`."""
    return read_attribute(directory / CHANGES_NAME, SCHEMA.names).select(SCHEMA.names)


def changed_of(rows: pa.Table, number: int) -> Changed | None:
    """What was done to one document, by its row; None if nothing was."""
    sha256, removed, changes = (rows.column(name)[number].as_py() for name in _NAMES)
    if sha256 is None:
        return None
    return Changed(sha256, removed, [Change(**change) for change in changes])


_NAMES = ("original_sha256", "chars_removed", "changes")


def undamaged_changes(manifest: Manifest) -> pa.Table | None:
    """The rows of a shard, as `read_changes`; None if they are not those that its manifest
    names."""
    try:
        rows = read_attribute(manifest.path.parent / CHANGES_NAME)
    except FormatError:
        return None
    named = manifest.extra.get("source_info", {}).get("changes_digest")
    return rows.select(SCHEMA.names) if rows_digest(rows) == named else None


def _counted(rows: pa.RecordBatch, totals: dict[str, dict[str, int]]) -> pa.RecordBatch:
    """The rows; adds them to the totals by `transform/rule`."""
    column = rows.column("changes")
    changes = column.flatten()
    columns = {name: changes.field(name) for name in ("transform", "rule")}
    places = [changes.field("end"), changes.field("start")]
    columns["chars"] = pc.call_function("subtract", places)
    columns["document"] = pc.call_function("list_parent_indices", [column])
    counted = pa.table(columns).group_by(["transform", "rule"], use_threads=False)
    asked = [("document", "count_distinct"), ("document", "count"), ("chars", "sum")]
    for row in counted.aggregate(asked).to_pylist():
        name = f"{row['transform']}/{row['rule']}"
        of_rule = totals.setdefault(name, {"documents": 0, "spans": 0, "chars": 0})
        of_rule["documents"] += row["document_count_distinct"]
        of_rule["spans"] += row["document_count"]
        of_rule["chars"] += row["chars_sum"]
    return rows
