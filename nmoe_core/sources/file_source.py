"""What the kinds of source that read files have in common: their names, revision and size.

A kind says how one file is cut into blocks; here is what follows from there being several.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from nmoe_core.base.errors import SourceError
from nmoe_core.base.fingerprint import sha256_json
from nmoe_core.sources.records import START, Block, Fields, OnError, Position
from nmoe_core.sources.storage import SourceFile

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
        id_field: Field or column of ids, which must then be there; None leaves it to the kind.
    """

    def __init__(
        self,
        name: str,
        files: Sequence[SourceFile],
        text_field: str = "text",
        id_field: str | None = None,
        on_error: OnError = "fail",
    ) -> None:
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
