"""The position of a pass, so that the next run resumes there.

`.prep/journal.json` beside the shards names the inputs of the pass, the position up to which
everything is written, the length of every file at that position, and the counts. It is replaced
whenever a fiftieth of the time so far has passed, at most every 3 seconds, after the files it names
are durable: a run that ends in any way loses only its work since then. Syncing happens in a thread,
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
from nmoe_core.base.fingerprint import read_sealed

STAGING_NAME = ".prep"
_NAME = "journal.json"
INTERVAL_S = 3.0
# A short pass has less to lose, so it commits more often.
_FIRST_INTERVAL_S = 0.25
_LOST_SHARE = 0.02
# Syncing may take longer than the interval on a slow disk: then it takes this share of the time.
_MAX_SHARE = 0.5
_Entry = Callable[[], dict[str, Any]]  # gives the state
_Flush = Callable[[], list[int]]  # hands files to the system; duplicate descriptors, to be synced


class Journal:
    """The journal of one split, whose directory is `{data_root}/{source}/{split}`."""

    def __init__(self, split_dir: Path) -> None:
        self.directory = split_dir / STAGING_NAME
        self._path = self.directory / _NAME
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._started_s = time.monotonic()
        self._next_s = self._started_s + min(INTERVAL_S, _FIRST_INTERVAL_S)
        self.is_written = False

    def read(self) -> dict[str, Any] | None:
        """The last commit; None if there is none or if it is damaged.

        Without a journal the pass starts again: that costs work, and the bytes are the same.
        """
        return read_sealed(self._path)

    def commit_if_due(self, entry: _Entry, flush: _Flush) -> None:
        """Start to commit the present state, unless the last commit was a moment ago."""
        if time.monotonic() < self._next_s or (self._thread and self._thread.is_alive()):
            return
        self.wait()
        work = (flush(), entry())
        self._thread = threading.Thread(target=self._commit, args=work, name="prep-journal")
        self._thread.start()

    def commit(self, entry: _Entry, flush: _Flush) -> None:
        """Commit the present state before returning."""
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
        """Drop the journal and everything staged with it."""
        if self._thread is not None:
            self._thread.join()
        self._path.unlink(missing_ok=True)  # first: staged files are not used without it
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
        except BaseException as error:  # noqa: BLE001  (raised by wait, in the pass's thread)
            self._error = error
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        now = time.monotonic()
        lost_s = max(_FIRST_INTERVAL_S, (now - self._started_s) * _LOST_SHARE)
        self._next_s = now + max(min(INTERVAL_S, lost_s), (now - started) / _MAX_SHARE)
