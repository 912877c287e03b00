"""Which files the processes of this machine are writing: each writer has a locked file that names
its outputs. The kernel frees the lock when the process ends."""

import fcntl
import json
import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from loader.files.regular import open_file
from nmoe_core.base.bucket.scope import is_below


class Writers:
    """The writers of one bucket on this machine, in `directory`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @contextmanager
    def writing(self, outputs: Sequence[str]) -> Iterator[None]:
        """In this block, `cover` of every process is true for the outputs."""
        self._directory.mkdir(parents=True, exist_ok=True)
        name = f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
        path = self._directory / name
        new = self._directory / f".{name}"
        with open(new, "x") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(json.dumps(list(outputs)))
            file.flush()
            os.replace(new, path)  # no other process sees the file before it is locked
            try:
                yield
            finally:
                path.unlink(missing_ok=True)

    def cover(self, path: str) -> bool:
        """Whether a running process writes this file."""
        with suppress(FileNotFoundError):
            for one in os.listdir(self._directory):
                if not one.startswith(".") and _covers(self._directory / one, path):
                    return True
        return False


def _covers(writer: Path, path: str) -> bool:
    try:
        with open_file(writer) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                outputs = json.loads(file.read() or "[]")
                return any(is_below(path, one) for one in outputs)
            writer.unlink(missing_ok=True)  # its process was killed
            return False
    except FileNotFoundError:
        return False
