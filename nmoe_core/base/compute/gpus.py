"""Chooses the GPU of a process, so that processes on one machine share all its GPUs."""

import fcntl
import functools
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from nmoe_core.base.errors import ConfigError

_VISIBLE = "CUDA_VISIBLE_DEVICES"


def own_gpu(count: int) -> int:
    """Choose the GPU with the fewest processes among `count` visible GPUs; returns its index.

    A process keeps its GPU until it ends; the kernel then frees it. Raises ConfigError if the
    directory of locks belongs to another account (E-CONFIG-TEMPORARY).
    """
    return _own_gpu(count, os.getpid())


@functools.cache
def _own_gpu(count: int, pid: int) -> int:
    """`pid` is part of the cache key, since a fork is another process."""
    directory = _locks()
    visible = os.environ.get(_VISIBLE, "").split(",")
    names = visible if len(visible) == count else [str(index) for index in range(count)]
    place = 0  # number of this process among the processes on one GPU
    while True:
        for index, name in enumerate(names):
            # The lock lasts until the process ends: Python never closes a descriptor that has no
            # file object.
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
            file = os.open(directory / f"{name}.{place}", flags, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(file)
                continue
            return index
        place += 1


def _locks() -> Path:
    """The directory of locks, which this account alone may enter. Another account may have made
    this directory first, with links in it, since everyone can write to the directory of temporary
    files."""
    directory = Path(tempfile.gettempdir()) / f"nmoe_gpus_{os.getuid()}"
    with suppress(FileExistsError):
        directory.mkdir(0o700)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        what = "the directory of the locks of GPUs belongs to another account"
        do = "remove it, or set TMPDIR to a directory of your own"
        code = "E-CONFIG-TEMPORARY"
        raise ConfigError(what, where=directory, found=f"uid {found.st_uid}", do=do, code=code)
    directory.chmod(0o700)
    return directory
