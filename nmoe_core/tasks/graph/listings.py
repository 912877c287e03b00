"""Whether any file below a directory may have changed, for two system calls less per file than
listing the directory takes.

The time of a directory changes if a file is added, removed or replaced below it. So a directory
whose own status is unchanged still has the names that were listed earlier, and one `stat` for each
name tells whether a file was changed in place.
"""

import hashlib
import os
import time
import zlib
from array import array
from base64 import b64decode, b64encode
from collections.abc import Iterable
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from nmoe_core.base.bucket.paths import bucket_of
from nmoe_core.base.fingerprint import CLOCK_NS

_status = attrgetter("st_ino", "st_size", "st_mtime_ns", "st_ctime_ns")
_END = "/"  # follows the names below a directory; the name of a directory ends with it too


class Listing(NamedTuple):
    """The names below a directory, for a later call in this process or another.

    folders: Digest of the status of the directory and of those below it.
    names: All names, compressed.
    """

    folders: str
    names: str


class _Found(NamedTuple):
    """Names below a directory, and the status of its folders and files in the same order."""

    names: list[str]
    folders: "array[int]"
    files: "array[int]"

    @property
    def identity(self) -> str:
        named = os.fsencode("\0".join(self.names))
        return hashlib.sha256(self.files.tobytes() + named).hexdigest()

    @property
    def listing(self) -> Listing:
        named = zlib.compress(os.fsencode("\0".join(self.names)), 1)
        return Listing(_digest(self.folders), b64encode(named).decode())


def tree_identity(path: Path, known: Listing | None = None) -> tuple[str | None, Listing | None]:
    """As `file_identity`, one value for a file, or for the names and the content of all files below
    a directory; empty if the path does not exist. None also for a path in a bucket.

    `known` is what an earlier call returned beside the value: directories that have not changed
    since are not listed again. It is None if a directory is so new that a further change could
    leave its times equal. The file system must change the time of a directory in which a file is
    added.
    """
    if bucket_of(path) is not None:
        return None, None
    now_ns = time.time_ns()
    found = _Found([], array("Q"), array("Q"))
    listing = None
    try:
        if not path.is_dir():
            found.files.extend(_status(path.stat()))
        elif (again := _known(path, known)) is not None:
            found = again
            listing = known
        else:
            _list(str(path), found)
            listing = found.listing if _is_settled(found.folders, now_ns) else None
    except FileNotFoundError:
        return (None if found.folders else ""), None
    except (OSError, OverflowError):  # a file that nobody may read, or of a time before 1970
        return None, None
    return (found.identity if _is_settled(found.files, now_ns) else None), listing


def _is_settled(numbers: "array[int]", now_ns: int) -> bool:
    return now_ns - max(numbers[3::4], default=0) >= CLOCK_NS


def _digest(numbers: "array[int]") -> str:
    return hashlib.sha256(numbers.tobytes()).hexdigest()


def _list(directory: str, found: _Found) -> None:
    """Add all that is below a directory. Its status is read first, so that a name that is added
    meanwhile changes the status of a later call."""
    found.folders.extend(_status(os.stat(directory)))
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_dir():
                found.names.append(entry.name + _END)
                _list(entry.path, found)
                found.names.append(_END)
            else:
                found.names.append(entry.name)
                found.files.extend(_status(entry.stat()))


def _known(path: Path, listing: Listing | None) -> _Found | None:
    """All that is below a directory by an earlier listing; None if a directory has changed."""
    if listing is None:
        return None
    text = os.fsdecode(zlib.decompress(b64decode(listing.names)))
    names = text.split("\0") if text else []
    found = _Found(names, array("Q"), array("Q"))
    try:
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            found.folders.extend(_status(os.stat(directory)))
            _look_again(directory, names, found)
        finally:
            os.close(directory)
    except OSError:
        return None
    return found if _digest(found.folders) == listing.folders else None


def _look_again(directory: int, names: Iterable[str], found: _Found) -> None:
    """Add the status of each name below an open directory."""
    stat = os.stat
    add_file = found.files.extend
    place = ""
    outer: list[str] = []
    for name in names:
        if name[-1] != _END:
            add_file(_status(stat(place + name, dir_fd=directory)))
        elif name == _END:
            place = outer.pop()
        else:
            outer.append(place)
            place += name
            found.folders.extend(_status(stat(place, dir_fd=directory)))
