"""Source kind `arrow`: rows of Arrow IPC files and streams (what `datasets` caches are made of).

One record batch is held at a time and only its text and id columns are decoded; a local file is
memory-mapped. A run goes on at a record batch; the batches of a stream before it are passed over
unread where the file is mapped. A file that cannot be read to its end is an error that names it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nmoe_core.base.errors import SourceError
from nmoe_core.sources.columns import ColumnsBlock, Origin, check_fields, cut_batch
from nmoe_core.sources.files import RecordFileSource
from nmoe_core.sources.parquet import arrow_errors
from nmoe_core.sources.records import Position
from nmoe_core.sources.storage import SourceFile

_FILE_MAGIC = b"ARROW1"
_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"


class ArrowSource(RecordFileSource[ColumnsBlock]):
    """Rows of Arrow files, IPC files or IPC streams, as documents."""

    needs_pyarrow = True

    def check(self) -> None:
        """Read the first file's schema and check its fields."""
        for file in self.files[:1]:
            next(self._batches(file), None)

    def num_rows(self) -> int:
        """Number of rows; passes over the batches of every file."""
        return sum(batch.num_rows for file in self.files for batch, _ in self._batches(file))

    def _file_blocks(self, file: SourceFile, start: Position) -> Iterator[ColumnsBlock]:
        """`Position.offset` counts record batches, `line` the rows of the file."""
        origin = Origin(file.where, f"{self.name}/{file.name}")
        line, row = 0, start.row - start.line
        for number, (batch, size_bytes) in enumerate(self._batches(file)):
            if number < start.offset:
                line, row = line + len(batch), row + len(batch)
                continue
            first_line, num_rows = line, len(batch)
            for columns in self._pieces(file, batch):
                if columns.nbytes > self.max_record_bytes:  # of one row, then
                    raise self.too_long(f"{file.where}: row {line}")
                here = Position(start.file, number, line, row)
                line, row = line + len(columns), row + len(columns)
                is_last = line == first_line + num_rows
                end = Position(start.file, number + is_last, line, row)
                if line > start.line:
                    share = size_bytes * len(columns) // num_rows
                    yield ColumnsBlock(
                        origin, columns, here, end, share, self.fields, self.on_error
                    )

    def _pieces(self, file: SourceFile, batch: Any) -> Iterator[Any]:
        with arrow_errors(file, "Arrow"):
            yield from cut_batch(batch, self.fields)

    def _batches(self, file: SourceFile) -> Iterator[tuple[Any, int]]:
        """All record batches, each with its share of the file's bytes."""
        import pyarrow as pa

        with _opened(file) as stream, arrow_errors(file, "Arrow"):
            is_file = stream.read(len(_FILE_MAGIC)) == _FILE_MAGIC
            if not is_file:
                _require_end(stream, file)
            stream.seek(0)
            schema = (pa.ipc.open_file(stream) if is_file else pa.ipc.open_stream(stream)).schema
            check_fields(schema, self.fields, file.where)
            names = [name for name in self.fields if name is not None]
            options = pa.ipc.IpcReadOptions(
                included_fields=[schema.get_field_index(name) for name in names], use_threads=False
            )
            stream.seek(0)
            if is_file:
                reader = pa.ipc.open_file(stream, options=options)
                for i in range(reader.num_record_batches):
                    yield reader.get_batch(i), file.size_bytes() // reader.num_record_batches
            else:
                last = 0
                for batch in pa.ipc.open_stream(stream, options=options):
                    yield batch, stream.tell() - last
                    last = stream.tell()


def _require_end(stream: Any, file: SourceFile) -> None:
    """Refuse a stream without its end marker: cut at a batch, it would read as a shorter one."""
    stream.seek(max(0, file.size_bytes() - len(_END_OF_STREAM)))
    if stream.read(len(_END_OF_STREAM)) != _END_OF_STREAM:
        raise SourceError(
            "Arrow stream has no end marker, so rows may be missing",
            where=file.where,
            do="write the file again, or leave it out with `exclude`",
            code="E-SOURCE-TORN",
        )


@contextmanager
def _opened(file: SourceFile) -> Iterator[Any]:
    import pyarrow as pa

    if not file.is_local:
        with file.open() as stream:
            yield stream
        return
    if not file.size_bytes():
        raise SourceError("file is empty", where=file.where, code="E-SOURCE-TORN")
    with file.open():  # refuses a missing file in the words of every source
        mapped = pa.memory_map(str(file.path))
    try:
        yield mapped
    finally:
        mapped.close()
