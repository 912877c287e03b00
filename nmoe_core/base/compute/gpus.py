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
