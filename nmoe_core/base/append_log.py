"""An append-only file of lines that can be resumed after a kill at any point.

A killed writer leaves at most an incomplete last line. The next writer checks the complete lines,
then removes the incomplete one. Only one process can write the file: the kernel frees the lock when
this process ends. Each append costs one flush, and an fsync only on request.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

from nmoe_core.base.atomic import failpoint, named_errors
from nmoe_core.base.bucket.draft import Draft
from nmoe_core.base.bucket.paths import bucket_of
from nmoe_core.base.errors import LockedError

_READ_BYTES = 4 * 2**20


class Line(NamedTuple):
    """A complete line of a file: its number from 1, its byte offset, and its bytes with the
    newline."""

    number: int
    offset: int
    payload: bytes


class AppendLog:
    """Opens a file for its only writer; a second writer raises LockedError (E-LOCKED).

        with AppendLog(path) as log:
            for line in log.lines():
                check(line)  # an error leaves the file as it is
            log.cut()
            log.append(b'{"id": "a"}\\n')

    `size` counts the bytes of the lines that were read or appended. The file and its directory are
    created if they are missing.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.size = 0
        self._hash = hashlib.sha256()
        self._draft = None if bucket_of(path) is None else Draft(path)
        self._file = open(path, "a+b")  # noqa: SIM115 (closed by `close`)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise LockedError(
                "another process is writing this file",
                where=path,
                do="wait until that process ends, or end it",
            ) from None

    @property
    def sha256(self) -> str:
        """SHA-256 of the first `size` bytes."""
        return self._hash.hexdigest()

    @property
    def is_sent(self) -> bool:
        """Whether a bucket has all lines, in the unfinished file's pieces."""
        return self._draft is not None and self._draft.sent_bytes == self.size > 0

    def starts_with(self, size: int, sha256: str) -> bool:
        """Whether the file has at least `size` bytes, and the first `size` bytes have this
        SHA-256."""
        digest = hashlib.sha256()
        self._file.seek(0)
        while size and (piece := self._file.read(min(size, _READ_BYTES))):
            digest.update(piece)
            size -= len(piece)
        return not size and digest.hexdigest() == sha256

    def lines(self, end: int | None = None) -> Iterator[Line]:
        """The complete lines before byte `end`; `size` grows with each line that is read."""
        self.size = 0
        self._hash = hashlib.sha256()
        self._file.seek(0)
        for line in whole_lines(self._file):
            if end is not None and line.offset >= end:
                return
            self.size += len(line.payload)
            self._hash.update(line.payload)
            yield line

    def rest(self) -> bytes:
        """The bytes after the first `size`."""
        self._file.seek(self.size)
        return self._file.read()

    def cut(self) -> None:
        """Truncate the file to the first `size` bytes."""
        self._file.truncate(self.size)
        if self._draft is not None:
            self._draft.cut(self.size)

    def clear(self) -> None:
        """Start over with an empty file."""
        self.size = 0
        self._hash = hashlib.sha256()
        self.cut()

    def append(self, payload: bytes, *, durable: bool = False) -> int:
        """Write complete lines and flush them; with `durable`, wait until they are on the disk.
        Returns the byte offset of the first line."""
        offset = self.size
        with named_errors(self.path):
            self._file.write(payload)
            failpoint("write")
            self._file.flush()
        self.size += len(payload)
        self._hash.update(payload)
        if durable:
            self.sync()
        if self._draft is not None:
            self._draft.send_if_due(self.size)
        return offset

    def sync(self) -> None:
        """Wait until all lines are on the disk."""
        failpoint("fsync")
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; in a bucket, also commit it."""
        if self._file.closed:
            return
        self._file.close()
        if self._draft is not None:
            self._draft.commit()

    def __enter__(self) -> AppendLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def whole_lines(file: IO[bytes]) -> Iterator[Line]:
    """The lines of an open file that end with a newline, without an incomplete last line."""
    offset = 0
    for number, payload in enumerate(file, 1):
        if not payload.endswith(b"\n"):
            return
        yield Line(number, offset, payload)
        offset += len(payload)
