"""Source kinds `parquet` and `arrow`: rows of files, on this machine or in a store.

Only text, id and kept columns are decoded, a row group or a record batch at a time, so memory does
not follow the size of a file. Arrow files are IPC files and streams (the format of `datasets`
caches and of Feather); a local one is memory-mapped. A run resumes at a row group or batch, without
reading earlier ones. A file that cannot be read to its end is an error that names it.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any, ClassVar

from nmoe_core.base.errors import SourceError, one_line
from nmoe_core.sources.columns import (
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
from nmoe_core.sources.file_sources import FileSource
from nmoe_core.sources.records import SAMPLED_RECORDS, Position, Reading, Sample
from nmoe_core.sources.storage import SourceFile

_FILE_MAGIC = b"ARROW1"
_OLD_MAGIC = b"FEA1"
_MANY_BATCHES = 1000  # that a row group is not read by if a look at its dictionary can say more
_MAX_GROWTH = 1000  # bytes of rows for each of their file; gzip reaches as much
_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"


class _ColumnsSource(FileSource[ColumnsBlock]):
    """Files of rows; a text column may hold text or bytes. Raises SourceError if pyarrow is not
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
        """Its first rows."""
        with self._errors(file):
            for batch in islice(self._first_batches(file), 1):
                yield from batch_samples(batch)

    def num_rows(self) -> int:
        """Number of rows; decodes none of them."""
        return sum(group.num_rows for file in self.files for group in self._groups(file, 0))

    def _file_blocks(self, file: SourceFile, start: Position) -> Iterator[ColumnsBlock]:
        """`Position.offset` counts row groups or record batches, `line` the rows of the file."""
        place = Place(file.where, f"{self.reading.source}/{file.name}")
        most = _MAX_GROWTH * file.size_bytes() + 4 * self.reading.max_record_bytes
        for block in column_blocks(self.reading, place, self._groups(file, start.offset), start):
            most -= block.columns.nbytes
            if most < 0:
                raise SourceError(
                    f"rows are over {_MAX_GROWTH} times as large as their file",
                    where=f"{file.where}: row {block.start.line}",
                    do="leave the file out with `exclude`, or write it without a dictionary",
                    code="E-SOURCE-RECORD",
                )
            yield block

    def _groups(self, file: SourceFile, first: int) -> Iterator[Group]:
        """The groups of a file from number `first` on."""
        raise NotImplementedError

    def _first_batches(self, file: SourceFile) -> Iterator[Any]:
        """Record batches of all columns, of which the first has rows."""
        raise NotImplementedError

    def _pieces(self, file: SourceFile, lines: range, batches: Iterable[Any]) -> Iterator[Any]:
        line = lines.start
        with self._errors(file):
            for batch in batches:
                for columns in cut_batch(batch, self.reading):
                    if columns.nbytes > self.reading.max_record_bytes:  # of one row, then
                        raise self.reading.too_long(f"{file.where}: row {line}")
                    line += len(columns)
                    yield columns
        if line != lines.stop:
            raise self._torn(file, f"a row group ends at row {line}, not {lines.stop}")

    @contextmanager
    def _errors(self, file: SourceFile) -> Iterator[None]:
        """Turn pyarrow's errors about a file's bytes into one SourceError (E-SOURCE-TORN)."""
        from pyarrow.lib import ArrowException

        try:
            yield
        except (ArrowException, OSError, ValueError, EOFError) as error:
            raise self._torn(file, one_line(error)) from error

    def _torn(self, file: SourceFile, cause: str) -> SourceError:
        return SourceError(
            f"not a whole {self.format} file: {cause}",
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
                raise self._torn(file, "the row groups do not add up to the file's rows")
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
            yield from pq.ParquetFile(stream).iter_batches(SAMPLED_RECORDS, use_threads=False)

    def _batches(self, parquet: Any, probe: Any, number: int) -> Iterator[Any]:
        """The batches of a row group. So many rows are read at a time as cannot pass the limit of
        one record together, since all of them may name one value that is stored once."""
        group = parquet.metadata.row_group(number)
        limit = self.reading.max_record_bytes
        which = {"row_groups": [number], "columns": self.reading.columns, "use_threads": False}
        rows = _batch_rows(group)
        longest = group.total_byte_size
        if group.num_rows * longest > _MANY_BATCHES * limit:
            with suppress(OSError):  # texts that begin with the text before have no dictionary
                for row in probe.iter_batches(1, **which):
                    longest = longest_shared(row, self.reading.columns) or longest
                    break
        at_a_time = max(1, min(rows, limit // max(longest, 1)))
        yield from _joined(parquet.iter_batches(at_a_time, **which), rows)


def _batch_rows(group: Any) -> int:
    """Rows of a row group that make a few blocks if texts are most of the row.

    The size is the row group's: asking a damaged footer for one column's aborts the process.
    """
    rows = 4 * BLOCK_BYTES * group.num_rows // max(group.total_byte_size, 1)
    return max(1, min(rows, MAX_BLOCK_ROWS))


def _joined(batches: Iterable[Any], most_rows: int) -> Iterator[Any]:
    """Small batches joined into ones that make a few blocks."""
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
        """Record batches of these columns, or of all, each with its share of the file's bytes."""
        import pyarrow as pa

        with _opened(file) as stream, self._errors(file):
            magic = stream.read(len(_FILE_MAGIC))
            if magic.startswith(_OLD_MAGIC):
                raise self._torn(file, "it is Feather of version 1; write it as version 2")
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
