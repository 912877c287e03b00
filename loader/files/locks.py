"""Locks between processes of a machine; the kernel frees them when their process ends."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file in the block; waits for it, and creates a missing file."""
    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:  # closing alone would not free the lock if a process was forked in the meantime
            fcntl.flock(file, fcntl.LOCK_UN)
