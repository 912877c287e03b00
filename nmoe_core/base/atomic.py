"""Commit protocol: a file appears under its name only when it is complete.

Every write goes to a temporary file in the same directory; the file is flushed, fsynced and
renamed, and the directory is fsynced. A manifest or summary is written last, so every file that it
names is durable. This costs two fsyncs per file. A process killed at any point leaves at most
`.tmp.` files, which the next writer of that directory removes under its lock.

`NMOE_FAILPOINT=step:k:action` makes the k-th call of a step (write, fsync, rename) fail for tests:
the action `kill` ends the process with SIGKILL; any other action is an errno name such as `ENOSPC`.
"""

import ctypes
import errno
import fcntl
import glob
import json
import os
import re
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import IO, Any

import numpy as np

from nmoe_core.base.bucket.paths import bucket_of, local_path
from nmoe_core.base.bucket.scope import TMP_MARK as TMP_MARK
from nmoe_core.base.errors import LockedError

LOCK_NAME = ".lock"
LOCKS_NAME = ".locks"
_MAX_ABSENT = 1000
_LEFTOVER = re.compile(r".+\.tmp\.\d+|\..+\.tmp\.(?:new|old)")
_steps: Counter[str] = Counter()
_LIBC: Any = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
_SYNC_FILE_RANGE_WRITE = 2
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_CANNOT_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EBUSY, errno.EXDEV)


def failpoint(step: str) -> None:
    """Count one call of `step`; fail if `NMOE_FAILPOINT` names this call."""
    spec = os.environ.get("NMOE_FAILPOINT")
    if not spec:
        return
    name, k, action = spec.split(":")
    if name != step:
        return
    _steps[step] += 1
    if _steps[step] != int(k):
        return
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise OSError(getattr(errno, action), os.strerror(getattr(errno, action)))


@contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a binary file that appears under `path` when the block ends without an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tmp = path.with_name(f"{path.name}{TMP_MARK}{os.getpid()}")
    try:
        with named_errors(path), open(tmp, "wb") as file:
            yield file
            failpoint("write")
            file.flush()
            failpoint("fsync")
            os.fsync(file.fileno())
        failpoint("rename")
        rename(tmp, path)
    except BaseException:
        tmp.unlink(missing_ok=True)
        raise
    fsync_dir(path.parent)


@contextmanager
def named_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Add the file's name to errors of the operating system, such as a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = os.fspath(path)
        raise


def write_bytes(path: Path, payload: bytes) -> None:
    with atomic_file(path) as file:
        file.write(payload)


def write_json(path: Path, value: Any) -> None:
    """Commit `value` as indented UTF-8 JSON."""
    write_bytes(path, json_bytes(value))


def json_bytes(value: Any) -> bytes:
    """The bytes that `write_json` writes."""
    text = json.dumps(value, ensure_ascii=False, indent=2, allow_nan=False) + "\n"
    return text.encode()


def save_array(file: IO[bytes], array: np.ndarray) -> None:
    """Write an array as `.npy`. `numpy.save` would give it to a buffer of the C library, and not
    say whether the last bytes found room on the disk."""
    np.lib.format.write_array(_Plain(file), array, allow_pickle=False)


class _Plain:
    """Only the method `write` of a file."""

    def __init__(self, file: IO[bytes]) -> None:
        self.write = file.write


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Commit one JSON object per line."""
    with atomic_file(path) as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False, allow_nan=False).encode() + b"\n")


def fsync_dir(path: Path) -> None:
    """Make the directory's entries durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def start_writeback(descriptor: int) -> None:
    """Start writeback of a file before its fsync, if the system supports it. With many files,
    starting writeback for all of them before the first fsync takes a third of the time."""
    if _LIBC is not None:
        _LIBC.sync_file_range(
            descriptor, ctypes.c_int64(0), ctypes.c_int64(0), _SYNC_FILE_RANGE_WRITE
        )


def replace_dir(staged: Path, final: Path) -> None:
    """Replace the directory `final` by the complete directory `staged`: a kill between the two
    renames leaves `final` missing, never mixed, and the next run of the task writes it again."""
    old = final.with_name(f".{final.name}{TMP_MARK}old")
    if old.exists():
        shutil.rmtree(old)
    final.parent.mkdir(parents=True, exist_ok=True)
    _tell_replaced(final)
    if os.path.lexists(str(final)):
        os.replace(final, old)
    failpoint("rename")
    os.replace(staged, final)
    fsync_dir(final.parent)
    if old.exists():
        shutil.rmtree(old)


def exchange_dirs(staged: Path, final: Path) -> bool:
    """Swap two directories of one file system atomically. Returns False, and changes nothing, if
    this is not supported: outside Linux, on NFS and some FUSE file systems, at a mount point, or in
    a lower layer of an overlay."""
    if not hasattr(_LIBC, "renameat2"):  # glibc has renameat2 since 2.28
        return False
    failpoint("rename")
    paths = (_AT_FDCWD, os.fsencode(staged), _AT_FDCWD, os.fsencode(final))
    if _LIBC.renameat2(*paths, _RENAME_EXCHANGE):
        code = ctypes.get_errno()
        if code in _CANNOT_EXCHANGE:
            return False
        raise OSError(code, os.strerror(code), str(final))
    _tell_replaced(final)
    fsync_dir(final.parent)
    return True


def remove_dir(path: Path) -> None:
    """Remove a directory of an output with all its files. It is renamed first: a directory that is
    only partly removed must not be found."""
    _tell_replaced(path)
    if os.path.lexists(str(path)):
        old = path.with_name(f".{path.name}{TMP_MARK}old")
        os.replace(str(path), str(old))
        shutil.rmtree(old)


