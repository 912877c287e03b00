"""Source kinds `parquet` and `arrow`: rows of local or remote files.

Only text, id and passthrough columns are decoded, one row group or record batch at a time, so
memory does not depend on the size of a file. Arrow files are IPC files and streams (the format of
`datasets` caches and of Feather); local ones are memory-mapped. A run resumes at a row group or
batch, without reading earlier ones. A file that cannot be read to its end is an error that names
it.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any, ClassVar

from loader.files.regular import regular
from nmoe_core.base.errors import SourceError, one_line
from nmoe_core.sources.file_sources import FileSource
from nmoe_core.sources.forms.columns import (
    BLOCK_BYTES,
    MAX_BLOCK_ROWS,
    ColumnsBlock,
    Group,
    Place,
    batch_samples,
    check_fields,
    column_blocks,
    cut_batch,
    find_field,
    longest_shared,
)
from nmoe_core.sources.records import SAMPLED_RECORDS, Position, Reading, Sample
from nmoe_core.sources.storage import SourceFile

_FILE_MAGIC = b"ARROW1"
_OLD_MAGIC = b"FEA1"
# if a row group might need more batches than this, read its dictionary to learn how many rows fit a
# batch
_MANY_BATCHES = 1000
_MAX_GROWTH = 1000  # maximum ratio of decoded bytes to file bytes; gzip reaches about as much
_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"


class _ColumnsSource(FileSource[ColumnsBlock]):
    """Files of rows; the text column may have text or bytes. Raises SourceError if pyarrow is not
    installed (E-SOURCE-EXTRA)."""

    format: ClassVar[str]

    def __init__(self, reading: Reading, files: Sequence[SourceFile]) -> None:
        super().__init__(reading, files)
        try:
            import pyarrow  # noqa: F401
        except ImportError as error:
            raise SourceError(
                "reading Parquet and Arrow files needs the `pyarrow` package",
                where=reading.source,
                do="pip install 'nmoe-data[parquet]'",
                code="E-SOURCE-EXTRA",
            ) from error

    def check(self) -> None:
        """Read the first file's schema and check its fields."""
        for file in self.files[:1]:
            next(self._groups(file, 0), None)

    def file_samples(self, file: SourceFile) -> Iterator[Sample]:
        """The first rows of a file."""
        with self._errors(file):
            for batch in islice(self._first_batches(file), 1):
                yield from batch_samples(batch)

    def num_rows(self) -> int:
        """Number of rows, without decoding them."""
        return sum(group.num_rows for file in self.files for group in self._groups(file, 0))

    def batches(self) -> Iterator[Any]:
        """Record batches with all columns."""
        for file in self.files:
            with self._errors(file):
                yield from self._first_batches(file)

    def _file_blocks(self, file: SourceFile, start: Position) -> Iterator[ColumnsBlock]:
        """`Position.offset` counts row groups or record batches, `line` counts rows of the file."""
        place = Place(file.where, f"{self.reading.source}/{file.name}")
        most = _MAX_GROWTH * file.size_bytes() + 4 * self.reading.max_record_bytes
        for block in column_blocks(self.reading, place, self._groups(file, start.offset), start):
            most -= block.columns.nbytes
            if most < 0:
                raise SourceError(
                    f"decoded rows are more than {_MAX_GROWTH} times as large as their file",
                    where=f"{file.where}: row {block.start.line}",
                    do="leave the file out with `exclude`, or write it again without a dictionary",
                    code="E-SOURCE-RECORD",
                )
            yield block

    def _groups(self, file: SourceFile, first: int) -> Iterator[Group]:
        """The groups of a file, from group `first` on."""
        raise NotImplementedError

    def _first_batches(self, file: SourceFile) -> Iterator[Any]:
        """Record batches with all columns; the first batch has rows."""
        raise NotImplementedError

    def _pieces(self, file: SourceFile, lines: range, batches: Iterable[Any]) -> Iterator[Any]:
        line = lines.start
        with self._errors(file):
            for batch in batches:
                for columns in cut_batch(batch, self.reading):
                    # a batch of this size has only one row
                    if columns.nbytes > self.reading.max_record_bytes:
                        raise self.reading.too_long(f"{file.where}: row {line}")
                    line += len(columns)
                    yield columns
        if line != lines.stop:
            raise self._torn(file, f"a row group ends at row {line} instead of {lines.stop}")

    @contextmanager
    def _errors(self, file: SourceFile) -> Iterator[None]:
        """Convert pyarrow's errors about the content of a file to SourceError (E-SOURCE-TORN)."""
        from pyarrow.lib import ArrowException

        try:
            yield
        except (ArrowException, OSError, ValueError, EOFError) as error:
            raise self._torn(file, one_line(error)) from error

    def _torn(self, file: SourceFile, cause: str) -> SourceError:
        return SourceError(
            f"incomplete or damaged {self.format} file: {cause}",
            where=file.where,
            do="restore the file, or leave it out with `exclude`",
            code="E-SOURCE-TORN",
        )


