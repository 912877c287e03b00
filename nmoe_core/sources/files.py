"""Source kind `files`: every file is one document, its name in the tree is its id."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nmoe_core.fingerprint import sha256_file, sha256_json
from nmoe_core.sources.paths import SourceFile
from nmoe_core.sources.records import BadRecord, OnError, Record

_BLOCK_BYTES = 2 * 2**20


@dataclass(frozen=True, slots=True)
class FilesBlock:
    """Consecutive files, read in the worker."""

    source: str
    files: tuple[SourceFile, ...]
    first_row: int
    on_error: OnError

    def records(self) -> Iterator[Record | BadRecord]:
        """Read and decode each file."""
        errors = "replace" if self.on_error == "replace" else "strict"
        for row, file in enumerate(self.files, self.first_row):
            payload = file.path.read_bytes()
            try:
                text = payload.decode("utf-8", errors)
            except UnicodeDecodeError as error:
                reason = f"not UTF-8 at byte {error.start}"
                yield BadRecord(row, file.where, reason)
                continue
            yield Record(row, f"{self.source}/{file.name}:0", text)


class FilesSource:
    """Text files as documents.

    Args:
        name: Source name, first part of every id.
        files: The files in their final order.
        on_error: What to do with a file that is not UTF-8.
    """

    def __init__(self, name: str, files: Sequence[SourceFile], on_error: OnError = "fail") -> None:
        self.name = name
        self.files = files
        self.on_error: OnError = on_error

    def revision(self) -> str:
        """SHA-256 over names and contents."""
        return sha256_json([[file.name, sha256_file(file.path)] for file in self.files])

    def check(self) -> None:
        """Nothing to check: the files were found, and a file is text or a bad record."""

    def num_rows(self) -> int:
        """Number of files."""
        return len(self.files)

    def blocks(self) -> Iterator[FilesBlock]:
        """Blocks of about 2 MiB."""
        start, size_bytes = 0, 0
        for i, file in enumerate(self.files):
            size_bytes += file.path.stat().st_size
            if size_bytes >= _BLOCK_BYTES:
                yield self._block(start, i + 1)
                start, size_bytes = i + 1, 0
        if start < len(self.files):
            yield self._block(start, len(self.files))

    def _block(self, start: int, stop: int) -> FilesBlock:
        return FilesBlock(self.name, tuple(self.files[start:stop]), start, self.on_error)