def rename(staged: Path, final: Path) -> None:
    """Give a complete file its final name, in place of an earlier file."""
    os.replace(str(staged), str(final))  # text: a path of a bucket would fetch the earlier file


def _tell_replaced(directory: Path) -> None:
    """Tell the bucket of a directory, if any, that its earlier files are gone."""
    if (found := bucket_of(directory)) is not None:
        found[0].replaced(found[1])


@contextmanager
def committing(*outputs: Path) -> Iterator[None]:
    """Hold the lease of outputs in a bucket, and commit them when the block ends without an error.
    Other outputs are committed by their renames."""
    places = [found for found in map(bucket_of, outputs) if found is not None]
    if not places:
        yield
        return
    with places[0][0].writing(*(inside for _, inside in places)):
        yield


@contextmanager
def output_lock(directory: Path, *outputs: Path) -> Iterator[None]:
    """Lock `directory` for this process and delete the leftovers of a killed writer in it. In a
    bucket, `outputs`, by default the directory, are committed when the block ends without an error.

    The lock is on the file `.lock`, which is removed at the end; the kernel frees the lock when the
    process that holds it ends. Raises LockedError if another process holds the lock (E-LOCKED),
    and for a bucket also the errors of `Bucket.writing`.
    """
    path = directory / LOCK_NAME
    outputs = outputs or (directory, directory.with_name(f".{directory.name}.versions"))
    with _locked(path) as file:
        remove_leftovers(directory)
        try:
            with committing(*outputs):
                yield
        finally:
            # If the file was removed while it was locked, a waiting process has created a new one.
            if _is_at(path, file):
                path.unlink()
                _remove_lock_dir(directory)


def clear_left(directory: Path, *names: str) -> None:
    """Delete the leftovers of a killed writer beside a current output: temporary files, the lock,
    and the files in `names`. An output that is current may never be written again, so no later run
    would delete them. If another process is writing, or the directory is read-only, all files
    stay."""
    left = [directory / name for name in (LOCK_NAME, *names)]
    if any(path.exists() for path in left) or any(local_path(directory).rglob(f"*{TMP_MARK}*")):
        with suppress(LockedError, OSError), output_lock(directory):
            for path in left[1:]:
                path.unlink(missing_ok=True)


def _locked(path: Path) -> IO[str]:
    """Open the file `path`, which is created if it is missing; the lock lasts as long as the file
    is open."""
    num_absent = 0
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = open(path, "a+")  # noqa: SIM115 (closed by the caller)
        except (FileNotFoundError, FileExistsError):  # the directory was changed by another process
            num_absent += 1
            if num_absent == _MAX_ABSENT:
                raise
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with file:
                file.seek(0)
                raise LockedError(
                    "another process is writing to this directory",
                    where=path.parent,
                    found=f"lock held by pid {file.read().strip() or 'unknown'}",
                    do="wait until that process ends, or end it, and run again",
                ) from None
        if _is_at(path, file):
            _sign(file)
            return file
        file.close()  # the file was removed, or the directory was replaced


def _sign(file: IO[str]) -> None:
    """Write the process id into a lock file; if that fails, as on a full disk, free the lock."""
    try:
        with named_errors(file.name):
            os.ftruncate(file.fileno(), 0)
            os.write(file.fileno(), str(os.getpid()).encode())
    except BaseException:
        file.close()
        raise


def _remove_lock_dir(directory: Path) -> None:
    """Remove a directory that was created only for a lock."""
    if directory.parent.name == LOCKS_NAME:
        with suppress(OSError):  # another process made a lock in the directory
            directory.rmdir()
            directory.parent.rmdir()


def _is_at(path: Path, file: IO[str]) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def remove_leftovers(directory: Path) -> None:
    """Delete temporary files and staging directories of killed writers, by their names. Files of an
    inner output with its own lock are not deleted: the inner output's writer is running, or its
    next writer deletes them.
    """
    directory = local_path(directory)
    for path in directory.rglob(f"*{TMP_MARK}*"):
        if _LEFTOVER.fullmatch(path.name) and not _has_own_lock(directory, path):
            _remove(path)


def _has_own_lock(directory: Path, left: Path) -> bool:
    """Whether a temporary file belongs to an output below `directory` that has a separate lock."""
    for path in (left, *takewhile(lambda parent: parent != directory, left.parents)):
        name = path.name.partition(TMP_MARK)[0]
        locks = [path.parent / LOCKS_NAME / one for one in (name, name.removeprefix("."))]
        if any((lock / LOCK_NAME).exists() for lock in (path, *locks)):
            return True
    return False


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def replacing(path: Path, *beside: Path) -> Iterator[None]:
    """Lock the file or directory `path`, and delete the leftovers of a killed writer of `path` and
    of the files `beside`, which the holder of this lock writes too. Raises the errors of
    `output_lock`. The parent directory itself is not locked, since this would delete the temporary
    files of all its children."""
    with output_lock(path.parent / LOCKS_NAME / path.name, path, *beside):
        for one in (path, *beside):
            for name in (one.name, f".{one.name}"):
                for left in local_path(one.parent).glob(f"{glob.escape(name)}{TMP_MARK}*"):
                    _remove(left)
        yield


@contextmanager
def writing_if(
    is_stale: Callable[[], bool],
    path: Path,
    lock: Callable[[Path], AbstractContextManager[None]] = replacing,
) -> Iterator[bool]:
    """Hold the lock of an output; yields whether the output is to be made. In a bucket, an output
    that is current takes no lease. Raises the errors of `output_lock`."""
    if bucket_of(path) is not None and not is_stale():
        yield False
        return
    with lock(path):
        yield is_stale()
