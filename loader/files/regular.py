"""Opens regular files only: a pipe would block forever, and a device such as /dev/zero never ends.

Bundles, runs and checkpoints come from other people, and any file in them may be a link to a pipe
or a device. All files are therefore opened for reading through this module.
"""

import errno
import io
import os
import stat
from pathlib import Path
from typing import TypeVar, cast

PathT = TypeVar("PathT", str, Path)


def open_file(path: str | Path, *, buffering: int = -1) -> io.BufferedReader:
    """Open a file for reading bytes. Raises OSError if it is missing, unreadable or not regular."""
    # With buffering=0 this is a FileIO, which has the same methods for reading.
    return cast("io.BufferedReader", open(path, "rb", buffering, opener=_opener))


def read_file(path: str | Path) -> bytes:
    """The bytes of a file. Raises as `open_file`."""
    with open_file(path) as file:
        # Files in /proc are regular but state no size, and they contain secrets of this process.
        return file.read(os.fstat(file.fileno()).st_size)


def regular(path: PathT) -> PathT:
    """The path itself, for libraries that open files themselves. Raises as `open_file`; for a
    missing file it raises nothing, since the library reports it."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return path
    _check(path, mode)
    return path


def _opener(path: str, flags: int) -> int:
    # Without O_NONBLOCK, opening a pipe waits for its writer; regular files ignore this flag.
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    try:
        _check(path, os.fstat(descriptor).st_mode)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _check(path: str | Path, mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "a pipe, socket or device, not a regular file", os.fspath(path))
