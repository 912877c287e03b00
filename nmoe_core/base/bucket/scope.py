"""The outputs of one writer, and the commit that makes them the current files of the bucket."""

from __future__ import annotations

import os
import posixpath
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

from loader.files.addresses import join
from loader.files.regular import open_file
from loader.files.stores import store
from loader.files.stores.objects import Entry, object_key
from nmoe_core.base.bucket.lease import Lease
from nmoe_core.base.bucket.lists import Lists
from nmoe_core.base.bucket.local import LocalFiles, sha256_of_bytes

TMP_MARK = ".tmp."
_VERSIONS = ".versions"
_WORKERS = 8


class Sent(NamedTuple):
    """What was sent of a file while it grew: the object, the number of the file's first bytes that
    it lacks, its size and its SHA-256."""

    object: str
    first_bytes: int
    size_bytes: int
    sha256: str


class Parts(NamedTuple):
    """What a commit needs of a bucket: its URL, the start of its local paths, its lists, the
    records of its local files, and the files that were sent while they grew."""

    url: str
    prefix: str
    lists: Lists
    local: LocalFiles
    sent: dict[str, Sent]


class Scope:
    """The files that one writer of this process may change: files, and directories with all files
    below them."""

    def __init__(self, outputs: Iterable[str]) -> None:
        self.outputs = tuple(outputs)
        self.removed: set[str] = set()
        self._replaced: set[str] = set()

    def covers(self, path: str) -> bool:
        """Whether the writer may change this file."""
        return any(is_below(path, one) for one in self.outputs)

    def has_draft(self, path: str) -> bool:
        """Whether an unfinished file is one of the outputs, or in a hidden directory beside one."""
        hidden = [f"{above}/.{name}." for above, name in map(posixpath.split, self.outputs)]
        return self.covers(path) or path.startswith(tuple(one.lstrip("/") for one in hidden))

    def replace(self, directory: str) -> None:
        """Record that a directory was replaced: it has no other files than those of this
        machine."""
        self._replaced.add(directory)

    def is_removed(self, path: str) -> bool:
        """Whether the writer removed the earlier version of a file."""
        return path in self.removed or any(is_below(path, one) for one in self._replaced)


def is_below(path: str, above: str) -> bool:
    """Whether a path is `above`, or lies below it."""
    return path == above or not above or path.startswith(f"{above}/")


@lru_cache(maxsize=2**16)
def is_of_machine(path: str) -> bool:
    """Whether a path stays on this machine: a lock, an unfinished file, or a cache."""
    for part in path.split("/"):
        if (part.startswith(".") and not part.endswith(_VERSIONS)) or TMP_MARK in part:
            return True
    return False


def claim(bucket: Parts, scope: Scope, lease: Lease) -> None:
    """After a lease was taken over: from now on, a commit of its earlier owner is refused."""
    for directory in _directories(bucket, scope):
        bucket.lists.replace(directory, {}, (), lease, is_claim=True)


def commit(bucket: Parts, scope: Scope, lease: Lease) -> None:
    """Send the files that the writer changed, then replace the lists, those of inner directories
    first. Raises the errors of `Lists.replace` and of `store.send`."""
    new: defaultdict[str, dict[str, Entry]] = defaultdict(dict)
    present = set(local_files(bucket, scope))
    with ThreadPoolExecutor(_WORKERS) as pool:
        for path, entry in pool.map(partial(_send_if_new, bucket), sorted(present)):
            directory, name = posixpath.split(path)
            if entry is not None:
                new[directory][name] = entry
    removed: defaultdict[str, set[str]] = defaultdict(set)
    for directory in _directories(bucket, scope):
        for name in bucket.lists.files(directory):
            path = posixpath.join(directory, name)
            if path not in present and scope.covers(path) and scope.is_removed(path):
                removed[directory].add(name)
    lease.check()
    changed = {*new, *removed}
    for outer in changed:
        # A manifest must not name files that are being replaced: it is gone until they are there.
        if any(is_below(one, outer) for one in changed - {outer}):
            there = bucket.lists.files(outer)
            gone = {name for name in new[outer] if name in there}
            if gone:
                bucket.lists.replace(outer, {}, gone, lease)

    def replace(directory: str) -> None:
        bucket.lists.replace(directory, new[directory], removed[directory], lease)
        for name, entry in new[directory].items():
            path = posixpath.join(directory, name)
            status = os.stat(bucket.prefix + path)
            bucket.local.keep(path, status, entry.sha256, entry.object)

    with ThreadPoolExecutor(_WORKERS) as pool:
        for depth in sorted({path.count("/") for path in changed}, reverse=True):
            list(pool.map(replace, [path for path in changed if path.count("/") == depth]))


def _directories(bucket: Parts, scope: Scope) -> list[str]:
    """Directories whose lists may have files of a scope."""
    found = {posixpath.dirname(one) for one in scope.outputs}
    for one in scope.outputs:
        waiting = [one] if bucket.lists.is_directory(one) else []
        while waiting:
            path = waiting.pop()
            found.add(path)
            waiting += [posixpath.join(path, name) for name in bucket.lists.directories(path)]
    return sorted(found)


def local_files(bucket: Parts, scope: Scope) -> Iterator[str]:
    """Files of this machine in a scope, except those that stay on it."""
    for output in scope.outputs:
        top = bucket.prefix + output
        if os.path.isfile(top):
            yield output
        for directory, inner, names in os.walk(top):
            above = directory[len(bucket.prefix) :]
            inner[:] = [one for one in inner if not is_of_machine(posixpath.join(above, one))]
            for name in names:
                path = posixpath.join(above, name)
                if not is_of_machine(path):
                    yield path


def _entry_of(bucket: Parts, digest: str) -> Entry | None:
    """The entry of a file with these bytes that a list names."""
    for path, name in bucket.local.objects_of(digest):
        listed = bucket.lists.entry(path)
        if listed is not None and listed.object == name:
            return listed
    return None


def _send_if_new(bucket: Parts, path: str) -> tuple[str, Entry | None]:
    """Send a file that the bucket has not; returns it with its new entry, or None if its list has
    this entry."""
    text = bucket.prefix + path
    status = os.stat(text)
    copy = bucket.local.find(path, status)
    digest = sha256_of_bytes(text) if copy is None else copy.sha256
    listed = bucket.lists.entry(path)
    if listed is not None and listed.sha256 == digest:
        if copy is None:
            bucket.local.keep(path, status, digest, listed.object)
        return path, None
    there = _entry_of(bucket, digest) or _sent_entry(bucket, path, digest, status.st_size)
    if there is None:
        there = Entry(status.st_size, digest, object_key(path, digest))
        store.send(join(bucket.url, there.object), Path(text))
    return path, there


def _sent_entry(bucket: Parts, path: str, digest: str, size_bytes: int) -> Entry | None:
    """The entry of a file that was sent while it grew, if its bytes are still those."""
    sent = bucket.sent.pop(path, None)
    if sent is None or sent.first_bytes + sent.size_bytes != size_bytes:
        return None
    with open_file(bucket.prefix + path) as file:
        first = file.read(sent.first_bytes)
    if sha256_of_bytes(bucket.prefix + path, sent.first_bytes) != sent.sha256:
        return None
    return Entry(size_bytes, digest, sent.object, first.hex())
