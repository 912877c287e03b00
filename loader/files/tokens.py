"""The token files of all sources on one axis of positions; each file is mapped on first use.

The files of a source are consecutive, in manifest order, and so are the sources, so that one
`searchsorted` finds the files of any number of rows. A mapped file takes a file descriptor, so at
most a quarter of the process's descriptors is used; the least recently used file is unmapped first.
"""

import mmap
import os
import resource
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np

from loader.errors import FormatError, PlanError
from loader.files.bus_errors import report_bus_errors
from loader.files.format import Manifest, ShardEntry
from loader.files.regular import open_file
from loader.files.shard import read_npy_header


class _File(NamedTuple):
    path: str
    offset_bytes: int
    num_tokens: int
    integers: np.dtype
    size_bytes: int
    modified_ns: int


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
        self._max_mapped = max_mapped()
        self._lay_out(manifests, [file.num_tokens for file in self._files], wraps)

    def _lay_out(
        self, manifests: Sequence[Manifest], file_tokens: Sequence[int], wraps: bool
    ) -> None:
        self.wraps = wraps
        self.file_starts = starts_of(file_tokens)
        self.source_starts = starts_of([manifest.total_tokens for manifest in manifests])
        self._mapped: dict[int, np.ndarray] = {}

    def tokens(self, file: int) -> np.ndarray:
        """All tokens of a file: uint32 or uint16 `[num_tokens]`, mapped read-only. Raises
        FormatError if the file has changed since it was checked (E-SHARD-CHANGED)."""
        found = self._mapped.pop(file, None)
        if found is None:
            found = self._map(file)
            while len(self._mapped) >= self._max_mapped:
                del self._mapped[next(iter(self._mapped))]
        # moves the file to the end, so that the first file is the least recently used
        self._mapped[file] = found
        return found

    def _map(self, file: int) -> np.ndarray:
        return _mapped(self._files[file])

    def paths(self) -> list[Path]:
        """The path of every file, by its number."""
        return [Path(file.path) for file in self._files]

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
        self._mapped.clear()


def starts_of(sizes: Sequence[int]) -> np.ndarray:
    """Start of each of several consecutive ranges with these sizes, and the end of the last: int64
    `[len(sizes) + 1]`."""
    return np.array([0, *accumulate(sizes)], np.int64)


def max_mapped() -> int:
    """Maximum number of mapped files: a quarter of the limit on open files, 16 to 4,096."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 4096 if soft == resource.RLIM_INFINITY else min(4096, max(16, soft // 4))


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
    return _File(str(path), offset_bytes, num_tokens, integers, size_bytes, modified_ns)


def _mapped(file: _File) -> np.ndarray:
    if not file.num_tokens:
        return np.empty(0, file.integers)
    try:
        with open_file(file.path, buffering=0) as opened:
            status = os.fstat(opened.fileno())
            found = (status.st_size, status.st_mtime_ns)
            if found != (file.size_bytes, file.modified_ns):
                raise _changed(file, f"{found[0]} bytes, modified at {found[1]} ns")
            mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise _changed(file, "no file") from None
    # A plain array: each slice of an np.memmap creates a subclass object, which costs as much as
    # copying a window of 2,048 tokens.
    return np.frombuffer(mapped, file.integers, file.num_tokens, file.offset_bytes)


def _changed(file: _File, found: str) -> FormatError:
    return FormatError(
        "shard changed while it was in use",
        where=file.path,
        found=found,
        expected=f"{file.size_bytes} bytes, modified at {file.modified_ns} ns",
        do="restore the file, or start again with data that does not change",
        code="E-SHARD-CHANGED",
    )
