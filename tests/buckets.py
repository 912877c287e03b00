"""Machines that share nothing but a bucket, and a store that fails at a chosen request."""

import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from loader.files.stores import store
from loader.files.stores.objects import LIST_NAME, LISTS, Entry, read_list
from nmoe_core.base.atomic import output_lock, write_bytes
from nmoe_core.base.bucket import paths
from nmoe_core.base.bucket.bucket import Bucket
from nmoe_core.base.bucket.paths import BucketPath

URL = "s3://corpus/runs/web"
WRITES = ("write_if", "send", "write", "remove")
READS = ("read_tagged", "read_bytes", "copy", "listing")


class Machine:
    """A machine with its own local directory for the root `url`."""

    def __init__(self, directory: Path, url: str, scratch_gib: float = 0) -> None:
        self.bucket = Bucket(url, str(directory), scratch_gib)
        paths.register(self.bucket)
        self.root = BucketPath(self.bucket.directory)

    def looks_again(self) -> None:
        """Ask the bucket for changes now instead of some seconds later."""
        self.bucket.refresh()


def put(root: Path, **files: bytes) -> None:
    """Commit files as `data/NAME`."""
    with output_lock(root / "data"):
        for name, content in files.items():
            write_bytes(root / "data" / name, content)


class Killed(BaseException):
    """The process was killed: nothing catches this."""


def files_of(url: str) -> dict[str, Entry]:
    """The current files of a root by their paths, as its lists name them."""
    found = {}
    for one in store.listing(f"{url}/{LISTS}"):
        if one.path.rpartition("/")[2] == LIST_NAME:
            directory = one.path.rpartition("/")[0]
            content = store.read_bytes(f"{url}/{LISTS}/{one.path}")
            assert content is not None
            for name, entry in read_list(content, one.path).files.items():
                found[f"{directory}/{name}".lstrip("/")] = entry
    return found


def digests_of(url: str) -> dict[str, str]:
    """The SHA-256 of the current files of a root; each object has the bytes that its list says."""
    found = {}
    for path, entry in files_of(url).items():
        content = content_of(url, entry)
        assert content is not None, path
        assert len(content) == entry.size_bytes, path
        assert sha256(content).hexdigest() == entry.sha256, path
        found[path] = entry.sha256
    return found


def content_of(url: str, entry: Entry) -> bytes | None:
    """The bytes of a file of a root; None if its object is missing."""
    content = store.read_bytes(f"{url}/{entry.object}")
    return None if content is None else bytes.fromhex(entry.first) + content


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Count the requests of a block by the function of `store` that makes them."""
    counts: Counter[str] = Counter()

    def count(name: str) -> None:
        counts[name] += 1

    with monkeypatch.context() as patch:
        _watch(patch, count)
        yield counts


@contextmanager
def killed_at(
    monkeypatch: pytest.MonkeyPatch, k: int, writes: tuple[str, ...] = WRITES
) -> Iterator[Counter[str]]:
    """The process is killed before the k-th of its `writes` to the store; afterwards it reaches the
    store no more. Counts the writes."""
    counts: Counter[str] = Counter()

    def kill(name: str) -> None:
        counts[name] += name in writes
        if counts.total() >= k and (name in writes or counts["dead"]):
            counts["dead"] = k
            raise Killed

    with monkeypatch.context() as patch:
        _watch(patch, kill)
        yield counts


def _watch(patch: pytest.MonkeyPatch, see: Callable[[str], None]) -> None:
    for name in (*WRITES, *READS):
        patch.setattr(store, name, _seen(getattr(store, name), name, see))


def _seen(real: Callable[..., Any], name: str, see: Callable[[str], None]) -> Callable[..., Any]:
    def request(*arguments: Any, **options: Any) -> Any:
        see(name)
        return real(*arguments, **options)

    return request


@contextmanager
def other_machine(monkeypatch: pytest.MonkeyPatch, directory: Path) -> Iterator[None]:
    """A machine that has nothing: an empty local directory for all roots, removed afterwards."""
    with monkeypatch.context() as patch:
        patch.setenv("NMOE_SCRATCH", str(directory))
        paths.forget_all()
        try:
            yield
        finally:
            paths.forget_all()
            shutil.rmtree(directory, ignore_errors=True)
