"""Source kind `files`: every file, plain, `.gz` or `.zst`, is one document named by its path."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from nmoe_core.sources.decompress import READERS, TORN, plain
from nmoe_core.sources.file_source import FileSource
from nmoe_core.sources.records import START, BadRecord, OnError, Position, Record
from nmoe_core.sources.storage import SourceFile

_BLOCK_BYTES = 2 * 2**20


@dataclass(frozen=True, slots=True)
class FilesBlock:
    """Consecutive files, read in the worker."""

    source: str
    files: tuple[SourceFile, ...]
    first_row: int
    size_bytes: int
    on_error: OnError
    max_bytes: int

    @property
    def start(self) -> Position:
        """Before its first file."""
        return _before(self.first_row)

    @property
    def end(self) -> Position:
        """After its last file."""
        return _before(self.first_row + len(self.files))

    def records(self) -> Iterator[Record | BadRecord]:
        """Read and decode each file."""
        for row, file in enumerate(self.files, self.first_row):
            payload, is_replaced = b"", False
            try:
                with file.open() as stored:
                    payload = READERS.get(file.suffix, plain)(stored).read(self.max_bytes + 1)
                if len(payload) > self.max_bytes:
                    yield BadRecord(row, file.where, f"more than {self.max_bytes} bytes of text")
                    continue
                text = payload.decode()
            except TORN as error:
                yield BadRecord(row, file.where, f"cannot be read to its end: {error}")
                continue
            except UnicodeDecodeError as error:
                if self.on_error != "replace":
                    yield BadRecord(row, file.where, f"not UTF-8 at byte {error.start}")
                    continue
                text, is_replaced = payload.decode("utf-8", "replace"), True
            yield Record(row, f"{self.source}/{file.name}:0", text, is_replaced)


class FilesSource(FileSource):
    """Text files as documents.

    Args:
        name: Source name, first part of every id.
        files: The files in their final order.
        on_error: What to do with a file that is not UTF-8.
    """

    def check(self) -> None:
        """Nothing to check: the files were found, and a file is text or a bad record."""

    def num_rows(self) -> int:
        """Number of files."""
        return len(self.files)

    def blocks(self, start: Position = START) -> Iterator[FilesBlock]:
        """Blocks of about 2 MiB."""
        first, size_bytes = start.file, 0
        for i in range(first, len(self.files)):
            file_bytes = self.files[i].size_bytes()
            if file_bytes > self.max_record_bytes:
                raise self.too_long(self.files[i].where)
            size_bytes += file_bytes
            if size_bytes >= _BLOCK_BYTES or i + 1 == len(self.files):
                files = tuple(self.files[first : i + 1])
                limit = self.max_record_bytes
                yield FilesBlock(self.name, files, first, size_bytes, self.on_error, limit)
                first, size_bytes = i + 1, 0


def _before(row: int) -> Position:
    return Position(file=row, row=row)
