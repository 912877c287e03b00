"""The documents of a plan by name and by group, and tables with one row per document."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from loader.files.format import resolve_inside
from loader.rows.documents import DocumentFile, DocumentTable
from nmoe_core.base.atomic import atomic_file
from nmoe_core.shards.documents import ids_of_file

_ROWS = 1 << 16


class Groups(NamedTuple):
    """Groups of documents. by: the column that they share. names: of the groups. codes: the group
    of each document, per source: int32 `[num_documents]`."""

    by: str
    names: list[str]
    codes: list[np.ndarray]


def by_source(table: DocumentTable) -> Groups:
    """One group per source."""
    names = list(table.stream.source_names)
    sizes = [len(table.edges(source)) - 1 for source in range(len(names))]
    return Groups("source", names, [np.full(n, i, np.int32) for i, n in enumerate(sizes)])


def ids_of(table: DocumentTable, file: DocumentFile) -> list[tuple[str, str]] | None:
    """Ingest id and text hash of each document of a token file; None if other tools wrote the
    file, without ids. Raises FormatError if the ids are damaged (E-SHARD-IDS)."""
    manifest, entry = table.stream.index.entries[file.number]
    name = entry.extra.get("ids_path")
    if not isinstance(name, str):
        return None
    return ids_of_file(resolve_inside(manifest.path.parent, name), file.stop - file.first)


def named(table: DocumentTable, documents: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
    """Source, ingest id, file (relative to the manifest), start and end of some documents, each
    given by source and number. Reads the ids of their files."""
    known: dict[int, list[tuple[str, str]] | None] = {}
    found = []
    for source, document in documents:
        file = next(f for f in table.files(source) if f.first <= document < f.stop)
        if file.number not in known:
            known[file.number] = ids_of(table, file)
        ids = known[file.number]
        start, end = _spans(table, source, file)[document - file.first].tolist()
        found.append(
            {
                "source": table.stream.source_names[source],
                "ingest_id": None if ids is None else ids[document - file.first][0],
                "file": path_of(table, file),
                "start": start,
                "end": end,
            }
        )
    return found


def path_of(table: DocumentTable, file: DocumentFile) -> str:
    """The path of a token file, relative to the directory of its source's manifest."""
    manifest, entry = table.stream.index.entries[file.number]
    return Path(os.path.relpath(manifest.shard_path(entry), manifest.path.parent)).as_posix()


def write_documents(
    output: Path,
    table: DocumentTable,
    columns: Sequence[Mapping[str, np.ndarray]],
    groups: Groups | None = None,
) -> None:
    """Write a Parquet file with one row per document of the plan: source, file, start and end of
    its tokens in the file, ingest id, the columns of its source (in `columns`, one mapping per
    source; a step of -1 and NaN become null), and its group unless this is the source. Raises as
    `ids_of`."""
    import pyarrow.parquet as pq

    output.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(output) as stream:
        writer = None
        for batch in _batches(table, columns, groups):
            writer = writer or pq.ParquetWriter(stream, batch.schema, compression="zstd")
            writer.write_table(batch)
        if writer is not None:
            writer.close()


def _batches(
    table: DocumentTable, columns: Sequence[Mapping[str, np.ndarray]], groups: Groups | None
) -> Iterator[Any]:
    import pyarrow as pa

    for source, name in enumerate(table.stream.source_names):
        for file in table.files(source):
            ids = ids_of(table, file)
            spans = _spans(table, source, file)
            path = path_of(table, file)
            for first in range(file.first, file.stop, _ROWS):
                rows = slice(first, min(first + _ROWS, file.stop))
                inside = slice(rows.start - file.first, rows.stop - file.first)
                count = rows.stop - rows.start
                own_ids = [None] * count if ids is None else [one for one, _ in ids[inside]]
                found = {
                    "source": pa.repeat(name, count),
                    "file": pa.repeat(path, count),
                    "start": pa.array(spans[inside, 0]),
                    "end": pa.array(spans[inside, 1]),
                    "ingest_id": pa.array(own_ids, pa.string()),
                }
                for key, values in columns[source].items():
                    part = values[rows]
                    is_null = part < 0 if key.endswith("_step") else part != part
                    found[key] = pa.array(part, mask=is_null)
                if groups is not None and groups.by != "source":
                    own = pa.array(groups.names).take(pa.array(groups.codes[source][rows]))
                    found[f"group {groups.by}"] = own
                yield pa.table(found)


def _spans(table: DocumentTable, source: int, file: DocumentFile) -> np.ndarray:
    """Start and end of each document of a file in the file: int64 `[num_documents, 2]`."""
    edges = table.edges(source)[file.first : file.stop + 1]
    edges = edges - table.stream.index.file_starts[file.number]
    return np.stack([edges[:-1], edges[1:]], axis=1)