class ParquetSource(_ColumnsSource):
    """Rows of Parquet files as documents."""

    format = "Parquet"

    def _groups(self, file: SourceFile, first: int) -> Iterator[Group]:
        import pyarrow.parquet as pq

        with file.open() as stream, self._errors(file):
            parquet = pq.ParquetFile(stream, page_checksum_verification=True)
            groups = [parquet.metadata.row_group(i) for i in range(parquet.num_row_groups)]
            counts = [group.num_rows for group in groups]
            total = parquet.metadata.num_rows
            if any(count < 0 for count in counts) or sum(counts) != total:
                raise self._torn(
                    file, "the rows of all row groups do not add up to the file's number of rows"
                )
            check_fields(parquet.schema_arrow, self.reading, file.where)
            leaves = (parquet.schema.column(i).path for i in range(len(parquet.schema)))
            names = [path for path in leaves if path in self.reading.columns]
            probe = pq.ParquetFile(stream, read_dictionary=names, buffer_size=BLOCK_BYTES)
            line = sum(counts[:first])
            file_bytes = file.size_bytes()
            for number, group in enumerate(groups[first:], first):
                lines = range(line, line + group.num_rows)
                share = file_bytes * group.num_rows // max(total, 1)
                pieces = self._pieces(file, lines, self._batches(parquet, probe, number))
                yield Group(number, number + 1, line, group.num_rows, share, pieces)
                line = lines.stop

    def _first_batches(self, file: SourceFile) -> Iterator[Any]:
        import pyarrow.parquet as pq

        with file.open() as stream:
            rows = pq.ParquetFile(stream).iter_batches(1, use_threads=False)
            yield from _joined(rows, SAMPLED_RECORDS)

    def _batches(self, parquet: Any, probe: Any, number: int) -> Iterator[Any]:
        """The batches of a row group. The rows of a batch together fit the limit of one record,
        because all rows may refer to one value that is stored once."""
        group = parquet.metadata.row_group(number)
        limit = self.reading.max_record_bytes
        which = {"row_groups": [number], "columns": self.reading.columns, "use_threads": False}
        rows = _batch_rows(group)
        longest = group.total_byte_size
        if group.num_rows * longest > _MANY_BATCHES * limit:
            with suppress(OSError):  # delta-encoded texts have no dictionary
                for row in probe.iter_batches(1, **which):
                    longest = longest_shared(row, self.reading.columns) or longest
                    break
        at_a_time = max(1, min(rows, limit // max(longest, 1)))
        yield from _joined(parquet.iter_batches(at_a_time, **which), rows)


def _batch_rows(group: Any) -> int:
    """Number of rows of a row group that give a few blocks, under the assumption that texts are
    most of a row.

    Uses the size of the row group: reading the size of one column from a damaged footer aborts the
    process.
    """
    rows = 4 * BLOCK_BYTES * group.num_rows // max(group.total_byte_size, 1)
    return max(1, min(rows, MAX_BLOCK_ROWS))


def _joined(batches: Iterable[Any], most_rows: int) -> Iterator[Any]:
    """Join small batches into batches that give a few blocks each."""
    import pyarrow as pa

    held = []
    num_rows = 0
    num_bytes = 0
    for batch in batches:
        held.append(batch)
        num_rows += len(batch)
        num_bytes += batch.nbytes
        if num_rows >= most_rows or num_bytes >= 4 * BLOCK_BYTES:
            yield pa.concat_batches(held) if len(held) > 1 else batch
            held = []
            num_rows = 0
            num_bytes = 0
    if held:
        yield pa.concat_batches(held)


class ArrowSource(_ColumnsSource):
    """Rows of Arrow files, IPC files or IPC streams, as documents."""

    format = "Arrow"

    def _groups(self, file: SourceFile, first: int) -> Iterator[Group]:
        line = 0
        batches = self._batches(file, self.reading.columns)
        for number, (batch, size_bytes) in enumerate(batches):
            if number >= first:
                pieces = self._pieces(file, range(line, line + len(batch)), [batch])
                yield Group(number, number + 1, line, len(batch), size_bytes, pieces)
            line += len(batch)

    def _first_batches(self, file: SourceFile) -> Iterator[Any]:
        return (batch for batch, _ in self._batches(file, None) if len(batch))

    def _batches(self, file: SourceFile, names: Sequence[str] | None) -> Iterator[tuple[Any, int]]:
        """Record batches of the named columns (None: all), each with its share of the file's
        bytes."""
        import pyarrow as pa

        with _opened(file) as stream, self._errors(file):
            magic = stream.read(len(_FILE_MAGIC))
            if magic.startswith(_OLD_MAGIC):
                raise self._torn(file, "the format is Feather version 1; convert it to version 2")
            is_file = magic == _FILE_MAGIC
            if not is_file:
                _require_end(stream, file)
            stream.seek(0)
            schema = (pa.ipc.open_file(stream) if is_file else pa.ipc.open_stream(stream)).schema
            included = None
            if names is not None:
                check_fields(schema, self.reading, file.where)
                fields = [find_field(schema, name) for name in names]
                included = sorted({field.column for field in fields if field is not None})
            options = pa.ipc.IpcReadOptions(included_fields=included, use_threads=False)
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
    """Raise SourceError if a stream has no end marker: a stream that was cut between batches looks
    like a shorter stream."""
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
    with file.open():  # raises the same error as other sources if the file is missing
        mapped = pa.memory_map(regular(str(file.path)))
    try:
        yield mapped
    finally:
        mapped.close()
