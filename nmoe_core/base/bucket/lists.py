"""The lists of a bucket's directories: read when they are needed, and again when they changed.

One request lists the ETags of a thousand lists. It is repeated after ten seconds, or later if
listing takes long; only lists whose ETag changed are read again, from the local copies if possible.
"""

import posixpath
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from loader.files.addresses import join
from loader.files.stores import store
from loader.files.stores.objects import LIST_NAME, LISTS, Entry, FileList, list_key, read_list
from nmoe_core.base.bucket.lease import Lease
from nmoe_core.base.bucket.local import LocalFiles

_EVERY_S = 10.0
_MOST_SHARE = 20  # listing takes at most this part of the time
_AHEAD = 64
_WORKERS = 8
_EMPTY = FileList({})
# A list with fewer bytes names no file.
_LEAST_BYTES = len(FileList({"x": Entry(0, "0" * 64, "x")}).to_bytes())


class _Known(NamedTuple):
    """The list of a directory with its ETag; None if the directory has no list."""

    tag: str | None
    files: FileList


_NONE = _Known(None, _EMPTY)


class Lists:
    """The lists below `url`; `local` keeps copies of them for other processes."""

    def __init__(self, url: str, local: LocalFiles) -> None:
        self._url = url
        self._local = local
        self._lock = threading.RLock()
        self._tags: dict[str, str] = {}
        self._inside: dict[str, set[str]] = {}
        self._empty: set[str] = set()
        self._known: dict[str, _Known] = {}
        self._changed: set[str] = set()
        self._listed_s = -float("inf")
        self._took_s = 0.0

    def entry(self, path: str) -> Entry | None:
        """The entry of a file; None if the bucket lacks it."""
        directory, name = posixpath.split(path)
        return self.files(directory).get(name)

    def files(self, directory: str) -> Mapping[str, Entry]:
        """The files of a directory by name; empty if the bucket lacks it."""
        self._refresh_if_old()
        with self._lock:
            tag = self._tags.get(directory)
            if tag is None:
                return _EMPTY.files
            known = self._known.get(directory)
            if known is None or known.tag != tag:
                self._read(directory)
            return self._known[directory].files.files

    def directories(self, above: str) -> set[str]:
        """Names of the directories in a directory."""
        self._refresh_if_old()
        return self._inside.get(above, set())

    def is_directory(self, path: str) -> bool:
        """Whether the bucket has files below a path."""
        self._refresh_if_old()
        return path in self._inside

    def take_changed(self) -> set[str]:
        """Directories whose lists changed since the last call."""
        if not self._changed:
            return set()
        with self._lock:
            found = self._changed
            self._changed = set()
        return found

    def refresh(self) -> None:
        """Ask the bucket which lists have changed."""
        with self._lock:  # a commit of another thread is not forgotten
            started = time.monotonic()
            found: dict[str, str] = {}
            empty: set[str] = set()
            for one in store.listing(join(self._url, LISTS)):
                directory, name = posixpath.split(one.path)
                if name == LIST_NAME:
                    found[directory] = one.tag
                    if one.size_bytes < _LEAST_BYTES:
                        empty.add(directory)
            self._changed |= {path for path, tag in self._tags.items() if found.get(path) != tag}
            self._tags = found
            self._empty = empty
            self._lay_out()
            self._listed_s = time.monotonic()
            self._took_s = self._listed_s - started

    def reread(self, directory: str) -> Mapping[str, Entry]:
        """Read the files of a directory from the bucket."""
        return self._reread(directory).files

    def _reread(self, directory: str) -> FileList:
        return self._take(directory, store.read_tagged(self._list_url(directory)))

    def _take(self, directory: str, found: tuple[bytes, str] | None) -> FileList:
        """Keep a list that was read with its ETag."""
        known = _NONE
        if found is not None:
            content, tag = found
            known = _Known(tag, read_list(content, self._list_url(directory)))
            self._local.keep_list(directory, tag, content)
        self._keep(directory, known)
        return known.files

    def replace(
        self,
        directory: str,
        new: Mapping[str, Entry],
        removed: Iterable[str],
        lease: Lease,
        *,
        is_claim: bool = False,
    ) -> None:
        """Add files to a list and remove others, as the owner of a lease; files of other writers
        stay. `is_claim`: also write the number of the lease, so that a commit of its earlier owner
        is refused. Raises LockedError if the lease is lost (E-LEASE-LOST)."""
        gone = set(removed)
        if directory not in self._known and directory in self._tags:
            self.reread(directory)
        while True:
            known = self._known.get(directory, _NONE)
            files = {name: one for name, one in known.files.files.items() if name not in gone}
            claim = lease.number if is_claim else known.files.claim
            made = FileList({**files, **new}, claim)
            content = made.to_bytes()
            tag = store.write_if(self._list_url(directory), content, known.tag)
            if tag is not None:
                self._keep(directory, _Known(tag, made))
                self._local.keep_list(directory, tag, content)
                return
            # The list is another now, or a repeated request met the answer to its first try.
            if self._reread(directory) == made:
                return
            lease.renew()
            lease.check()

    def _refresh_if_old(self) -> None:
        with self._lock:
            limit_s = max(_EVERY_S, _MOST_SHARE * self._took_s)
            if time.monotonic() - self._listed_s > limit_s:
                self.refresh()

    def _read(self, first: str) -> None:
        """Read the list of a directory, and those of the directories that follow it."""
        above, name = posixpath.split(first)
        following = sorted(one for one in self._inside.get(above, ()) if one > name)[:_AHEAD]
        near = [first, *(posixpath.join(above, one) for one in following if first)]
        missing = [one for one in near if not self._recall(one)]
        if len(missing) < 2:
            for directory in missing:
                self.reread(directory)
            return
        # Threads only read: this thread holds the lock and keeps what they read.
        with ThreadPoolExecutor(_WORKERS) as pool:
            found = pool.map(store.read_tagged, map(self._list_url, missing))
            for directory, one in zip(missing, found, strict=True):
                self._take(directory, one)

    def _recall(self, directory: str) -> bool:
        """Whether the current list of a directory is known, or has a local copy."""
        tag = self._tags.get(directory)
        known = self._known.get(directory)
        if tag is None or (known is not None and known.tag == tag):
            return True
        content = self._local.list_of(directory, tag)
        if content is None:
            return False
        self._known[directory] = _Known(tag, read_list(content, self._list_url(directory)))
        return True

    def _keep(self, directory: str, known: _Known) -> None:
        with self._lock:
            self._known[directory] = known
            if self._tags.get(directory) != known.tag:
                self._changed.add(directory)
            if known.tag is None:
                self._tags.pop(directory, None)
                return
            self._tags[directory] = known.tag
            if known.files.files:
                self._empty.discard(directory)
                self._add(directory)
            elif directory not in self._empty:
                self._empty.add(directory)
                self._lay_out()

    def _lay_out(self) -> None:
        """Find the directories above the lists that name a file."""
        self._inside = {}
        for directory in self._tags:
            if directory not in self._empty:
                self._add(directory)

    def _add(self, directory: str) -> None:
        self._inside.setdefault(directory, set())
        while directory:
            directory, name = posixpath.split(directory)
            names = self._inside.setdefault(directory, set())
            if name in names:
                return
            names.add(name)

    def _list_url(self, directory: str) -> str:
        return join(self._url, list_key(directory))
