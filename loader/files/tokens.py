"""The token files of all sources on one axis of positions; each file is mapped on first use.

The files of a source are consecutive, in manifest order, and so are the sources, so that one
`searchsorted` finds the files of any number of rows. A mapped file takes a file descriptor. So all
readers of a process, of tokens and of indexes, together map at most half of the number of files
that the process may open; the least recently used file is unmapped first. Its memory is released
when no array refers to it any more.
"""

import errno
import hashlib
import mmap
import os
import resource
import weakref
from collections.abc import Callable, Sequence
from io import BufferedReader
from itertools import accumulate, count
from pathlib import Path
from typing import NamedTuple

import numpy as np

from loader.errors import FormatError, PlanError
from loader.files.bus_errors import report_bus_errors
from loader.files.format import Manifest, ShardEntry
from loader.files.regular import open_file
from loader.files.shard import read_npy_header

# Numbers of files from the same reader have the same bits above these.
_BITS = 40
_READERS = count()
# By key, the least recently used file first. Each operation on it is atomic, since a thread that
# reads ahead uses it too, and a lock could be held while the process forks.
_MAPPED: dict[int, np.ndarray] = {}


class _File(NamedTuple):
    path: Path
    offset_bytes: int
    num_tokens: int
    integers: np.dtype
    size_bytes: int
    modified_ns: int
    checksum: str


class TokenFiles:
    """Files of several sources on one axis. With `wraps`, a row that reaches the end of its source
    continues at the start of the source.

    file_starts: int64 `[num_files + 1]`, position of each file's first token, and the end.
    source_starts: int64 `[num_sources + 1]`, the same for sources. Raises FormatError if a file is
    missing, malformed or has another length than its manifest states.
    """

    def __init__(self, manifests: Sequence[Manifest], wraps: bool = False) -> None:
        report_bus_errors()
        self._files = [_checked(m, entry) for m in manifests for entry in m.shards]
        self._lay_out(manifests, [file.num_tokens for file in self._files], wraps)

    def _lay_out(
        self, manifests: Sequence[Manifest], file_tokens: Sequence[int], wraps: bool
    ) -> None:
        self.wraps = wraps
        self.file_starts = starts_of(file_tokens)
        self.source_starts = starts_of([manifest.total_tokens for manifest in manifests])
        self._first = claim(self)

    def tokens(self, file: int) -> np.ndarray:
        """All tokens of a file: uint32 or uint16 `[num_tokens]`, mapped read-only. Raises
        FormatError if the file has changed since it was checked (E-SHARD-CHANGED)."""
        return mapped(self._first, file, self._map)

    def _map(self, file: int) -> np.ndarray:
        own = self._files[file]
        if not own.num_tokens:
            return np.empty(0, own.integers)
        try:
            with open_file(own.path, buffering=0) as opened:
                status = os.fstat(opened.fileno())
                if status.st_mtime_ns != own.modified_ns or status.st_size != own.size_bytes:
                    self._check_same(file, opened, status)
                whole = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise _changed(own, "no file") from None
        # A plain array: each slice of an np.memmap creates a subclass object, which costs as much
        # as copying a window of 2,048 tokens.
        return np.frombuffer(whole, own.integers, own.num_tokens, own.offset_bytes)

    def _check_same(self, file: int, opened: BufferedReader, status: os.stat_result) -> None:
        """Accept another time of modification if the content has the checksum of the manifest."""
        own = self._files[file]
        is_same = status.st_size == own.size_bytes and own.checksum
        if not is_same or hashlib.file_digest(opened, "sha256").hexdigest() != own.checksum:
            raise _changed(own, f"{status.st_size} bytes, modified at {status.st_mtime_ns} ns")
        self._files[file] = own._replace(modified_ns=status.st_mtime_ns)

    def paths(self) -> list[Path]:
        """The path of every file, by its number."""
        return [file.path for file in self._files]

    def copy(self, position: int, out: np.ndarray) -> None:
        """Copy `len(out)` tokens from `position`, across file ends. Raises PlanError if they go
        beyond the end of the source (E-PLAN-SHORT)."""
        done = 0
        for start, length in self.pieces(position, len(out)):
            file = int(np.searchsorted(self.file_starts, start, "right")) - 1
            stop = done + length
            while done < stop:
                offset = start - int(self.file_starts[file])
                part = self.tokens(file)[offset : offset + stop - done]
                out[done : done + len(part)] = part
                done = done + len(part)
                start = start + len(part)
                file = file + 1

    def pieces(self, position: int, length: int) -> list[tuple[int, int]]:
        """Start and length of each contiguous piece of a row: one piece, or more if the row wraps.
        Raises as `copy`."""
        source = int(np.searchsorted(self.source_starts, position, "right")) - 1
        if not 0 <= source < len(self.source_starts) - 1:
            raise past_end(position, length)
        first, end = self.source_starts[source : source + 2].tolist()
        found = []
        while position + length > end:
            if not self.wraps:
                raise past_end(position, length)
            found.append((position, end - position))
            position, length = first, length - (end - position)
        return [*found, (position, length)]

    def close(self) -> None:
        """Unmap all files; a later read maps them again."""
        unmap(self._first)


