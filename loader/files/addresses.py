"""Addresses: paths of this machine and URLs of stores, told apart, joined and kept whole.

Whatever names a plan, data or a cache goes through here: `pathlib` writes `s3://b` as `s3:/b`.
"""

from __future__ import annotations

import os
import posixpath
import re

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
    """Whether an address is a URL: not of this machine, as far as anyone can tell."""
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
