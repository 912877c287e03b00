"""Locks between processes of a machine, which end with the process that holds them."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file, or wait for it; a missing file is created."""
    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:  # closing would leave it to a process that was forked meanwhile
            fcntl.flock(file, fcntl.LOCK_UN)