def starts_of(sizes: Sequence[int]) -> np.ndarray:
    """Start of each of several consecutive ranges with these sizes, and the end of the last: int64
    `[len(sizes) + 1]`."""
    return np.array([0, *accumulate(sizes)], np.int64)


def claim(reader: object) -> int:
    """The key of a reader's file 0; file n has this key plus n. The reader's files are unmapped
    when it is deleted."""
    key = next(_READERS) << _BITS
    weakref.finalize(reader, unmap, key)
    return key


def is_mapped(key: int) -> bool:
    """Whether a file is mapped."""
    return key in _MAPPED


def mapped(first: int, file: int, map_file: Callable[[int], np.ndarray]) -> np.ndarray:
    """A file of the reader that claimed `first`; `map_file` maps it, if it is not mapped. Raises
    its errors."""
    key = first + file
    found = _MAPPED.pop(key, None)
    if found is None:
        _unmap_oldest(max_mapped())
        try:
            found = map_file(file)
        except OSError as error:
            if error.errno != errno.EMFILE:
                raise
            _unmap_oldest(0)  # the rest of the process needs more than half of the limit
            found = map_file(file)
    _MAPPED[key] = found
    return found


def unmap(first: int, keep: int = 0) -> None:
    """Unmap the files of a reader, except the most recently used `keep`."""
    own = [key for key in list(_MAPPED) if key >> _BITS == first >> _BITS]
    for key in own[: len(own) - keep]:
        _MAPPED.pop(key, None)


def max_mapped() -> int:
    """Maximum number of mapped files of this process: half of its limit on open files, 32 to
    8,192."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 8192 if soft == resource.RLIM_INFINITY else min(8192, max(32, soft // 2))


def _unmap_oldest(most: int) -> None:
    """Unmap files until fewer than `most` are left, and then some more, so that this is rare."""
    if len(_MAPPED) >= most:
        for key in list(_MAPPED)[: len(_MAPPED) - most + 1 + most // 16]:
            _MAPPED.pop(key, None)


def past_end(position: int, width: int) -> PlanError:
    """The error for a window that goes beyond its source."""
    return PlanError(
        "read beyond the end of a source",
        found=f"{width} tokens from position {position}",
        code="E-PLAN-SHORT",
    )


def _checked(manifest: Manifest, entry: ShardEntry) -> _File:
    # `load_manifest` has checked that the path is inside the directory.
    path = manifest.path.parent / entry.path
    num_tokens, offset_bytes, integers = read_npy_header(path, manifest.dtype)
    if num_tokens != entry.num_tokens:
        raise FormatError(
            "shard has another length than its manifest says",
            where=path,
            found=f"{num_tokens} tokens",
            expected=entry.num_tokens,
            do="run prep for this shard again, or restore the file",
            code="E-SHARD-TRUNCATED",
        )
    status = os.stat(path)
    size_bytes = status.st_size
    modified_ns = status.st_mtime_ns
    return _File(path, offset_bytes, num_tokens, integers, size_bytes, modified_ns, entry.checksum)


def _changed(file: _File, found: str) -> FormatError:
    return FormatError(
        "shard changed while it was in use",
        where=file.path,
        found=found,
        expected=f"{file.size_bytes} bytes, modified at {file.modified_ns} ns",
        do="restore the file, or start again with data that does not change",
        code="E-SHARD-CHANGED",
    )
