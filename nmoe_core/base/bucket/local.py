"""Which files of the local directory are equal to files of the bucket, for all processes of this
machine: a SQLite file with the identity and digest of each file that was fetched or sent.

A file counts as equal while its size, inode and time of change are as recorded. The directory is
kept below its limit: the files that were used least recently are deleted, except those used in the
last minutes.
"""

import errno
import hashlib
import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from loader.files.regular import open_file
from nmoe_core.base.cache import cache_dir

DATABASE = "files.sqlite"
_WAIT_S = 60.0
_READ_BYTES = 4 * 2**20
# A file may be opened up to this long after it was looked for.
_IN_USE_S = 600.0
_TOUCH_EVERY_S = 60.0
_SCHEMA = """
create table if not exists files (
    path text primary key, size_bytes integer, inode integer, changed_ns integer,
    sha256 text, object text, used_at real
);
create index if not exists of_digest on files (sha256);
create table if not exists lists (directory text primary key, tag text, content blob);
"""


class Copy(NamedTuple):
    """A local file that was equal to an object of the bucket."""

    sha256: str
    object: str
    used_at: float


class _Opened:
    """The connection of a thread, which is closed when the thread or its bucket ends."""

    def __init__(self, path: Path) -> None:
        # The bucket may end in another thread.
        same = {"check_same_thread": False}
        self.database = sqlite3.connect(path, timeout=_WAIT_S, isolation_level=None, **same)

    def __del__(self) -> None:
        with suppress(AttributeError):  # it was not opened
            self.database.close()


class LocalFiles:
    """The records of the local files of one bucket.

    Args:
        directory: Local directory of the bucket's files.
        own: Directory of the SQLite file.
        max_bytes: Limit of the files together; 0 for no limit.
    """

    def __init__(self, directory: Path, own: Path, max_bytes: int = 0) -> None:
        self._directory = directory
        self._own = own
        self._max_bytes = max_bytes
        self._threads = threading.local()

    def find(self, path: str, status: os.stat_result) -> Copy | None:
        """The record of a file that has not changed since; None if there is none."""
        with self._connected() as database:
            row = database.execute(
                "select sha256, object, used_at from files"
                " where path = ? and size_bytes = ? and inode = ? and changed_ns = ?",
                (path, status.st_size, status.st_ino, status.st_mtime_ns),
            ).fetchone()
        return None if row is None else Copy(*row)

    def last_digest(self, path: str) -> str | None:
        """The SHA-256 that a file had when it was last fetched or sent; None if it never was."""
        with self._connected() as database:
            row = database.execute("select sha256 from files where path = ?", (path,)).fetchone()
        return None if row is None else str(row[0])

    def objects_of(self, sha256: str) -> list[tuple[str, str]]:
        """Paths that had these bytes when they were fetched or sent, with their objects."""
        with self._connected() as database:
            found = database.execute("select path, object from files where sha256 = ?", (sha256,))
            return [(str(path), str(name)) for path, name in found]

    def keep(self, path: str, status: os.stat_result, sha256: str, name: str) -> None:
        """Record that a file is equal to the object `name`."""
        identity = status.st_size, status.st_ino, status.st_mtime_ns
        row = (path, *identity, sha256, name, time.time())
        with self._connected() as database:
            database.execute("insert or replace into files values (?, ?, ?, ?, ?, ?, ?)", row)

    def forget(self, path: str) -> None:
        """Delete the record of a file."""
        with self._connected() as database:
            database.execute("delete from files where path = ?", (path,))

    def touch(self, path: str, copy: Copy) -> None:
        """Record that a file was used."""
        now = time.time()
        if now - copy.used_at > _TOUCH_EVERY_S:
            with self._connected() as database:
                database.execute("update files set used_at = ? where path = ?", (now, path))

    def list_of(self, directory: str, tag: str) -> bytes | None:
        """The list of a directory if its ETag is `tag`."""
        with self._connected() as database:
            row = database.execute(
                "select content from lists where directory = ? and tag = ?", (directory, tag)
            ).fetchone()
        return None if row is None else bytes(row[0])

    def keep_list(self, directory: str, tag: str, content: bytes) -> None:
        """Record the list of a directory."""
        with self._connected() as database:
            row = (directory, tag, content)
            database.execute("insert or replace into lists values (?, ?, ?)", row)

    def make_room(self, num_bytes: int) -> None:
        """Before `num_bytes` are fetched, delete the files that were used least recently, so that
        the recorded files stay below the limit. Files that were used lately stay, even if the limit
        is then exceeded."""
        rest = self._excess_bytes(num_bytes)
        if rest <= 0:
            return
        with self._connected() as database:
            before = time.time() - _IN_USE_S
            rows = database.execute(
                "select path, size_bytes, inode, changed_ns from files where used_at < ?"
                " order by used_at",
                (before,),
            ).fetchall()
        for path, size_bytes, inode, changed_ns in rows:
            if rest <= 0:
                return
            local = self._directory / path
            with suppress(FileNotFoundError):
                status = local.stat()
                identity = status.st_size, status.st_ino, status.st_mtime_ns
                if identity != (size_bytes, inode, changed_ns):
                    continue  # a writer has changed it
                local.unlink()
            self.forget(path)
            rest -= size_bytes

    def has_room(self, num_bytes: int) -> bool:
        """Whether the recorded files and `num_bytes` more are within the limit."""
        return self._excess_bytes(num_bytes) <= 0

    def _excess_bytes(self, num_bytes: int) -> int:
        if not self._max_bytes:
            return 0
        with self._connected() as database:
            total = database.execute("select coalesce(sum(size_bytes), 0) from files").fetchone()[0]
        return int(total) + num_bytes - self._max_bytes

    @contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        """A connection of this thread, in a transaction."""
        opened = getattr(self._threads, "opened", None)
        if opened is None:
            self._own.mkdir(parents=True, exist_ok=True)
            opened = _Opened(self._own / DATABASE)
            database = opened.database
            database.execute("pragma journal_mode = wal")
            # After a crash of the machine the files are hashed again.
            database.execute("pragma synchronous = off")
            with closing(database.cursor()) as cursor:
                cursor.executescript(_SCHEMA)
            self._threads.opened = opened
        yield opened.database


