"""Fetches files of a bucket: one reader of a machine at a time, and ahead of their use."""

from __future__ import annotations

import hashlib
import os
import posixpath
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from loader.files.addresses import join
from loader.files.locks import locked
from loader.files.stores import store
from loader.files.stores.objects import OWN, Entry
from nmoe_core.base.bucket.local import status_at
from nmoe_core.base.bucket.paths import Files, bucket_of
from nmoe_core.base.bucket.scope import Parts
from nmoe_core.base.errors import FormatError

_WORKERS = 4
_NUM_LOCKS = 256
_SMALL_BYTES = 4 * 2**20
_MOST_SMALL = 16


@contextmanager
def fetched_ahead(paths: Iterable[Path]) -> Iterator[None]:
    """In this block, threads fetch these files, and the files of these directories, in their order.
    Local paths are ignored. What does not fit into the scratch directory, and what cannot be
    fetched, is left to its reader. At the end, fetches that have not begun are dropped."""
    places = [found for found in map(bucket_of, paths) if found is not None]
    if not places:
        yield
        return
    waiting = _Waiting(places)
    with ThreadPoolExecutor(_WORKERS, "fetch-ahead") as pool:
        for _ in range(_WORKERS):
            pool.submit(waiting.fetch_all)
        try:
            yield
        finally:
            waiting.is_ended = True


class SmallFiles:
    """Fetches small files ahead, such as the manifests of shards, which tasks read in the order of
    their directories: a request takes longer than its bytes."""

    def __init__(self, bucket: Parts) -> None:
        self._bucket = bucket
        self._last: dict[tuple[str, str], str] = {}

    def fetch_after(self, path: str) -> None:
        """If a small file is read after the file of the same name in the directory before it, fetch
        those of the next directories. What cannot be fetched is left to its reader."""
        lists = self._bucket.lists
        directory, name = posixpath.split(path)
        above, own = posixpath.split(directory)
        around = sorted(lists.directories(above))
        if own not in around:
            return
        number = around.index(own)
        earlier = self._last.get((above, name))
        self._last[above, name] = own
        if not number or around[number - 1] != earlier:
            return
        with ThreadPoolExecutor(2 * _WORKERS) as pool:
            for inside in around[number + 1 : number + 1 + _MOST_SMALL]:
                one = posixpath.join(above, inside, name)
                entry = lists.entry(one)
                text = self._bucket.prefix + one
                if entry is not None and is_small(entry) and not os.path.lexists(text):
                    pool.submit(fetch, self._bucket, one, entry, partial(os.path.lexists, text))
                    self._last[above, name] = inside


def is_small(entry: Entry) -> bool:
    """Whether a file is one that `SmallFiles` fetches."""
    return entry.size_bytes <= _SMALL_BYTES


class _Waiting:
    """The files that are still to be fetched; several threads take them in turn."""

    def __init__(self, places: list[tuple[Files, str]]) -> None:
        self._files = ((bucket, path) for bucket, inside in places for path in bucket.files(inside))
        self._lock = threading.Lock()
        self._taken_bytes = 0  # of the fetches that have begun and not ended
        self.is_ended = False

    def fetch_all(self) -> None:
        """Fetch files until none is left."""
        while (found := self._take()) is not None:
            bucket, path, size_bytes = found
            try:
                bucket.ensure(path)
            finally:
                with self._lock:
                    self._taken_bytes -= size_bytes

    def _take(self) -> tuple[Files, str, int] | None:
        """The next file that is missing here and fits, with its size."""
        with self._lock:
            for bucket, path in self._files:
                if self.is_ended:
                    return None
                size_bytes = bucket.committed_bytes(path)
                is_here = os.path.lexists(bucket.prefix + path)
                if not is_here and bucket.has_room(self._taken_bytes + size_bytes):
                    self._taken_bytes += size_bytes
                    return bucket, path, size_bytes
        return None


def fetch(bucket: Parts, path: str, entry: Entry, is_made: Callable[[], bool]) -> None:
    """Fetch the object of a file. If another thread or process of this machine is fetching it, wait
    for that one. The file stays as it is if `is_made` says that a writer made it meanwhile. Raises
    as `Bucket.ensure`."""
    text = bucket.prefix + path
    os.makedirs(os.path.dirname(text), exist_ok=True)
    parts = Path(bucket.prefix, OWN, "parts")
    parts.mkdir(parents=True, exist_ok=True)
    number = int(hashlib.sha256(path.encode()).hexdigest(), 16) % _NUM_LOCKS
    with locked(parts / f"{number}.lock"):
        status = status_at(text)
        copy = None if status is None else bucket.local.find(path, status)
        if copy is not None and copy.sha256 == entry.sha256:
            return
        bucket.local.make_room(entry.size_bytes)
        part = parts / f"{os.getpid()}-{threading.get_ident()}"
        url = join(bucket.url, entry.object)
        digest = store.copy(url, part, max(entry.size_bytes, 1), bytes.fromhex(entry.first))
        if digest != entry.sha256:
            part.unlink(missing_ok=True)
            raise FormatError(
                "a file of the run is damaged" if digest else "a file of the run is missing",
                where=url,
                found=f"sha256 {digest}" if digest else "no object",
                expected=f"{entry.size_bytes} bytes, sha256 {entry.sha256}",
                do="make the output again with nmoe run --rebuild",
                code="E-OBJECT",
            )
        if is_made():
            part.unlink()
            return
        os.replace(part, text)
        bucket.local.keep(path, os.stat(text), entry.sha256, entry.object)
