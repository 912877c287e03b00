"""A local cache of blocks: a directory with a size limit, which several processes share.

A block is named by its SHA-256. Its content is checked before it gets this name, and again when
another process maps it. Before a block is written, the least recently used blocks are deleted until
it fits, under a lock of the directory. A block may be deleted while other processes map it. A
killed process holds no lock any more, and leaves at most one `.part` file, which the next writer
deletes.
"""

import hashlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from loader.files.locks import locked
from loader.files.regular import open_file, read_file

_CLAIMS = 256  # number of locks with which one process fetches a block and the others wait
_KEEP = 0.9  # blocks are deleted down to this share of the limit, so that deletions are rare


class BlockCache:
    """A cache in `directory` of at most `limit_bytes`."""

    def __init__(self, directory: Path, limit_bytes: int) -> None:
        self._directory = directory
        self._limit_bytes = limit_bytes
        self._locks()

    def path(self, digest: str) -> Path:
        """The path of a block, if it is cached."""
        return self._directory / digest

    def get(self, digest: str, fetch: Callable[[], bytes]) -> bool:
        """Fetch a block unless it is cached; if several processes need it, only one fetches it.
        Returns whether this process fetched the block. Raises the errors of `fetch`."""
        if self.path(digest).exists():
            return False
        try:
            with self._locked(f"claim-{int(digest[:8], 16) % _CLAIMS}"):
                if self.path(digest).exists():
                    return False
                self._put(digest, fetch())
        except FileNotFoundError:  # the directory was deleted in the meantime
            return False
        return True

    def touch(self, digest: str) -> None:
        """Mark a block as just used."""
        try:
            os.utime(self.path(digest))
        except FileNotFoundError:
            return  # another process deleted it to make room

    def is_whole(self, digest: str) -> bool:
        """Whether a block's content matches its name; deletes the block if it does not."""
        try:
            with open_file(self.path(digest)) as file:
                if hashlib.file_digest(file, "sha256").hexdigest() == digest:
                    return True
        except FileNotFoundError:
            return False
        self.path(digest).unlink(missing_ok=True)
        return False

    def _put(self, digest: str, content: bytes) -> None:
        with self._locked("room"):
            record = self._directory / "locks" / "bytes"
            said = read_file(record) if record.exists() else b""  # empty after a kill
            used = int(said) if said.isdigit() else self._limit_bytes
            if used + len(content) > self._limit_bytes:
                used = self._make_room(len(content))
            # Recorded before the block is written, so after a crash the recorded size is never too
            # low.
            record.write_text(str(used + len(content)))
            part = self._directory / ".part"
            part.write_bytes(content)
            part.replace(self.path(digest))

    def _make_room(self, num_bytes: int) -> int:
        """Delete blocks until `num_bytes` fit; returns the bytes of the remaining blocks."""
        (self._directory / ".part").unlink(missing_ok=True)
        with os.scandir(self._directory) as found:
            files = [(entry.stat(), entry.path) for entry in found if entry.is_file()]
        blocks = [(status.st_mtime_ns, path, status.st_size) for status, path in files]
        used = sum(size for *_, size in blocks)
        keep = _KEEP * self._limit_bytes
        for _, path, size in sorted(blocks):
            if used + num_bytes <= keep:
                break
            os.unlink(path)
            used -= size
        return used

    def _locked(self, name: str) -> AbstractContextManager[None]:
        return locked(self._locks() / name)

    def _locks(self) -> Path:
        """The directory of the locks, created again if the cache was deleted."""
        directory = self._directory / "locks"
        directory.mkdir(parents=True, exist_ok=True)
        return directory
