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
from nmoe_core.base.bucket.paths import bucket_of

SEND_EVERY_S = 5.0


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
        self._sent = os.stat(self._text).st_size if os.path.exists(self._text) else 0

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
        self._bucket.send_draft(self._path, self._sent, piece)
        self._sent = size
        self._sent_s = time.monotonic()

    def commit(self) -> None:
        """Commit the file."""
        self._stack.close()


def keep_draft(path: Path) -> None:
    """Send a small file that is replaced as a whole; does nothing for a local file."""
    if (found := bucket_of(path)) is not None:
        bucket, inside = found
        bucket.send_draft(inside, 0, read_file(str(path)))


def restore(path: Path) -> None:
    """Complete a file by its draft, unless the file on this machine is longer. Does nothing for a
    local file."""
    found = bucket_of(path)
    if found is None:
        return
    bucket, inside = found
    pieces = bucket.drafts(inside)
    text = os.fspath(path)
    size = os.stat(text).st_size if os.path.exists(text) else 0
    if not pieces or size >= max(offset + len(piece) for offset, piece in pieces):
        return
    with open(text, "r+b" if os.path.exists(text) else "w+b") as file:
        for offset, piece in pieces:
            if offset > file.seek(0, os.SEEK_END):
                break  # a piece is missing: the rest cannot follow
            file.truncate(offset)
            file.seek(offset)
            file.write(piece)
