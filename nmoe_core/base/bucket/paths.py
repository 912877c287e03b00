"""Paths of files that lie in a bucket: local paths whose file is fetched when it is first used.

The operating system gets a path by `os.fspath`; at this moment the file is fetched. So numpy, Arrow
and safetensors read files of a bucket as they read local files. Questions about existence, size and
names are answered from the lists of the bucket, without fetching a file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from fnmatch import fnmatchcase
from pathlib import Path, PurePath
from typing import Any, Protocol

from nmoe_core.base.bucket.pieces import Pieces
from nmoe_core.base.bucket.scope import Sent


class Files(Protocol):
    """The bucket of a path; `nmoe_core.base.bucket.bucket.Bucket` documents the methods."""

    url: str
    prefix: str
    pieces: Pieces
    sent: dict[str, Sent]

    def ensure(self, path: str) -> None: ...
    def has_copy(self, path: str) -> bool: ...
    def status(self, path: str) -> os.stat_result: ...
    def is_file(self, path: str) -> bool: ...
    def is_dir(self, path: str) -> bool: ...
    def names(self, path: str) -> list[str]: ...
    def digest(self, path: str) -> str | None: ...
    def url_of(self, path: str) -> str: ...
    def remove(self, path: str) -> bool: ...
    def replaced(self, directory: str) -> None: ...
    def refresh(self) -> None: ...
    def committed_bytes(self, path: str) -> int: ...
    def files(self, path: str) -> list[str]: ...
    def has_room(self, num_bytes: int) -> bool: ...
    def writing(self, *outputs: str) -> AbstractContextManager[object]: ...
    def recipe(self, path: str) -> tuple[Callable[..., Path], tuple[Any, ...]]: ...


_buckets: list[Files] = []


def register(bucket: Files) -> None:
    """Make the files below the bucket's local directory files of this bucket."""
    _buckets.append(bucket)


def registered() -> list[Files]:
    """The buckets of this process."""
    return list(_buckets)


def forget_all() -> None:
    """Forget the buckets of this process: their paths are plain paths from now on."""
    _buckets.clear()


def bucket_of(path: str | os.PathLike[str]) -> tuple[Files, str] | None:
    """The bucket of a path, and the path relative to its root; None for other paths."""
    text = str(path)
    for bucket in _buckets:
        if text == bucket.prefix[:-1]:
            return bucket, ""
        if text.startswith(bucket.prefix):
            return bucket, text[len(bucket.prefix) :]
    return None


def refresh_all() -> None:
    """Ask the buckets of this process for changes, after other processes have worked."""
    for bucket in _buckets:
        bucket.refresh()


def local_path(path: Path) -> Path:
    """The same path on this machine, without the bucket behind it."""
    return Path(str(path))


def shown(path: Path) -> str:
    """A path for people: the URL of a file in a bucket."""
    return str(getattr(path, "url", path))


def listed_digest(path: str | os.PathLike[str]) -> str | None:
    """The SHA-256 of a file by the list of its bucket; None for a local file, and for a file that
    a writer may have changed."""
    found = bucket_of(path)
    return None if found is None else found[0].digest(found[1])


class BucketPath(type(Path())):  # type: ignore[misc]
    """A path below the local directory of a bucket."""

    __slots__ = ()

    def __fspath__(self) -> str:
        if (found := bucket_of(self)) is not None:
            found[0].ensure(found[1])
        return str(self)

    def __reduce__(self) -> tuple[Any, ...]:
        found = bucket_of(self)
        return (Path, (str(self),)) if found is None else found[0].recipe(found[1])

    @property
    def url(self) -> str:
        """The path's address in the bucket."""
        found = bucket_of(self)
        return str(self) if found is None else found[0].url_of(found[1])

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        found = bucket_of(self)
        if found is None or found[0].has_copy(found[1]):
            return os.stat(str(self), follow_symlinks=follow_symlinks)
        return found[0].status(found[1])

    def exists(self, **_: bool) -> bool:
        return self.is_file() or self.is_dir()

    def is_file(self, **_: bool) -> bool:
        found = bucket_of(self)
        if found is None:
            return os.path.isfile(str(self))
        return found[0].is_file(found[1])

    def is_dir(self, **_: bool) -> bool:
        found = bucket_of(self)
        if found is None:
            return os.path.isdir(str(self))
        return found[0].is_dir(found[1])

    def unlink(self, missing_ok: bool = False) -> None:
        if (found := bucket_of(self)) is not None and found[0].remove(found[1]):
            missing_ok = True
        try:
            os.unlink(str(self))
        except FileNotFoundError:
            if not missing_ok:
                raise

    def iterdir(self) -> Generator[Any, None, None]:
        if (found := bucket_of(self)) is None:
            yield from super().iterdir()
            return
        for name in found[0].names(found[1]):
            yield self / name

    def glob(self, pattern: str, **_: Any) -> Generator[Any, None, None]:
        """Paths below this one that match a relative pattern; `**` is any number of directories."""
        paths: list[Any] = [self]
        for part in PurePath(pattern).parts:
            if part == "**":
                inner = [one for path in paths for one in path.rglob("*") if one.is_dir()]
                paths = [*dict.fromkeys([*paths, *inner])]
                continue
            below = [path for above in paths if above.is_dir() for path in above.iterdir()]
            paths = [path for path in below if fnmatchcase(path.name, part)]
        yield from paths

    def rglob(self, pattern: str, **_: Any) -> Generator[Any, None, None]:
        """Paths at any depth below this one whose name matches a pattern."""
        for path in self.iterdir() if self.is_dir() else ():
            if fnmatchcase(path.name, pattern):
                yield path
            if path.is_dir() and not path.is_symlink():
                yield from path.rglob(pattern)
