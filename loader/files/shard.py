"""Reads the two files of a shard strictly: tokens in `.npy`, document boundaries in `.idx`.

The files are not trusted: headers are parsed without pickle, and sizes are checked before a file is
mapped. Formats: docs/formats.md.
"""

import ast
import errno
import struct
import threading
from pathlib import Path
from typing import NamedTuple

import numpy as np

from loader.errors import FormatError
from loader.files.addresses import as_path
from loader.files.bus_errors import report_bus_errors
from loader.files.regular import open_file, regular

INDEX_MAGIC = b"NMOEIDX\0"
INDEX_VERSION = 1
INDEX_HEADER = struct.Struct("<8sQQQ")
_NPY_MAGIC = b"\x93NUMPY\x01\x00"
_MAX_NPY_HEADER_BYTES = 4096
# In CPython 3.11, two threads that parse at once may raise a SystemError.
_PARSING = threading.Lock()


class IndexHeader(NamedTuple):
    """The four header fields of an `.idx` file."""

    magic: bytes
    version: int
    num_docs: int
    reserved: int


class NpyHeader(NamedTuple):
    """Contents of the header of a `.npy` file."""

    num_tokens: int
    offset_bytes: int
    """Byte offset of the first token."""
    integers: np.dtype
    """`<u4` or `<u2`."""


def read_npy_header(path: Path, dtype: str | None = None) -> NpyHeader:
    """Check a shard's header against its file, and against the `dtype` of its manifest. Raises
    FormatError if the file is missing (E-SHARD-MISSING), is not NPY v1.0 with one dimension of
    `<u4` or `<u2` in C order, has other integers than the manifest (E-SHARD-FORMAT), or is shorter
    or longer than the header says (E-SHARD-TRUNCATED)."""
    try:
        size_bytes = path.stat().st_size
        with open_file(path) as file:
            head = file.read(len(_NPY_MAGIC) + 2)
            if len(head) < len(_NPY_MAGIC) + 2 or not head.startswith(_NPY_MAGIC):
                raise _shard_format(path, repr(head[:8]), "an NPY version 1.0 file")
            header_bytes = int.from_bytes(head[-2:], "little")
            if header_bytes > _MAX_NPY_HEADER_BYTES:
                raise _shard_format(path, f"a header of {header_bytes} bytes", "at most 4096")
            header = file.read(header_bytes)
    except OSError as error:
        raise unreadable(path, error, "E-SHARD-MISSING") from None
    num_tokens, integers = _parse_npy_header(path, header, header_bytes)
    if dtype is not None and integers != np.dtype(dtype):
        raise _shard_format(path, f"integers {integers}", f"{dtype}, as its manifest says")
    offset = len(head) + header_bytes
    if size_bytes != offset + integers.itemsize * num_tokens:
        raise FormatError(
            "shard size does not match its header",
            where=path,
            found=f"{size_bytes} bytes",
            expected=f"{offset + integers.itemsize * num_tokens}",
            do="run prep for this shard again, or restore the file",
            code="E-SHARD-TRUNCATED",
        )
    return NpyHeader(num_tokens, offset, integers)


def _parse_npy_header(path: Path, header: bytes, header_bytes: int) -> tuple[int, np.dtype]:
    if len(header) != header_bytes:
        raise _shard_format(path, f"{len(header)} header bytes", str(header_bytes))
    try:
        with _PARSING:
            fields = ast.literal_eval(header.decode("latin-1").strip())
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        raise _shard_format(
            path, repr(header[:60]), "a header that is a literal dictionary"
        ) from None
    if not isinstance(fields, dict) or set(fields) != {"descr", "fortran_order", "shape"}:
        raise _shard_format(path, repr(fields)[:120], "keys descr, fortran_order, shape")
    shape = fields["shape"]
    one_dim = isinstance(shape, tuple) and len(shape) == 1
    if not one_dim or type(shape[0]) is not int or not 0 <= shape[0] < 2**48:
        raise _shard_format(path, f"shape {shape!r}", "one dimension")
    if fields["descr"] not in ("<u4", "<u2") or fields["fortran_order"] is not False:
        found = f"descr {fields['descr']!r}, fortran_order {fields['fortran_order']!r}"
        raise _shard_format(path, found, "descr '<u4' or '<u2' in C order")
    return shape[0], np.dtype(fields["descr"])


