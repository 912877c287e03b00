"""Chooses the GPU of a process, so that processes on one machine share all its GPUs."""

import fcntl
import functools
import os
import tempfile
from pathlib import Path

_VISIBLE = "CUDA_VISIBLE_DEVICES"


def own_gpu(count: int) -> int:
    """Choose the GPU with the fewest processes among `count` visible GPUs; returns its index.

    A process keeps its GPU until it ends; the kernel then frees it.
    """
    return _own_gpu(count, os.getpid())


@functools.cache
def _own_gpu(count: int, pid: int) -> int:
    """`pid` is part of the cache key, since a fork is another process."""
    directory = Path(tempfile.gettempdir()) / f"nmoe_gpus_{os.getuid()}"
    directory.mkdir(exist_ok=True)
    visible = os.environ.get(_VISIBLE, "").split(",")
    names = visible if len(visible) == count else [str(index) for index in range(count)]
    place = 0  # number of this process among the processes on one GPU
    while True:
        for index, name in enumerate(names):
            # Locked until the process ends: Python never closes a descriptor that has no file
            # object.
            file = os.open(directory / f"{name}.{place}", os.O_RDWR | os.O_CREAT)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(file)
                continue
            return index
        place += 1
