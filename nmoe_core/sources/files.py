"""Sources of files: their names, revision and size; and the kind `files`, one document per file.

A kind says how one file is cut into blocks; here is what follows from there being several. A text
file is plain, `.gz` or `.zst`, and its path is its document's id.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

from nmoe_core.base.errors import SourceError
from nmoe_core.base.fingerprint import sha256_json
from nmoe_core.sources.decompress import READERS, TORN, plain
from nmoe_core.sources.records import START, BadRecord, Block, Fields, OnError, Position, Record
from nmoe_core.sources.storage import SourceFile

_BLOCK_BYTES = 2 * 2**20
DEFAULT_MAX_RECORD_MB = 256
FileBlock = TypeVar("FileBlock", bound=Block)


class FileSource:
    """Files as documents.

    Args:
        name: Source name, first part of ids that the records do not give.
        files: The files in their final order.
        on_error: What to do with text that is not UTF-8.

    Attributes:
        max_record_bytes: A longer line or text file is refused; one may never be held whole.
    """

    max_record_bytes: int = DEFAULT_MAX_RECORD_MB * 2**20

    def __init__(self, name: str, files: Sequence[SourceFile], on_error: OnError = "fail") -> None:
        self.name = name
        self.files = files
        self.on_error: OnError = on_error

    def revision(self) -> str:
        """SHA-256 over names and revisions of the files."""
        return sha256_json([[file.name, file.revision()] for file in self.files])

    def local_files(self) -> list[Path]:
        """Those of the files that lie on this machine."""
        return [file.path for file in self.files if isinstance(file.path, Path)]

    def provenance(self) -> dict[str, str]:
        """Nothing that the files do not say."""
        return {}

    def size_bytes(self) -> int:
        """Size of all files as they are stored."""
        return sum(file.size_bytes() for file in self.files)

    def too_long(self, where: str) -> SourceError:
        """The error for a record past the limit."""
        return SourceError(
            "a record is longer than this source allows",
            where=where,
            expected=f"at most {self.max_record_bytes // 2**20} MiB",
            do="split or remove it, or raise max_record_mb of this source",
            code="E-SOURCE-RECORD",
        )


class RecordFileSource(FileSource, Generic[FileBlock]):
    """Files of many records each, with a text field and perhaps an id field.

    Args:
        name, files, on_error: As for `FileSource`.
        text_field: Field or column of texts.
        id_field: Field or column of ids, which must then be there; None numbers the records of
            each file that gives none.

    Raises:
        SourceError: The kind needs pyarrow, which is not installed (E-SOURCE-EXTRA).
    """

    needs_pyarrow: ClassVar[bool] = False

    def __init__(
        self,
        name: str,
        files: Sequence[SourceFile],
        text_field: str = "text",
        id_field: str | None = None,
        on_error: OnError = "fail",
    ) -> None:
        if self.needs_pyarrow:
            _require_pyarrow(name)
        super().__init__(name, files, on_error)
        self.fields = Fields(text_field, id_field)

    def blocks(self, start: Position = START) -> Iterator[FileBlock]:
        """Blocks of about 2 MiB; what lies before `start` is passed over as the kind can."""
        row = start.row
        for number in range(start.file, len(self.files)):
            after = start if number == start.file else Position(number, row=row)
            for block in self._file_blocks(self.files[number], after):
                row = block.end.row
                yield block

    def _file_blocks(self, file: SourceFile, start: Position) -> Iterator[FileBlock]:
        """Blocks of one file from `start` on, a position in it."""
        raise NotImplementedError


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
    """Text files as documents; the name of a file is the id of its document."""

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


def _require_pyarrow(name: str) -> None:
    """Refuse a source that needs pyarrow where it is not installed (E-SOURCE-EXTRA)."""
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise SourceError(
            "reading Parquet and Arrow files needs the `pyarrow` package",
            where=name,
            do="pip install 'nmoe-data[parquet]'",
            code="E-SOURCE-EXTRA",
        ) from error
