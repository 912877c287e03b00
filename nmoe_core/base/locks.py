"""A lock for one output among siblings that other processes may be writing at the same time."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nmoe_core.base.atomic import TMP_MARK, output_lock

LOCKS_NAME = ".locks"


@contextmanager
def replacing(path: Path) -> Iterator[None]:
    """Hold the file or directory `path` and delete what a killed writer of it left beside it.

    `output_lock` on the parent would clear the temporary files of all its children.

    Raises:
        LockedError: Another process holds it (E-LOCKED).
    """
    with output_lock(path.parent / LOCKS_NAME / path.name):
        for name in (path.name, f".{path.name}"):
            for left in path.parent.glob(f"{name}{TMP_MARK}*"):
                if left.is_dir():
                    shutil.rmtree(left)
                else:
                    left.unlink()
        yield
