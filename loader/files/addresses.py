"""Addresses: paths of this machine and URLs of stores, and the files behind URLs.

Whatever names a plan, data or a cache goes through here: `pathlib` writes `s3://b` as `s3:/b`. A
URL's file is read through fsspec. Each store's client raises errors of its own: all become one, so
that a store that is down (E-STORE) is told from a missing file.
"""

import argparse
import errno
import os
import posixpath
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from loader.errors import ConfigError, PlanError

STORE_CODE = "E-STORE"
_LOCAL_FAILURES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
# A scheme has two letters at least, or it is a drive; `simplecache::s3` is two of them.
_MANGLED = re.compile(r"((?:[A-Za-z][\w+.-]*::)*[A-Za-z][\w+.-]+):/(?!/)")


def address(value: str | os.PathLike[str]) -> str:
    """An address as text; a URL that went through `pathlib` has its slashes again."""
    text = os.fspath(value)
    mangled = _MANGLED.match(text)
    if mangled is None:
        return text
    slashes = ":///" if mangled[1].endswith("file") else "://"
    return mangled[1] + slashes + text[mangled.end() :]


def is_url(value: str | os.PathLike[str]) -> bool:
    """Whether an address is a URL."""
    return "://" in address(value)


def join(base: str, part: str) -> str:
    """The URL of `part`, relative to the URL `base`; `..` never leaves its host or bucket."""
    head, path = _split(base)
    return head + posixpath.normpath(posixpath.join(path, part))


def parent(url: str) -> str:
    """The URL of what holds a file."""
    head, path = _split(url)
    return head + posixpath.dirname(path)


def _split(url: str) -> tuple[str, str]:
    """Scheme with host or bucket, and the path from there on, without a query."""
    scheme, _, rest = address(url).partition("://")
    host, _, path = rest.partition("/")
    if scheme in ("http", "https"):
        path = re.split("[?#]", path, maxsplit=1)[0]
    return f"{scheme}://{host}", f"/{path}"


def local_path(
    path: str | os.PathLike[str],
    where: object = None,
    do: str = "use a local or mounted directory, and copy between it and the store",
) -> Path:
    """The path, which must be on this machine; `where` names its key or file. Raises ConfigError
    where it is a URL (E-PATH-URL)."""
    if is_url(path):
        raise ConfigError(
            "object stores are not supported for this path yet",
            where=where,
            found=repr(address(path)),
            expected="a path on this machine",
            do=do,
            code="E-PATH-URL",
        )
    return Path(path)


class PathParser(argparse.ArgumentParser):
    """A parser, as are its subparsers, that refuses URLs for every argument of type Path."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register("type", Path, _path_argument)


def _path_argument(text: str) -> Path:
    try:
        return local_path(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(f"[{error.code}] {error}") from None


def read_bytes(url: str) -> bytes | None:
    """A whole file, or None where there is none. Raises PlanError where the store does not answer
    or refuses (E-STORE), ConfigError where fsspec or the store's client is not installed."""
    with _asking(url):
        files, path = _open_store(url)
        try:
            return files.cat_file(path)
        except FileNotFoundError:
            return None


def copy(url: str, local: Path) -> bool:
    """Copy a file to `local` and sync it; False where there is none. Raises as `read_bytes`."""
    local.parent.mkdir(parents=True, exist_ok=True)
    with _asking(url):
        files, path = _open_store(url)
        try:
            files.get_file(path, str(local))
        except FileNotFoundError:
            local.unlink(missing_ok=True)
            return False
    with open(local, "rb") as file:
        os.fsync(file.fileno())
    return True


def _open_store(url: str) -> tuple[Any, str]:
    try:
        import fsspec
    except ImportError:
        raise ConfigError(
            "fsspec is not installed", where=url, do="pip install 'nmoe-loader[remote]'"
        ) from None
    try:
        return fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        found = one_line(error)
        raise ConfigError("no client for this URL", where=url, found=found) from None


@contextmanager
def _asking(url: str) -> Iterator[None]:
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _LOCAL_FAILURES:
            raise
        raise PlanError(
            "the store does not give this file",
            where=url,
            found=one_line(error),
            do="see that the store can be reached and lets this machine read",
            code=STORE_CODE,
        ) from None


def one_line(error: BaseException) -> str:
    """The message of another package's error, cut to one line."""
    return " ".join(str(error).split())[:200] or type(error).__name__
