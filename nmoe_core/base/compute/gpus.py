"""Chooses the GPU of a process, so that processes on one machine share all its GPUs."""

import fcntl
import functools
import os
import tempfile
from pathlib import Path

_VISIBLE = "CUDA_VISIBLE_DEVICES"


def own_gpu(count: int) -> int:
    """Index of a GPU, of `count` that are visible: the one that the fewest processes have taken.

    A process has one, and keeps it until it ends, however it ends.
    """
    return _own_gpu(count, os.getpid())


@functools.cache
def _own_gpu(count: int, pid: int) -> int:
    """`pid`: a fork is another process."""
    directory = Path(tempfile.gettempdir()) / f"nmoe_gpus_{os.getuid()}"
    directory.mkdir(exist_ok=True)
    visible = os.environ.get(_VISIBLE, "").split(",")
    names = visible if len(visible) == count else [str(index) for index in range(count)]
    place = 0  # place of the process among the processes on one GPU
    while True:
        for index, name in enumerate(names):
            # Locked until the process ends: a number, unlike a file object, is never closed.
            file = os.open(directory / f"{name}.{place}", os.O_RDWR | os.O_CREAT)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(file)
                continue
            return index
        place += 1
