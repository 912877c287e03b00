"""A run's root in a bucket: its files are fetched when they are first used, and what a writer has
made is sent when it ends its work without an error.

A writer holds a lease of its output. It sends each new file as an object that is never changed,
then replaces the list of each changed directory, the lists of inner directories first. A list is
replaced only if it is still the one that the writer read. So a reader finds the earlier files or
the new ones, never a mixture, and a writer that is killed leaves only objects that no list names.

Names that begin with a dot stay on this machine: locks, unfinished files, and caches that depend on
its inodes. Kept versions of a split (`.train.versions`) are files like others.
"""

from __future__ import annotations

import os
import posixpath
import stat as kinds
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from loader.files.addresses import address, join
from loader.files.stores.objects import OWN, Entry, root_of
from nmoe_core.base.bucket import paths
from nmoe_core.base.bucket.ahead import SmallFiles, fetch, is_small
from nmoe_core.base.bucket.lease import Lease
from nmoe_core.base.bucket.lists import Lists
from nmoe_core.base.bucket.local import (
    LocalFiles,
    made_status,
    missing_at,
    scratch_of,
    sha256_of_bytes,
    status_at,
)
from nmoe_core.base.bucket.pieces import Pieces
from nmoe_core.base.bucket.scope import (
    Parts,
    Scope,
    Sent,
    claim,
    commit,
    is_of_machine,
    local_files,
)
from nmoe_core.base.bucket.writers import Writers

LEASES = f"{OWN}/leases"
_GIB = 2**30


