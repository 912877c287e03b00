"""Addresses: local paths and URLs of stores.

Every address of a plan, of data or of a cache is handled here, because `pathlib` turns `s3://b`
into `s3:/b`.
"""

import argparse
import os
import posixpath
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from loader.errors import ConfigError

# A scheme has at least two letters, because a single letter is a drive; `simplecache::s3` has two
# schemes.
_MANGLED = re.compile(r"((?:[A-Za-z][\w+.-]*::)*[A-Za-z][\w+.-]+):/(?!/)")


def address(value: str | os.PathLike[str]) -> str:
    """An address as text; restores the slashes of a URL that `pathlib` has changed."""
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
    """The URL of `part`, relative to the URL `base`; `..` cannot lead out of the host or bucket."""
    head, path = _split(base)
    return head + posixpath.normpath(posixpath.join(path, part))


def parent(url: str) -> str:
    """The URL of the directory of a file."""
    head, path = _split(url)
    return head + posixpath.dirname(path)


def _split(url: str) -> tuple[str, str]:
    """The two parts of a URL without its query: scheme with host or bucket, and path."""
    scheme, _, rest = address(url).partition("://")
    host, _, path = rest.partition("/")
    if scheme in ("http", "https"):
        path = re.split("[?#]", path, maxsplit=1)[0]
    return f"{scheme}://{host}", f"/{path}"


def local_path(
    path: str | os.PathLike[str],
    where: object = None,
    do: str = "use a local or mounted directory; `nmoe publish` copies shards and plans to a store",
) -> Path:
    """A path that must be local; `where` is the key or file that names it. Raises ConfigError if it
    is a URL (E-PATH-URL) or contains a NUL character."""
    if "\0" in os.fspath(path):
        raise ConfigError(
            "a path cannot contain a NUL character", where=where, found=repr(os.fspath(path))
        )
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


def as_path(value: str | os.PathLike[str]) -> Path:
    """A path of the same class: `Path` itself would turn a path with its own way of opening files
    into a plain one."""
    return value if isinstance(value, Path) else Path(value)


def normal(path: Path) -> Path:
    """The absolute path without `..`, of the same class."""
    return type(path)(os.path.abspath(str(path)))


def real(path: str | os.PathLike[str]) -> Path:
    """The absolute path without links, of the same class."""
    found = as_path(path)
    return type(found)(os.path.realpath(str(found)))


def common_parent(paths: Iterable[Path]) -> Path:
    """The innermost directory that contains all paths, of the class of the first."""
    first, *rest = paths
    return type(first)(os.path.commonpath([str(first), *map(str, rest)]))


class PathParser(argparse.ArgumentParser):
    """An argument parser that refuses URLs for arguments of type Path, also in subparsers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register("type", Path, path_argument)


def path_argument(text: str) -> Path:
    """The path in an argument. Raises ArgumentTypeError if it is a URL."""
    try:
        return local_path(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(f"[{error.code}] {error}") from None
