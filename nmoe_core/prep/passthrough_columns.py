"""Passthrough columns of a pass: buffered on disk, then written as one Parquet file per shard.

The type of a column is known only at the end of the source. Until then, the rows of a shard are
consecutive Arrow streams in `.prep/columns/shard_NNNN.arrows`. The journal records the length of
each file, the types so far, and the columns for which no record had a value yet.
"""

import base64
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from loader.files.regular import regular
from loader.files.shard import IndexReader
from nmoe_core.base.docid import DocId
from nmoe_core.base.errors import SourceError
from nmoe_core.config.tree import shard_dir_name
from nmoe_core.shards.documents import read_ids
from nmoe_core.shards.shard_file import StagedFiles
from nmoe_core.sources.file_sources import BLOCK_BYTES
from nmoe_core.sources.passthrough_columns import Kept, as_types, common_types
from nmoe_core.sources.records import Source

_LOG = logging.getLogger(__name__)
_WARN_ROWS = 10_000


class StagedChanges(StagedFiles):
    """What the transforms of a pass changed: one row per document, in Arrow streams, one file per
    shard. `sizes` is empty if there are no transforms."""

    def __init__(self, directory: Path, sizes: dict[int, int]) -> None:
        super().__init__(directory / "changes", ".arrows", sizes)

    @property
    def state(self) -> dict[str, int]:
        """The state to record in the journal: bytes of each shard's file."""
        return {str(bucket): size for bucket, size in self.sizes.items()}

    def add(self, bucket: int, rows: Any) -> None:
        """Append the rows of documents, a record batch or a table."""
        self.append(bucket, _stream(rows))


class ShardColumns(NamedTuple):
    """Inputs for a worker that writes the Parquet files of a shard."""

    directory: Path
    """Directory of the shard, in which the new files are written."""
    rel: str
    """Path of the shard relative to the data root."""
    stems: tuple[str, ...]
    columns: Path | None
    """File with Arrow streams of the passthrough columns, if there are any."""
    types: bytes
    changes: Path | None
    """File with Arrow streams of what transforms changed, if there are any."""


class PassthroughColumns(StagedFiles):
    """The passthrough columns (possibly none) of a pass over the shards `buckets`. Files are below
    `directory`; `state` is the state of an earlier pass to resume.

    Raises:
        FormatError: A file is shorter than its state says (E-PREP-JOURNAL).
    """

    def __init__(
        self, source: Source, directory: Path, buckets: tuple[int, ...], state: Any = None
    ) -> None:
        self.source = source
        sizes = dict.fromkeys(buckets if source.reading.kept else (), 0)
        self.types = None
        self.absent = set(source.reading.kept)
        self._is_warned = False
        if state is not None:
            sizes = {bucket: state["sizes"][str(bucket)] for bucket in sizes}
            self.absent = set(state["absent"])
            self.types = _read_types(state["types"])
        super().__init__(directory / "columns", ".arrows", sizes)

    @property
    def state(self) -> dict[str, Any]:
        """The state to record in the journal."""
        types = None if self.types is None else self.types.serialize().to_pybytes()
        return {
            "sizes": {str(bucket): size for bucket, size in self.sizes.items()},
            "absent": sorted(self.absent),
            "types": None if types is None else base64.b64encode(types).decode(),
        }

    def see(self, kept: Kept | None, num_rows: int) -> None:
        """Merge the types of a block; `num_rows` is the number of rows read so far."""
        if kept is None:
            return
        self.types = common_types(self.types, kept.types, self.source.reading.source)
        self.absent &= kept.absent
        if self.absent and num_rows >= _WARN_ROWS and not self._is_warned:
            self._is_warned = True
            _LOG.warning("%s; the pass will fail if no later record has it", self._absence())

    def add(self, bucket: int, kept: Kept | None, first: int, last: int) -> None:
        """Append rows `first` to `last` of a block to a shard."""
        if kept is None:
            return
        self.append(bucket, _stream(kept.rows.slice(first, last - first)))

    def require_all(self) -> None:
        """Raise SourceError if a requested column is in no record (E-SOURCE-FIELD)."""
        if self.absent:
            raise SourceError(
                "no record has a requested column",
                where=self.source.reading.source,
                found=", ".join(self.source.field_names()),
                expected=", ".join(sorted(self.absent)),
                do="correct the columns of [attributes], or set columns for this source",
                code="E-SOURCE-FIELD",
            )

    def jobs(
        self, rel: str, shards: Mapping[int, list[Path]], changes: StagedFiles
    ) -> Iterator[ShardColumns]:
        """The jobs that write the Parquet files of the columns and of the `changes`. `rel` is the
        path of the split relative to the data root, `shards` the file paths of each shard."""
        self.suspend()
        changes.suspend()
        if not self.sizes and not changes.sizes:
            return
        types = b""
        if self.sizes:
            types = _final(self.source.reading.kept, self.types).serialize().to_pybytes()
        for bucket, paths in shards.items():
            name = shard_dir_name(bucket)
            stems = tuple(path.stem for path in paths if path.suffix == ".idx")
            directory = self.directory.parent / name
            staged = (one.path(bucket) if one.sizes else None for one in (self, changes))
            columns, changed = staged
            yield ShardColumns(directory, f"{rel}/{name}", stems, columns, types, changed)

    def _absence(self) -> str:
        names = ", ".join(sorted(self.absent))
        return f"{self.source.reading.source}: no record has column {names} so far"