def sha256_of_bytes(path: str | Path, start: int = 0) -> str:
    """Hex SHA-256 of a file from the byte `start` on, always of its bytes.

    The file is read in large pieces, so that a hashing thread seldom waits for the GIL.
    """
    digest = hashlib.sha256()
    with open_file(path, buffering=0) as file:
        # Clearing a large buffer takes longer than hashing a small file.
        size_bytes = os.fstat(file.fileno()).st_size
        file.seek(start)
        piece = memoryview(bytearray(min(_READ_BYTES, max(size_bytes, 2**16))))
        while size := file.readinto(piece):
            digest.update(piece[:size])
    return digest.hexdigest()


def scratch_of(url: str, scratch: str | None) -> Path:
    """The local directory of a root: below `NMOE_SCRATCH`, else below `scratch`, else in the user's
    cache."""
    named = os.environ.get("NMOE_SCRATCH") or scratch
    above = Path(os.path.expanduser(named)) if named else cache_dir() / "scratch"
    name = url.partition("://")[2].strip("/").replace("/", "-")
    digest = hashlib.sha256(url.encode()).hexdigest()[:8]
    # Tasks resolve links of their paths, and these must stay paths of the bucket.
    return Path(os.path.realpath(above / f"{name}-{digest}"))


def status_at(text: str) -> os.stat_result | None:
    """The status of a path of this machine; None if it does not exist."""
    try:
        return os.stat(text)
    except (FileNotFoundError, NotADirectoryError):
        return None


def made_status(mode: int, inode: int, size_bytes: int) -> os.stat_result:
    """The status of a file that no disk has; its times are the start of the epoch."""
    times = {f"st_{name}time_ns": 0 for name in "amc"}
    return os.stat_result((mode, inode, 0, 1, 0, 0, size_bytes, 0, 0, 0), times)


def missing_at(text: str) -> FileNotFoundError:
    """The error for a path that does not exist."""
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), text)
