"""Source kind `parquet`: rows of Parquet files, on this machine or in a store.

Only the text and id columns are read, one row group at a time and in batches of about 2 MiB, so
memory does not follow the size of a file. A run goes on at a row group without reading what is
before it. A file that cannot be read to its end is an error that names the file and the row.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nmoe_core.base.errors import SourceError
from nmoe_core.sources.columns import BLOCK_BYTES, ColumnsBlock, Origin, check_fields, cut_batch
from nmoe_core.sources.files import RecordFileSource
from nmoe_core.sources.records import Position
from nmoe_core.sources.storage import SourceFile

_MAX_BATCH_ROWS = 8192


class ParquetSource(RecordFileSource[ColumnsBlock]):
    """Rows of Parquet files as documents; a text column may hold text or bytes."""

    needs_pyarrow = True

    def check(self) -> None:
        """Read the first file's footer and check its fields."""
        for file in self.files[:1]:
            with self._open(file):
                pass

    def num_rows(self) -> int:
        """Number of rows, from the footers."""
        total = 0
        for file in self.files:
            with self._open(file) as parquet:
                total += parquet.metadata.num_rows
        return total

    def _file_blocks(self, file: SourceFile, start: Position) -> Iterator[ColumnsBlock]:
        origin = Origin(file.where, f"{self.name}/{file.name}")
        size_bytes = file.size_bytes()
        with self._open(file) as parquet:
            metadata = parquet.metadata
            at = start
            first_line = sum(metadata.row_group(g).num_rows for g in range(start.offset))
            for group in range(start.offset, metadata.num_row_groups):
                num_skipped = at.line - first_line
                for columns in self._columns(parquet, group, num_skipped):
                    if columns.nbytes > self.max_record_bytes:  # of one row, then
                        raise self.too_long(f"{file.where}: row {at.line}")
                    lines = at.line + len(columns)
                    is_last = lines == first_line + metadata.row_group(group).num_rows
                    end = Position(at.file, group + is_last, lines, at.row + len(columns))
                    share = size_bytes * len(columns) // max(metadata.num_rows, 1)
                    yield ColumnsBlock(origin, columns, at, end, share, self.fields, self.on_error)
                    at = end
                first_line += metadata.row_group(group).num_rows
                if at.line != first_line:
                    raise _torn(file, f"row group {group} ends at row {at.line}, not {first_line}")

    def _columns(self, parquet: Any, group: int, num_skipped: int) -> Iterator[Any]:
        names = [name for name in self.fields if name is not None]
        batches = parquet.iter_batches(
            _batch_rows(parquet.metadata.row_group(group)),
            row_groups=[group],
            columns=names,
            use_threads=False,
        )
        # Pieces are cut before rows are dropped, so that they do not depend on where a run starts.
        for batch in batches:
            for columns in cut_batch(batch, self.fields):
                if num_skipped < len(columns):
                    yield columns.slice(num_skipped)
                num_skipped = max(0, num_skipped - len(columns))

    @contextmanager
    def _open(self, file: SourceFile) -> Iterator[Any]:
        import pyarrow.parquet as pq

        with file.open() as stream, arrow_errors(file, "Parquet"):
            parquet = pq.ParquetFile(stream, page_checksum_verification=True)
            counts = [parquet.metadata.row_group(g).num_rows for g in range(parquet.num_row_groups)]
            if any(count < 0 for count in counts) or sum(counts) != parquet.metadata.num_rows:
                raise _torn(file, "the row groups do not add up to the file's rows")
            check_fields(parquet.schema_arrow, self.fields, file.where)
            yield parquet


@contextmanager
def arrow_errors(file: SourceFile, kind: str) -> Iterator[None]:
    """Turn what pyarrow raises over a file's bytes into one SourceError (E-SOURCE-TORN)."""
    from pyarrow.lib import ArrowException

    try:
        yield
    except (ArrowException, OSError, ValueError, EOFError) as error:
        raise _torn(file, " ".join(str(error).split())[:300], kind) from error


def _torn(file: SourceFile, cause: str, kind: str = "Parquet") -> SourceError:
    return SourceError(
        f"not a whole {kind} file: {cause}",
        where=file.where,
        do="restore the file, or leave it out with `exclude`",
        code="E-SOURCE-TORN",
    )


def _batch_rows(group: Any) -> int:
    """Rows of a row group that make a few blocks where texts are most of the row.

    The size is the row group's: asking a damaged footer for one column's aborts the process.
    """
    rows = 4 * BLOCK_BYTES * group.num_rows // max(group.total_byte_size, 1)
    return max(1, min(rows, _MAX_BATCH_ROWS))
