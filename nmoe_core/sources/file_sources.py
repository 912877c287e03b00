"""Base class of sources made of files, and the kind `files` with one document per file.

A subclass cuts one file into blocks; the base class handles lists of files. A text file is plain or
compressed (`.gz`, `.zst`, `.bz2`, `.xz`), and its path is the id of its document.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from nmoe_core.base.errors import SourceError
from nmoe_core.base.fingerprint import sha256_json
from nmoe_core.base.jsonl import not_utf8
from nmoe_core.sources.forms.encoding import HEAD_BYTES, encoding_of
from nmoe_core.sources.records import (
    START,
    BadRecord,
    Block,
    Position,
    Reading,
    Record,
    Sample,
    Source,
)
from nmoe_core.sources.storage import TORN, SourceFile, decompressed

BLOCK_BYTES = 2 * 2**20
_SAMPLED_FILES = 8
FileBlock = TypeVar("FileBlock", bound=Block)


class FileSource(Source, Generic[FileBlock]):
    """A list of files, in final order, as documents."""

    def __init__(self, reading: Reading, files: Sequence[SourceFile]) -> None:
        self.reading = reading
        self.files = files

    def revision(self) -> str:
        """SHA-256 of the names and revisions of the files."""
        return sha256_json(self.compared([(file.name, file.revision()) for file in self.files]))

    def local_files(self) -> list[Path]:
        """The files that are on this machine."""
        return [file.path for file in self.files if isinstance(file.path, Path)]

    def size_bytes(self) -> int:
        """Total size of the files as stored."""
        return sum(file.size_bytes() for file in self.files)

    def blocks(self, start: Position = START) -> Iterator[FileBlock]:
        """Blocks of about 2 MiB; data before `start` are skipped as fast as the format allows."""
        row = start.row
        for number in range(start.file, len(self.files)):
            after = start if number == start.file else Position(number, row=row)
            for block in self._file_blocks(self.files[number], after):
                row = block.end.row
                yield block

    def _file_blocks(self, file: SourceFile, start: Position) -> Iterator[FileBlock]:
        """Blocks of one file, from the position `start` in it."""
        raise NotImplementedError

    def each_file(self) -> Iterator[tuple[SourceFile, Iterator[FileBlock]]]:
        """Every file with its blocks; rows are counted from the start of the file."""
        for number, file in enumerate(self.files):
            yield file, self._file_blocks(file, Position(number))

    def samples(self) -> Iterator[Sample]:
        """Some of the first records of some files, including the first and the last file."""
        step = max(1, len(self.files) // _SAMPLED_FILES)
        for file in dict.fromkeys([*self.files[::step], *self.files[-1:]]):
            yield from self.file_samples(file)

    def file_samples(self, file: SourceFile) -> Iterator[Sample]:
        """Some of the first records of one file. Raises SourceError as `blocks`."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class FilesBlock(Block):
    """Consecutive files, which the worker reads."""

    files: tuple[SourceFile, ...]

    def records(self) -> Iterator[Record | BadRecord]:
        """Read and decode each file."""
        for row, file in enumerate(self.files, self.start.row):
            yield self._record(row, file)

    def where(self, row: int) -> str:
        return self.files[row - self.start.row].where

    def _record(self, row: int, file: SourceFile) -> Record | BadRecord:
        limit = self.reading.max_record_bytes
        try:
            with file.open() as stored:
                payload = decompressed(stored, file.suffix)(limit + 1)
            if len(payload) > limit:
                return BadRecord(row, file.where, f"more than {limit} bytes of text")
            return self.record_of(row, file, payload)
        except TORN as error:
            return BadRecord(row, file.where, f"cannot be read to its end: {error}")
        except UnicodeDecodeError as error:
            return BadRecord(row, file.where, not_utf8(error))
        except ValueError as error:
            return BadRecord(row, file.where, str(error))
        except SourceError as error:
            if error.code != "E-SOURCE-ENCODING":
                raise
            return BadRecord(row, file.where, str(error))

    def record_of(self, row: int, file: SourceFile, payload: bytes) -> Record | BadRecord:
        """The document of a file with these bytes. Raises ValueError, or UnicodeDecodeError, if it
        cannot be read."""
        encoding = encoding_of(payload[:HEAD_BYTES], self.reading.encoding, file.where)
        text, is_replaced = self.reading.decode(payload, encoding)
        detected = encoding if self.reading.detects else ""
        return Record(row, self.id_of(file), text, is_replaced, encoding=detected)

    def id_of(self, file: SourceFile) -> str:
        """The id of a file's document."""
        return f"{self.reading.source}/{file.name}:0"


class FilesSource(FileSource[FilesBlock]):
    """Text files as documents; the file name is the document id."""

    block: type[FilesBlock] = FilesBlock

    def num_rows(self) -> int:
        """Number of files."""
        return len(self.files)

    def samples(self) -> Iterator[Sample]:
        """An empty list: text files have no fields."""
        return iter(())

    def blocks(self, start: Position = START) -> Iterator[FilesBlock]:
        """Blocks of about 2 MiB."""
        first = start.file
        size_bytes = 0
        for after, file in enumerate(self.files[first:], first + 1):
            file_bytes = file.size_bytes()
            if file_bytes > self.reading.max_record_bytes:
                raise self.reading.too_long(file.where)
            size_bytes += file_bytes
            if size_bytes >= BLOCK_BYTES or after == len(self.files):
                here, end = (Position(file=row, row=row) for row in (first, after))
                files = tuple(self.files[first:after])
                yield self.block(self.reading, here, end, size_bytes, files)
                first = after
                size_bytes = 0
