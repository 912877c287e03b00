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


class ShardColumns(NamedTuple):
    """Inputs for a worker that writes the Parquet file of a shard."""

    staged: Path
    """File with Arrow streams of the shard's rows."""
    directory: Path
    """Directory of the shard, in which the new file is written."""
    rel: str
    """Path of the shard relative to the data root."""
    stems: tuple[str, ...]
    types: bytes


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
        import pyarrow as pa

        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, kept.rows.schema) as stream:
            stream.write_batch(kept.rows.slice(first, last - first))
        self.append(bucket, memoryview(sink.getvalue()))

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

    def jobs(self, rel: str, shards: Mapping[int, list[Path]]) -> Iterator[ShardColumns]:
        """The jobs that write the Parquet files. `rel` is the path of the split relative to the
        data root, `shards` the file paths of each shard."""
        self.suspend()
        if not self.sizes:
            return
        types = _final(self.source.reading.kept, self.types).serialize().to_pybytes()
        for bucket, paths in shards.items():
            name = shard_dir_name(bucket)
            stems = tuple(path.stem for path in paths if path.suffix == ".idx")
            directory = self.directory.parent / name
            yield ShardColumns(self.path(bucket), directory, f"{rel}/{name}", stems, types)

    def _absence(self) -> str:
        names = ", ".join(sorted(self.absent))
        return f"{self.source.reading.source}: no record has column {names} so far"


def seal_columns(worker: object, job: ShardColumns) -> dict[str, str]:
    """Write the Parquet file of a shard; return its entry for the manifest."""
    import pyarrow as pa

    from nmoe_core.shards.attribute_file import Documents
    from nmoe_core.shards.columns import write_columns

    doc_ids = []
    digests = []
    for stem in job.stems:
        rel = f"{job.rel}/{stem}.npy"
        spans = IndexReader(job.directory / f"{stem}.idx").to_array().tolist()
        doc_ids += [str(DocId(rel.split("/")[0], rel, *span)) for span in spans]
        digests += [digest for _, digest in read_ids(job.directory / f"{stem}.ids.jsonl")]
    types = pa.ipc.read_schema(pa.py_buffer(job.types))
    batches = (as_types(rows, types) for rows in _rows(job.staged))
    return write_columns(job.directory, Documents(doc_ids, digests), types, batches)


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
