"""A disk that fails, or a machine that stops, at the k-th change of a file.

Everything by which Python changes files is counted below one directory: opening for writing, every
write of a buffer, fsync, rename, link, removal, making a directory. So writers are tested without
their help, also those that pass every helper by. What C code writes through a descriptor of its own
(`numpy.save`) is not counted; the opening, the fsync and the rename around it are.

After a kill nothing more is changed, whatever `except` and `finally` try: their process would not
live to do it. After a power cut, bytes that were not synced are gone as well; names are not.
"""

import builtins
import errno
import io
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from nmoe_core.base import atomic
from tests.crash.sites import site_of

KILL, POWER_CUT, SIGKILL = "kill", "power cut", "SIGKILL"
# What the system says of a disk that is full, over its quota, broken or read-only.
ERRORS = ("ENOSPC", "EIO", "EDQUOT", "EROFS")
_MOVES = ("replace", "rename", "link", "symlink")
_OTHERS = ("unlink", "remove", "mkdir", "rmdir", "truncate", "ftruncate")


class Killed(BaseException):
    """The process ends here: no code of the product may catch this and go on."""


class Change(NamedTuple):
    """One change of a file: what, the path below the root, and the site that made it."""

    step: str
    path: str
    site: str | None


class Disk:
    """Changes below `root`, of which the k-th (from 1) fails in the way `how`: an error's name, or
    one of the three ends of a process."""

    def __init__(self, root: Path, k: int = 0, how: str = "") -> None:
        self.root, self._k, self._how = os.path.realpath(root), k, how
        self.changes: list[Change] = []
        self.is_dead = False
        self._synced: dict[tuple[int, int], int] = {}  # bytes of open files that are on the disk
        self._truncate, self._real_write = os.truncate, os.write

    @contextmanager
    def __call__(self) -> Iterator["Disk"]:
        """Inside, changes are counted."""
        with pytest.MonkeyPatch.context() as patch:
            for name in (*_MOVES, *_OTHERS):
                patch.setattr(os, name, self._counted(name, getattr(os, name)))
            patch.setattr(os, "fsync", self._fsync)
            patch.setattr(os, "write", self._write)
            for module in (builtins, io):
                patch.setattr(module, "open", self._opener(builtins.open))
            patch.setattr(atomic, "_LIBC", _Libc(self, atomic._LIBC))
            yield self

    def step(self, name: str, path: Any) -> None:
        """Count one change of a path, and fail if it is its turn."""
        relative = self._relative(path)
        if relative is None:
            return
        if self.is_dead:
            raise Killed
        self.changes.append(Change(name, relative, site_of(sys._getframe(1))))
        if len(self.changes) != self._k:
            return
        if self._how == SIGKILL:
            os.kill(os.getpid(), signal.SIGKILL)
        if self._how in (KILL, POWER_CUT):
            self.is_dead = True
            if self._how == POWER_CUT:
                self._lose_unsynced()
            raise Killed
        code = getattr(errno, self._how)
        raise OSError(code, os.strerror(code), None if name in ("write", "fsync") else str(path))

    def _relative(self, path: Any) -> str | None:
        if not isinstance(path, str | bytes | os.PathLike):
            return None
        whole = os.path.abspath(os.fsdecode(path))
        inside = os.path.join(os.path.realpath(os.path.dirname(whole)), os.path.basename(whole))
        return inside[len(self.root) + 1 :] if inside.startswith(self.root + os.sep) else None

    def _counted(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def change(*arguments: Any, **options: Any) -> Any:
            path = arguments[1 if name in _MOVES else 0]
            if isinstance(path, int):
                path = _path_of(path)
            if options.get("dir_fd") is not None:
                path = os.path.join(_path_of(options["dir_fd"]), path)
            is_new_directory = name == "mkdir" and os.path.isdir(path)
            if not is_new_directory:
                self.step(name, path)
            return real(*arguments, **options)

        return change

    def _fsync(self, descriptor: int) -> None:
        path = _path_of(descriptor)
        self.step("fsync", path)
        at = os.fstat(descriptor)  # tests need not wait for a real disk
        self._synced[at.st_dev, at.st_ino] = at.st_size

    def _write(self, descriptor: int, payload: bytes) -> int:
        self.step("write", _path_of(descriptor))
        return self._real_write(descriptor, payload)

    def _opener(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def open(file: Any, mode: str = "r", buffering: int = -1, *more: Any, **named: Any) -> Any:
            is_written = set(mode) & set("wax+") and "opener" not in named  # no unnamed file
            if not is_written or self._relative(file) is None:
                return real(file, mode, buffering, *more, **named)
            self.step("open", file)
            raw = _Raw(self, file, mode.replace("b", "").replace("t", ""))
            at = os.fstat(raw.fileno())
            self._synced.setdefault((at.st_dev, at.st_ino), at.st_size)
            if buffering == 0:
                return raw
            buffer = (io.BufferedRandom if "+" in mode else io.BufferedWriter)(raw)
            if "b" in mode:
                return buffer
            return io.TextIOWrapper(buffer, *more, **named)

        return open

    def _lose_unsynced(self) -> None:
        for directory, _, names in os.walk(self.root):
            for name in names:
                path = os.path.join(directory, name)
                at = os.lstat(path)
                size = self._synced.get((at.st_dev, at.st_ino), at.st_size)
                if size < at.st_size:
                    self._truncate(path, size)


class _Raw(io.FileIO):
    """A file whose writes are counted; one that fails has written half of its bytes."""

    def __init__(self, disk: Disk, file: Any, mode: str) -> None:
        super().__init__(file, mode)
        self._disk = disk
        self._error: OSError | None = None

    def write(self, payload: Any) -> int:
        if self._disk.is_dead:  # a buffer that is flushed by its finaliser
            return len(payload)
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        half = memoryview(payload)[: len(payload) // 2]
        try:
            self._disk.step("write", self.name)
        except Killed:
            super().write(half)
            raise
        except OSError as error:
            # As the system does it: what fits is written, and the next call says why not all.
            if not len(half):
                raise
            self._error = error
            return super().write(half) or 0
        return super().write(payload) or 0

    def truncate(self, size: int | None = None) -> int:
        self._disk.step("truncate", self.name)
        return super().truncate(size)


class _Libc:
    """The C library of `exchange_dirs`."""

    def __init__(self, disk: Disk, real: Any) -> None:
        self._disk, self._real = disk, real

    def renameat2(self, *arguments: Any) -> int:
        self._disk.step("exchange", arguments[3])
        return self._real.renameat2(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def _path_of(descriptor: int) -> str:
    return os.readlink(f"/proc/self/fd/{descriptor}")