def _shard_format(path: Path, found: str, expected: str) -> FormatError:
    return FormatError(
        "not a token shard", where=path, found=found, expected=expected, code="E-SHARD-FORMAT"
    )


def unreadable(path: Path, error: OSError, code: str) -> FormatError | OSError:
    """The error for a file that cannot be read; if the process has too many open files, the error
    itself, so that `loader.files.tokens` can close some."""
    if error.errno == errno.EMFILE:
        return error
    do = "correct the path, or restore the file"
    if code == "E-INDEX-MISSING":
        do = "rebuild the index with `nmoe regenerate-index`"
    what = "no such file" if isinstance(error, FileNotFoundError) else "file cannot be read"
    reason = None if isinstance(error, FileNotFoundError) else error.strerror
    return FormatError(what, where=path, found=reason, do=do, code=code)


def open_shard(path: str | Path, dtype: str | None = None) -> np.ndarray:
    """Map a shard read-only: uint32 or uint16 `[num_tokens]`. Raises as `read_npy_header`."""
    path = as_path(path)
    num_tokens, offset, integers = read_npy_header(path, dtype)
    if num_tokens == 0:
        return np.empty(0, integers)
    report_bus_errors()
    mapped = np.memmap(regular(path), integers, "r", offset, (num_tokens,))
    # A plain array: each slice of an np.memmap creates a subclass object, which costs as much as
    # copying a window of 2,048 tokens.
    return np.asarray(mapped)


class IndexReader:
    """Document boundaries of one shard, from its `.idx` file. Raises FormatError if the file is
    missing (E-INDEX-MISSING), or magic, version, size or boundaries are wrong (E-INDEX-FORMAT)."""

    def __init__(self, path: str | Path) -> None:
        self.path = as_path(path)
        try:
            size_bytes = self.path.stat().st_size
            with open_file(self.path) as file:
                head = file.read(INDEX_HEADER.size)
                if len(head) != INDEX_HEADER.size:
                    raise self._error(f"{len(head)} bytes", "a 32-byte header")
                self.header = IndexHeader(*INDEX_HEADER.unpack(head))
                self._check_header(size_bytes)
                body = file.read(16 * self.header.num_docs)
        except OSError as error:
            raise unreadable(self.path, error, "E-INDEX-MISSING") from None
        self._spans = np.frombuffer(body, "<u8").reshape(-1, 2)
        self._check_spans()

    @property
    def num_docs(self) -> int:
        """Number of documents."""
        return self.header.num_docs

    def get_document(self, i: int) -> tuple[int, int]:
        """Token span `(start, end)` of document `i`, end exclusive and past its EOS. Raises
        IndexError if `i` is negative or not below `num_docs`."""
        if not 0 <= i < self.num_docs:
            raise IndexError(f"{self.path}: document {i} of {self.num_docs}")
        start, end = self._spans[i]
        return int(start), int(end)

    def to_array(self) -> np.ndarray:
        """All spans: uint64 `[num_docs, 2]`."""
        return self._spans

    def _check_header(self, size_bytes: int) -> None:
        magic, version, num_docs, _ = self.header
        if magic != INDEX_MAGIC or version != INDEX_VERSION:
            raise self._error(f"magic {magic!r} version {version}", f"{INDEX_MAGIC!r} version 1")
        expected = INDEX_HEADER.size + 16 * num_docs
        if size_bytes != expected:
            raise self._error(f"{size_bytes} bytes", f"{expected} for {num_docs} docs")

    def _check_spans(self) -> None:
        starts = self._spans[:, 0]
        ends = self._spans[:, 1]
        if not len(starts):
            return
        if starts[0] != 0:
            raise self._error(f"first document at {starts[0]}", "0")
        for bad, found in (
            (np.flatnonzero(ends <= starts), "an empty or reversed span"),
            (np.flatnonzero(starts[1:] != ends[:-1]), "a gap or overlap after it"),
        ):
            if len(bad):
                raise self._error(f"document {bad[0]}: {found}", "contiguous spans")

    def _error(self, found: str, expected: str) -> FormatError:
        return FormatError(
            "not a document index",
            where=self.path,
            found=found,
            expected=expected,
            do="rebuild the index with `nmoe regenerate-index`",
            code="E-INDEX-FORMAT",
        )