def seal_columns(worker: object, job: ShardColumns) -> dict[str, Any]:
    """Write the Parquet files of a shard; return their entries for the manifest."""
    import pyarrow as pa

    from nmoe_core.shards.attribute_file import Documents
    from nmoe_core.shards.changes import write_changes
    from nmoe_core.shards.columns import write_columns

    doc_ids = []
    digests = []
    for stem in job.stems:
        rel = f"{job.rel}/{stem}.npy"
        spans = IndexReader(job.directory / f"{stem}.idx").to_array().tolist()
        doc_ids += [str(DocId(rel.split("/")[0], rel, *span)) for span in spans]
        digests += [digest for _, digest in read_ids(job.directory / f"{stem}.ids.jsonl")]
    documents = Documents(doc_ids, digests)
    found = {}
    if job.columns is not None:
        types = pa.ipc.read_schema(pa.py_buffer(job.types))
        batches = (as_types(rows, types) for rows in _rows(job.columns))
        found |= write_columns(job.directory, documents, types, batches)
    if job.changes is not None:
        found |= write_changes(job.directory, documents, _rows(job.changes))
    return found


def _stream(rows: Any) -> memoryview:
    """An Arrow stream of the rows."""
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as stream:
        stream.write(rows)
    return memoryview(sink.getvalue())


def _final(names: tuple[str, ...], types: Any) -> Any:
    """The types of all columns, in order; null for a column without values."""
    import pyarrow as pa

    known = {} if types is None else {field.name: field.type for field in types}
    return pa.schema([(name, known.get(name, pa.null())) for name in names])


def _rows(path: Path) -> Iterator[Any]:
    """The rows of the consecutive streams in a file, about one block at a time, because each batch
    has a fixed cost."""
    import pyarrow as pa

    held = []
    num_bytes = 0
    for rows in _streamed(path):
        if held and (num_bytes > BLOCK_BYTES or not held[0].schema.equals(rows.schema, True)):
            yield from pa.Table.from_batches(held).combine_chunks().to_batches()
            held = []
            num_bytes = 0
        held.append(rows)
        num_bytes += rows.nbytes
    if held:
        yield from pa.Table.from_batches(held).combine_chunks().to_batches()


def _streamed(path: Path) -> Iterator[Any]:
    import pyarrow as pa

    with pa.memory_map(regular(str(path))) if path.stat().st_size else pa.BufferReader(b"") as file:
        while file.tell() < file.size():
            yield from pa.ipc.open_stream(file)


def _read_types(text: str | None) -> Any:
    import pyarrow as pa

    return None if text is None else pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text)))
