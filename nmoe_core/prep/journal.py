"""The journal of a pass: the position at which the next run resumes.

`.prep/journal.json` beside the shards names the inputs of the pass, the position up to which
everything is written, the length of every file at that position, and the counts. It is replaced
every 0.25 to 3 seconds, namely after a fiftieth of the time so far, and after the files that it
names are durable. So an interrupted run loses only the work since then. A thread does the fsync
while the pass continues.
"""

import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from loader.files.checksummed_json import sealed
from nmoe_core.base.atomic import failpoint, start_writeback, write_json
from nmoe_core.base.bucket.draft import Checkpoints, restore_tree
from nmoe_core.base.fingerprint import read_sealed

STAGING_NAME = ".prep"
_NAME = "journal.json"
INTERVAL_S = 3.0
# A short pass has less to lose, so it commits more often.
_FIRST_INTERVAL_S = 0.25
_LOST_SHARE = 0.02
# On a slow disk an fsync may take longer than the interval; fsyncs take at most this share of the
# time.
_MAX_SHARE = 0.5
_Entry = Callable[[], dict[str, Any]]  # returns the state
_Flush = Callable[[], list[int]]  # flushes files; returns duplicate descriptors to fsync


class Journal:
    """The journal of one split, whose directory is `{data_root}/{source}/{split}`."""

    def __init__(self, split_dir: Path) -> None:
        self.directory = split_dir / STAGING_NAME
        self._path = self.directory / _NAME
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._started_s = time.monotonic()
        self._next_s = self._started_s + min(INTERVAL_S, _FIRST_INTERVAL_S)
        self._checkpoints = Checkpoints(self.directory, self._path)
        self.is_written = False

    def read(self) -> dict[str, Any] | None:
        """The last commit; None if there is no journal or the journal is damaged.

        Without a journal the pass starts over, which costs time but gives the same bytes.
        """
        restore_tree(self.directory)
        return read_sealed(self._path)

    def commit_if_due(self, entry: _Entry, flush: _Flush) -> None:
        """Start to commit the current state, unless the last commit is too recent."""
        if time.monotonic() < self._next_s or (self._thread and self._thread.is_alive()):
            return
        self.wait()
        work = (flush(), entry())
        self._thread = threading.Thread(target=self._commit, args=work, name="prep-journal")
        self._thread.start()

    def commit(self, entry: _Entry, flush: _Flush) -> None:
        """Commit the current state before returning."""
        self.wait()
        self._commit(flush(), entry())
        self.wait()

    def wait(self) -> None:
        """Wait for a commit in progress; raises its error."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error = self._error
            self._error = None
            raise error

    def remove(self) -> None:
        """Remove the journal and all staged files."""
        if self._thread is not None:
            self._thread.join()
        # the journal is removed first: without a journal, staged files are ignored
        self._path.unlink(missing_ok=True)
        shutil.rmtree(self.directory, ignore_errors=True)

    def _commit(self, descriptors: list[int], entry: dict[str, Any]) -> None:
        started = time.monotonic()
        try:
            for descriptor in descriptors:
                start_writeback(descriptor)
            for descriptor in descriptors:
                failpoint("sync")
                os.fsync(descriptor)
            write_json(self._path, sealed(entry))
            self.is_written = True
            self._checkpoints.send_if_due()
        except BaseException as error:  # noqa: BLE001  (raised by wait, in the pass's thread)
            self._error = error
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        now = time.monotonic()
        lost_s = max(_FIRST_INTERVAL_S, (now - self._started_s) * _LOST_SHARE)
        self._next_s = now + max(min(INTERVAL_S, lost_s), (now - started) / _MAX_SHARE)
