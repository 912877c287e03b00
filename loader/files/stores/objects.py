"""Files of a store by their path: as they lie there, or in the root of a run.

A run whose root is a bucket keeps each version of a file as an object of its own, which is never
changed, and the list of a directory names the objects of its current files:

    data/web/train/shard_0003/tokens.1f3a9c0d5e7b2468.npy       an object
    .nmoe/files/data/web/train/shard_0003/files.json            the list of its directory

The functions here read a path of such a root by its list, and any other path directly. They raise
the errors of `loader.files.stores.store`, and FormatError if a list is damaged (E-LIST).
"""

import json
import posixpath
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from loader.errors import FormatError
from loader.files.addresses import address, is_url, join, parent
from loader.files.checksummed_json import check_seal, sealed
from loader.files.nested import json_value
from loader.files.stores import store

T = TypeVar("T")
OWN = ".nmoe"
LISTS = f"{OWN}/files"
LIST_NAME = "files.json"
_FORMAT = "nmoe-files/1"
_MAX_DEPTH = 8  # of a file below the root of its run
_DIGEST_CHARS = 16


class Entry(NamedTuple):
    """A file in a list: its size, its SHA-256, the object with its bytes, relative to the root, and
    in hex its `first` bytes if the object lacks them, since it was sent before they were known."""

    size_bytes: int
    sha256: str
    object: str
    first: str = ""


class FileList(NamedTuple):
    """The current files of a directory, by name. `claim` is the number of the last writer that took
    over the lease of another."""

    files: Mapping[str, Entry]
    claim: int = 0

    def to_bytes(self) -> bytes:
        """The content of the list's object; equal lists have equal bytes."""
        files = {name: entry._asdict() for name, entry in sorted(self.files.items())}
        for row in files.values():
            if not row["first"]:
                del row["first"]
        value = sealed({"format": _FORMAT, "claim": self.claim, "files": files})
        return json.dumps(value, ensure_ascii=False, indent=1).encode() + b"\n"


def list_key(directory: str) -> str:
    """The object of a directory's list, relative to the root; `directory` is relative too."""
    return posixpath.join(LISTS, directory, LIST_NAME)


def object_key(path: str, sha256: str) -> str:
    """The object of a version of the file `path`: its name with the start of its digest."""
    stem, suffix = posixpath.splitext(path)
    return f"{stem}.{sha256[:_DIGEST_CHARS]}{suffix}"


def is_version(key: str) -> bool:
    """Whether an object has a name that `object_key` makes."""
    parts = key.rpartition("/")[2].split(".")[-2:]
    return any(re.fullmatch(f"[0-9a-f]{{{_DIGEST_CHARS}}}", part) for part in parts)


def read_list(content: bytes, where: str) -> FileList:
    """Parse the list of a directory. Raises FormatError if it is damaged, or names an object
    outside of the root (E-LIST)."""
    try:
        value = json_value(content)
        if not isinstance(value, dict) or value.get("format") != _FORMAT:
            raise ValueError(f"not {_FORMAT}")
        check_seal(value, Path(where), required=True, code="E-LIST")
        files = {name: _entry(name, row) for name, row in value["files"].items()}
        return FileList(files, int(value["claim"]))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(
            "the list of a directory is damaged",
            where=where,
            found=str(error),
            do="delete this object: its outputs are made again",
            code="E-LIST",
        ) from None


def _entry(name: str, row: Any) -> Entry:
    first = str(row.get("first", ""))
    bytes.fromhex(first)
    entry = Entry(int(row["size_bytes"]), str(row["sha256"]), str(row["object"]), first)
    parts = entry.object.split("/")
    if "/" in name or name in ("", ".", "..") or ".." in parts or entry.object.startswith("/"):
        raise ValueError(f"the name {name!r} or the object {entry.object!r} leads outside")
    if entry.size_bytes < 0 or len(entry.sha256) != 64:
        raise ValueError(f"no size or SHA-256: {name}")
    return entry


# Roots that were found in this process, and the lists that were read, by URL.
_roots: set[str] = set()
_lists: dict[str, FileList] = {}


def forget_roots() -> None:
    """Forget the roots that were found in this process, and their lists."""
    _roots.clear()
    _lists.clear()


def read_bytes(url: str, span: tuple[int, int] | None = None) -> bytes | None:
    """`store.read_bytes` of a path."""

    def read(place: _Place) -> bytes | None:
        if not place.first or span is None:
            found = store.read_bytes(place.url, span)
            return found if found is None else place.first + found
        start, stop = (max(0, one - len(place.first)) for one in span)
        found = store.read_bytes(place.url, (start, stop)) if stop else b""
        return found if found is None else place.first[slice(*span)] + found

    return _read(url, read)


def copy(url: str, local: Path, max_bytes: int = store.MAX_COPY_BYTES) -> str | None:
    """`store.copy` of a path."""
    return _read(url, lambda place: store.copy(place.url, local, max_bytes, place.first))


def copy_start(url: str, local: Path, num_bytes: int) -> bool:
    """`store.copy_start` of a path."""

    def read(place: _Place) -> bool | None:
        return store.copy_start(place.url, local, num_bytes, place.first) or None

    return bool(_read(url, read))


class _Place(NamedTuple):
    """Where a path lies: an object, and the first bytes of the file that the object lacks."""

    url: str
    first: bytes = b""


def _read(url: str, read: Callable[[_Place], T | None]) -> T | None:
    """What `read` makes of the place of a path; None if the path is missing."""
    place = _placed(url)
    found = None if place is None else read(place)
    if found is None and (place := _found(url, place)) is not None:
        found = read(place)
    return found


def _placed(url: str) -> _Place | None:
    """Where a path lies: in a known root the object of its list, None if the list lacks it."""
    if not is_url(url):
        return _Place(url)
    url = address(url)
    root = _known_root(url)
    return _Place(url) if root is None else _in_root(root, url)


def _known_root(url: str) -> str | None:
    return next((root for root in _roots if url.startswith(f"{root}/")), None)


def _found(url: str, tried: _Place | None) -> _Place | None:
    """Where a path lies that is missing at `tried`: its list is read again, or for the first
    time."""
    url = address(url)
    if not is_url(url) or "?" in url:
        return None
    root = _known_root(url) or root_of(parent(url))
    if root is None:
        return None
    _roots.add(root)
    _lists.pop(_list_url(root, url), None)
    place = _in_root(root, url)
    return None if place == tried else place


def root_of(url: str) -> str | None:
    """The root of a run that lists a file of this URL, or its directory."""
    directory = url
    for _ in range(2):
        root = directory
        for _ in range(_MAX_DEPTH):
            if "://" not in parent(root) or root == parent(root):
                break
            if _has_list(root, directory):
                return root
            root = parent(root)
        directory = parent(directory)
    return None


def _has_list(root: str, directory: str) -> bool:
    if root in _roots:
        return True
    return store.read_bytes(_list_url(root, f"{directory}/x")) is not None


def _list_url(root: str, url: str) -> str:
    inside = parent(url)[len(root) :].strip("/")
    return join(root, list_key(inside))


def _in_root(root: str, url: str) -> _Place | None:
    at = _list_url(root, url)
    if at not in _lists:
        content = store.read_bytes(at)
        _lists[at] = FileList({}) if content is None else read_list(content, at)
    entry = _lists[at].files.get(url.rpartition("/")[2])
    return None if entry is None else _Place(join(root, entry.object), bytes.fromhex(entry.first))
