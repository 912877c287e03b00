"""Sends files of a bucket while they grow, so that little is left to send when they are complete.

A file that is begun without its first bytes, which count what follows, is sent without them: its
entry in the list has them. The object's name has random characters in the place of a digest.
"""

from __future__ import annotations

import hashlib
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from loader.errors import PlanError
from loader.files.addresses import join
from loader.files.regular import open_file
from loader.files.stores import store
from loader.files.stores.objects import object_key
from nmoe_core.base.bucket.paths import Files, bucket_of, local_path
from nmoe_core.base.bucket.scope import Sent

_PIECE_BYTES = 8 * 2**20
_MOST_FILES = 16  # at once; each takes up to five pieces of memory
_LOOK_EVERY_S = 0.1


@contextmanager
def sent_while_growing(
    staged: Path | None, final: Path, suffix: str, first_bytes: int
) -> Iterator[None]:
    """In this block, send the files of `staged` whose names end in `suffix`, in directories below
    it, from byte `first_bytes` on; they only grow. The writer of `final`, to which they are moved
    later without the suffix, then commits what was sent. A file that cannot be sent is left to this
    commit. Does nothing without `staged`, and for local files."""
    found = bucket_of(final)
    if staged is None or found is None:
        yield
        return
    sender = _Sender(local_path(staged), suffix, first_bytes, *found)
    watcher = threading.Thread(target=sender.watch, name="bucket-sender")
    watcher.start()
    try:
        yield
        sender.is_complete = True
    finally:
        sender.is_ended.set()
        watcher.join()


class _Sender:
    """Finds files, and sends each in a thread."""

    def __init__(
        self, staged: Path, suffix: str, first_bytes: int, bucket: Files, final: str
    ) -> None:
        self._staged = staged
        self._suffix = suffix
        self._first_bytes = first_bytes
        self._bucket = bucket
        self._final = final
        self._sending: dict[str, Future[None]] = {}
        self.is_complete = False
        self.is_ended = threading.Event()

    def watch(self) -> None:
        """Begin to send each file that has a complete piece; at the end, wait for all."""
        with ThreadPoolExecutor(_MOST_FILES, "bucket-sender") as pool:
            while not self.is_ended.wait(_LOOK_EVERY_S):
                for path in self._staged.glob(f"*/*{self._suffix}"):
                    inside = path.relative_to(self._staged).as_posix().removesuffix(self._suffix)
                    if inside in self._sending or path.stat().st_size < 2 * _PIECE_BYTES:
                        continue
                    self._sending[inside] = pool.submit(self._send, path, inside)

    def _send(self, path: Path, inside: str) -> None:
        final = f"{self._final}/{inside}"
        name = object_key(final, uuid.uuid4().hex)
        digest = hashlib.sha256()

        def pieces() -> Iterator[bytes]:
            with open_file(path) as file:
                file.seek(self._first_bytes)
                while piece := self._next(file):
                    digest.update(piece)
                    yield piece

        try:
            found = store.write(join(self._bucket.url, name), pieces())
        except (PlanError, OSError):  # the commit sends it again, or raises the error
            return
        if self.is_complete:
            self._bucket.sent[final] = Sent(
                name, self._first_bytes, found.size_bytes, digest.hexdigest()
            )

    def _next(self, file: IO[bytes]) -> bytes:
        """The next piece of a growing file; empty at the end of a complete one."""
        while not self.is_ended.is_set():
            if Path(file.name).stat().st_size - file.tell() >= _PIECE_BYTES:
                return file.read(_PIECE_BYTES)
            self.is_ended.wait(_LOOK_EVERY_S)
        if not self.is_complete:
            raise InterruptedError("the writer failed")
        return file.read(_PIECE_BYTES)