class Bucket:
    """The files below a URL, with their copies in a local directory.

    Args:
        url: The root of the run.
        scratch: Directory for the local directories of all roots; None for the user's cache.
        scratch_gib: Limit of the local files in GiB; 0 for no limit.
    """

    def __init__(self, url: str, scratch: str | None = None, scratch_gib: float = 0) -> None:
        self.url = address(url).rstrip("/")
        self.scratch = scratch
        self.scratch_gib = scratch_gib
        self.directory = scratch_of(self.url, scratch)
        self.prefix = f"{self.directory}/"
        own = self.directory / OWN
        self.local = LocalFiles(self.directory, own, int(scratch_gib * _GIB))
        self.lists = Lists(self.url, self.local)
        self.pieces = Pieces(self.url)
        self.sent: dict[str, Sent] = {}
        self._parts = Parts(self.url, self.prefix, self.lists, self.local, self.sent)
        self._small = SmallFiles(self._parts)
        self._left = own / "left"
        self._writers = Writers(own / "writers")
        self._scopes: list[Scope] = []
        self._ready: defaultdict[str, set[str]] = defaultdict(set)

    def url_of(self, path: str) -> str:
        """The address of a path in the bucket."""
        return join(self.url, path) if path else self.url

    def __reduce__(self) -> tuple[Callable[..., Bucket], tuple[Any, ...]]:
        return open_bucket, (self.url, self.scratch, self.scratch_gib)

    def recipe(self, path: str) -> tuple[Callable[..., Path], tuple[Any, ...]]:
        """How another process opens a path of this bucket."""
        return open_path, (self.url, self.scratch, self.scratch_gib, path)

    def ensure(self, path: str) -> None:
        """Fetch a file unless its current version is on this machine. In a writer's scope, files
        that it has changed stay as they are. Raises FormatError if the object is missing or has
        other bytes (E-OBJECT), and the errors of `store.copy`."""
        text = self.prefix + path
        if not path or is_of_machine(path):
            return
        directory, name = posixpath.split(path)
        self.lists.files(directory)  # if the lists are old, this finds what has changed
        for changed in self.lists.take_changed():
            self._ready.pop(changed, None)
        if name in self._ready[directory] and os.path.lexists(text):
            return
        scope = self._scope_of(path)
        entry = self._entry(path)
        if entry is None:
            if self.lists.is_directory(path):
                os.makedirs(text, exist_ok=True)
            elif scope is None and os.path.isfile(text) and self._reread(path) is None:
                self._set_aside(path)
            return
        if scope is not None and scope.is_removed(path):
            return
        if not self._is_current(path, entry):
            entry = self.lists.entry(path) or entry
            # A writer of this machine may make the file while it is fetched.
            fetch(self._parts, path, entry, lambda: self._is_open(path) and os.path.lexists(text))
            if is_small(entry) and scope is None:
                self._small.fetch_after(path)
        self._ready[directory].add(name)

    def has_copy(self, path: str) -> bool:
        """Whether questions about a path are answered by the file on this machine."""
        if is_of_machine(path):
            return True
        status = status_at(self.prefix + path)
        if status is None:
            return False
        if kinds.S_ISDIR(status.st_mode) or self._is_open(path):
            return True
        entry = self.lists.entry(path)
        copy = self.local.find(path, status)
        return entry is not None and copy is not None and copy.sha256 == entry.sha256

    def digest(self, path: str) -> str | None:
        """The SHA-256 of a file in the bucket; None if there is none, or a writer of this machine
        may have changed it."""
        entry = self._current_entry(path)
        if entry is None:
            return None
        status = status_at(self.prefix + path)
        if status is not None and self._is_open(path):
            copy = self.local.find(path, status)
            return None if copy is None else copy.sha256
        return entry.sha256

    def is_file(self, path: str) -> bool:
        """Whether a path is a file, on this machine or in the bucket."""
        if not is_of_machine(path):
            if self._current_entry(path) is not None:
                return True
            if not self._is_open(path):
                return False
        return os.path.isfile(self.prefix + path)

    def is_dir(self, path: str) -> bool:
        """Whether a path is a directory, on this machine or in the bucket."""
        if not is_of_machine(path) and self.lists.is_directory(path):
            scope = self._scope_of(path)
            if scope is None or not scope.is_removed(path):
                return True
        return os.path.isdir(self.prefix + path)

    def names(self, path: str) -> list[str]:
        """Names in a directory, sorted. Raises FileNotFoundError if it does not exist."""
        if not self.is_dir(path):
            raise missing_at(self.prefix + path)
        found: set[str] = set()
        with suppress(FileNotFoundError):
            for name in os.listdir(self.prefix + path):
                inside = posixpath.join(path, name)
                if os.path.isdir(self.prefix + inside) or self.is_file(inside):
                    found.add(name)
        if not path:
            found.discard(OWN)
        if is_of_machine(path):
            return sorted(found)
        scope = self._scope_of(path)
        for name in {*self.lists.files(path), *self.lists.directories(path)}:
            if scope is None or not scope.is_removed(posixpath.join(path, name)):
                found.add(name)
        return sorted(found)

    def status(self, path: str) -> os.stat_result:
        """Kind and size of a file or directory that is not on this machine. Raises
        FileNotFoundError."""
        entry = self._current_entry(path)
        if entry is not None:
            inode = int(entry.sha256[:12], 16)
            return made_status(kinds.S_IFREG | 0o644, inode, entry.size_bytes)
        if self.is_dir(path):
            return made_status(kinds.S_IFDIR | 0o755, 0, 0)
        raise missing_at(self.prefix + path)

    # What writers do.

    @contextmanager
    def writing(self, *outputs: str) -> Iterator[Scope | None]:
        """Hold the lease of `outputs`, files or directories, and commit them when the block ends
        without an error. Inside of another writer's scope, that writer commits them.

        Raises LockedError if another process writes them (E-LOCKED) or the lease was lost
        (E-LEASE-LOST), and PlanError if the store does not answer (E-STORE).
        """
        shared = [path for path in outputs if not is_of_machine(path)]
        if not shared or any(all(map(scope.covers, shared)) for scope in self._scopes):
            yield None
            return
        where = self.url_of(shared[0])
        lease = Lease(join(self.url, f"{LEASES}/{shared[0]}.json"), where)
        scope = Scope(shared)
        try:
            with self._writers.writing(scope.outputs):
                self._begin(scope, lease)
                self._scopes.append(scope)
                try:
                    yield scope
                    commit(self._parts, scope, lease)
                    self.pieces.remove(scope)
                finally:
                    self._scopes.remove(scope)
                    self._forget_ready(scope)
        finally:
            lease.release()

    def remove(self, path: str) -> bool:
        """Remove a file of the bucket; whether it was there. A writer's commit removes it; without
        a writer it is removed now."""
        if is_of_machine(path) or self.lists.entry(path) is None:
            return False
        scope = self._scope_of(path)
        if scope is not None:
            scope.removed.add(path)
            return True
        with self.writing(path) as own:
            assert own is not None
            own.removed.add(path)
            with suppress(FileNotFoundError):
                os.unlink(self.prefix + path)
        return True

    def replaced(self, directory: str) -> None:
        """Record that the caller has replaced a directory, or removed it."""
        if (scope := self._scope_of(directory)) is not None:
            scope.replace(directory)

    def committed_bytes(self, path: str) -> int:
        """The size of a file in the bucket; 0 if the bucket lacks it."""
        entry = self.lists.entry(path)
        return 0 if entry is None else entry.size_bytes

    def files(self, path: str) -> list[str]:
        """The file of a path, or the files in its directory, as the bucket lists them."""
        if self.lists.entry(path) is not None:
            return [path]
        return [posixpath.join(path, name) for name in sorted(self.lists.files(path))]

    def has_room(self, num_bytes: int) -> bool:
        """Whether the local files and `num_bytes` more are within their limit."""
        return self.local.has_room(num_bytes)

    def refresh(self) -> None:
        """Ask the bucket which files have changed."""
        self.lists.refresh()

    def _current_entry(self, path: str) -> Entry | None:
        """The entry of a file, unless a writer of this process has removed it."""
        entry = None if is_of_machine(path) else self._entry(path)
        scope = self._scope_of(path)
        return None if scope is not None and scope.is_removed(path) else entry

    def _entry(self, path: str) -> Entry | None:
        """The entry of a file. If another process of this machine has fetched or committed another
        version, the list is read anew."""
        entry = self.lists.entry(path)
        status = status_at(self.prefix + path)
        copy = None if status is None else self.local.find(path, status)
        if copy is None or (entry is not None and copy.sha256 == entry.sha256):
            return entry
        entry = self._reread(path)
        if entry is None or entry.sha256 != copy.sha256:
            self.local.forget(path)
        return entry

    def _is_current(self, path: str, entry: Entry) -> bool:
        """Whether the file on this machine is the current one, or one that a writer is changing."""
        text = self.prefix + path
        if (status := status_at(text)) is None:
            return False
        copy = self.local.find(path, status)
        if copy is not None and copy.sha256 == entry.sha256:
            self.local.touch(path, copy)
            return True
        if copy is None and self._is_open(path):
            return True
        # Before a local file is replaced, its list is read anew: another process of this machine
        # may have committed the file.
        entry = self._reread(path) or entry
        if status.st_size != entry.size_bytes or sha256_of_bytes(text) != entry.sha256:
            return False
        self.local.keep(path, status, entry.sha256, entry.object)
        return True

    def _reread(self, path: str) -> Entry | None:
        """The entry of a file in its list, read anew."""
        directory, name = posixpath.split(path)
        return self.lists.reread(directory).get(name)

    def _set_aside(self, path: str) -> None:
        """Move a local file that no list names out of the way: its writer was killed before its
        commit, and the next writer gets it back. A file that was removed from the bucket is
        deleted."""
        if self._writers.cover(path):
            return
        text = self.prefix + path
        with suppress(FileNotFoundError):
            if self.local.last_digest(path) is not None:
                os.unlink(text)
                self.local.forget(path)
                return
            left = self._left / path
            left.parent.mkdir(parents=True, exist_ok=True)
            os.replace(text, left)

    def _begin(self, scope: Scope, lease: Lease) -> None:
        """Read the lists of the outputs, and give back the files of a killed writer."""
        lease.check_store(self.directory / OWN / "conditional")
        if any(self.lists.is_directory(output) for output in scope.outputs):
            self.lists.refresh()
        else:
            for directory in {posixpath.dirname(output) for output in scope.outputs}:
                self.lists.reread(directory)
        for output in scope.outputs:
            left = self._left / output
            found = [left] if left.is_file() else [one for one in left.rglob("*") if one.is_file()]
            for one in found:
                there = self.directory / one.relative_to(self._left)
                there.parent.mkdir(parents=True, exist_ok=True)
                os.replace(one, there)
        for path in list(local_files(self._parts, scope)):
            self._drop_if_outdated(path)
        if lease.is_taken_over:
            claim(self._parts, scope, lease)

    def _drop_if_outdated(self, path: str) -> None:
        """Delete a file that a killed writer changed if the bucket has another version since
        then."""
        entry = self.lists.entry(path)
        text = self.prefix + path
        if entry is None or self.local.find(path, os.stat(text)) is not None:
            return
        if self.local.last_digest(path) != entry.sha256 and sha256_of_bytes(text) != entry.sha256:
            os.unlink(text)
            self.local.forget(path)

    def _is_open(self, path: str) -> bool:
        """Whether a writer of this machine may be changing a file."""
        return self._scope_of(path) is not None or self._writers.cover(path)

    def _scope_of(self, path: str) -> Scope | None:
        return next((scope for scope in self._scopes if scope.covers(path)), None)

    def _forget_ready(self, scope: Scope) -> None:
        for directory in [one for one in self._ready if scope.covers(one)]:
            self._ready.pop(directory, None)
        for one in scope.outputs:
            self._ready[posixpath.dirname(one)].discard(posixpath.basename(one))


def open_bucket(url: str, scratch: str | None = None, scratch_gib: float = 0) -> Bucket:
    """The bucket of a URL, opened once per process."""
    url = address(url).rstrip("/")
    for bucket in paths.registered():
        if isinstance(bucket, Bucket) and bucket.url == url:
            return bucket
    bucket = Bucket(url, scratch, scratch_gib)
    paths.register(bucket)
    return bucket


def open_path(url: str, scratch: str | None, scratch_gib: float, inside: str) -> paths.BucketPath:
    """A path of a bucket, on the machine of this process."""
    bucket = open_bucket(url, scratch, scratch_gib)
    return paths.BucketPath(bucket.directory, inside)


def path_at(url: str) -> paths.BucketPath | None:
    """The path of a URL in the root of a run; None if it is in no root. Raises PlanError if the
    store does not answer (E-STORE)."""
    url = address(url).rstrip("/")
    root = root_of(url)
    if root is None:
        return None
    bucket = open_bucket(root)
    return paths.BucketPath(bucket.directory, url[len(root) :].strip("/"))
