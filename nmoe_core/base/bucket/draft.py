"""Unfinished files of a bucket's writers, sent in pieces while they grow.

A machine that is lost with its disk then loses at most the last seconds of an unfinished file, such
as answers that were paid for. A piece is an object named by its offset; a file is its committed
version, cut at each offset and continued by the piece. The commit of the file removes its pieces.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from pathlib import Path

from loader.files.regular import open_file, read_file
from nmoe_core.base.bucket.paths import bucket_of, local_path

SEND_EVERY_S = 5.0
CHECKPOINT_EVERY_S = 180.0
_PIECE_BYTES = 64 * 2**20


class Draft:
    """The draft of a file that only grows; holds the lease of the file until `commit`.

    Opened before the file itself: it restores the pieces that another machine sent. Raises the
    errors of `Bucket.writing`.
    """

    def __init__(self, path: Path) -> None:
        found = bucket_of(path)
        assert found is not None
        self._bucket, self._path = found
        self._text = str(path)
        self._stack = ExitStack()
        self._stack.enter_context(self._bucket.writing(self._path))
        self._sent_s = time.monotonic()
        restore(path)
        # What was restored is sent again, with the pieces of this writer.
        self._sent = self._bucket.committed_bytes(self._path)

    @property
    def sent_bytes(self) -> int:
        """Size of the file as the bucket has it."""
        return self._sent

    def cut(self, size: int) -> None:
        """Forget the bytes behind the first `size`."""
        self._sent = min(self._sent, size)

    def send_if_due(self, size: int) -> None:
        """Send the first `size` bytes as far as they were not sent, at most every five seconds."""
        if time.monotonic() - self._sent_s < SEND_EVERY_S or size == self._sent:
            return
        with open_file(self._text) as file:
            file.seek(self._sent)
            piece = file.read(size - self._sent)
        self._bucket.pieces.send(self._path, self._sent, piece)
        self._sent = size
        self._sent_s = time.monotonic()

    def commit(self) -> None:
        """Commit the file."""
        self._stack.close()


class Checkpoints:
    """Sends a directory of unfinished files at intervals: what each file has grown by, and last the
    file that says how much of the others counts. Does nothing for a local directory."""

    def __init__(self, directory: Path, last: Path) -> None:
        self._directory = directory
        self._last = last
        self._sent: dict[Path, int] = {}
        self._next_s = time.monotonic() + CHECKPOINT_EVERY_S

    def send_if_due(self) -> None:
        """Send what is new, if the last time is long enough ago."""
        found = bucket_of(self._directory)
        if found is None or time.monotonic() < self._next_s:
            return
        bucket, _ = found
        local = local_path(self._directory)
        last = read_file(str(self._last))
        for path in sorted(local.rglob("*")):
            if not path.is_file() or path == self._last:
                continue
            start = self._sent.get(path, 0)
            with open_file(path) as file:
                file.seek(start)
                while piece := file.read(_PIECE_BYTES):
                    bucket.pieces.send(_inside(path), start, piece)
                    start += len(piece)
            self._sent[path] = start
        bucket.pieces.send(_inside(self._last), 0, last)
        self._next_s = time.monotonic() + CHECKPOINT_EVERY_S


def restore_tree(directory: Path) -> None:
    """Restore the files that `Checkpoints` of another machine sent; does nothing for a local
    directory, or if the directory has files."""
    found = bucket_of(directory)
    if found is None or any(path.is_file() for path in local_path(directory).rglob("*")):
        return
    for name in found[0].pieces.files(found[1]):
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        restore(path)


def _inside(path: Path) -> str:
    found = bucket_of(path)
    assert found is not None
    return found[1]


def keep_draft(path: Path) -> None:
    """Send a small file that is replaced as a whole; does nothing for a local file."""
    if (found := bucket_of(path)) is not None:
        bucket, inside = found
        bucket.pieces.send(inside, 0, read_file(str(path)))


def restore(path: Path) -> None:
    """Complete a file by its draft, unless the file on this machine is longer. Does nothing for a
    local file."""
    found = bucket_of(path)
    if found is None:
        return
    bucket, inside = found
    spans = bucket.pieces.spans(inside)
    text = os.fspath(path)
    size = os.stat(text).st_size if os.path.exists(text) else 0
    if not spans or size >= max(end for _, _, end in spans):
        return
    with open(text, "r+b" if os.path.exists(text) else "w+b") as file:
        for name, offset, _ in spans:
            piece = bucket.pieces.read(inside, name)
            if piece is None or offset > file.seek(0, os.SEEK_END):
                break  # a piece is missing: the rest cannot follow
            file.truncate(offset)
            file.seek(offset)
            file.write(piece)
