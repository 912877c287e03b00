"""One file of a source, on this machine or in any store that fsspec supports.

The file is opened as a seekable binary stream (with range reads in a store) and has a size and a
revision. The revision of a local file is the SHA-256 of its bytes. The revision of a remote file is
the store's mark, prefixed with the kind of mark (`etag:`, `md5:`, `modified:`), or the file's
SHA-256 if the store keeps no mark. fsspec and the store's client read credentials and endpoints
from the environment. Reading a compressed file takes at most 160 MiB of memory, whatever its size.
"""

import bz2
import gzip
import hashlib
import io
import lzma
import os
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from tempfile import TemporaryFile, gettempdir
from typing import Any, BinaryIO, NamedTuple

import zstandard

from loader.files.regular import open_file
from nmoe_core.base.atomic import named_errors
from nmoe_core.base.errors import SourceError, one_line
from nmoe_core.base.fingerprint import local_digest
from nmoe_core.base.jsonl import COMPRESSED as COMPRESSED

_READ_BYTES = 4 * 2**20
_STREAM_BYTES = 2**16
Read = Callable[[int], bytes]  # a read function; its argument is the maximum number of bytes
# Errors that reading a damaged stream raises.
TORN = (EOFError, OSError, zlib.error, lzma.LZMAError, zstandard.ZstdError)
_ZSTD_INPUT_BYTES = 4096
_LEAST_ZSTD_INPUT_BYTES = 64
_MUCH_BYTES = 2**18
_XZ_MAGIC = b"\xfd7zXZ\0"
_XZ_INPUT_BYTES = 2**16
# enough for a dictionary of 128 MiB, the largest that zstd reads too
_XZ_MEMORY_BYTES = 160 * 2**20
_DIGESTS = {"ETag": "etag", "etag": "etag", "md5Hash": "md5", "content_md5": "md5"}
_TIMES = ("LastModified", "last_modified", "updated", "mtime", "modified", "created")


class SourceFile(NamedTuple):
    """A file and its name in ids; `path` is a local path or a URL."""

    path: Path | str
    name: str

    @property
    def where(self) -> str:
        """The path as printable text; works for any bytes."""
        return self.path if isinstance(self.path, str) else path_text(self.path)

    @property
    def is_local(self) -> bool:
        return isinstance(self.path, Path)

    @property
    def suffix(self) -> str:
        """Last suffix in lower case, with its dot, such as `.gz`."""
        return PurePosixPath(self.path).suffix.lower()

    def open(self) -> io.BufferedReader:
        """Open the file as a seekable binary stream. Raises SourceError if it does not exist
        (E-SOURCE-NOTFOUND), the store does not answer (E-SOURCE-NETWORK), or its client is not
        installed (E-SOURCE-EXTRA)."""
        if isinstance(self.path, Path):
            try:
                return open_file(self.path)
            except FileNotFoundError as error:
                raise _absent(self.where) from error
        fs, key = file_system(self.path)
        with store_errors(self.path):
            stream = fs.open(key, "rb")
        return io.BufferedReader(_RemoteStream(stream, self.path), _READ_BYTES)

    def size_bytes(self) -> int:
        """Size in bytes. Raises as `open`."""
        if isinstance(self.path, Path):
            return self.path.stat().st_size
        fs, key = file_system(self.path)
        with store_errors(self.path):
            return int(fs.size(key))

    def revision(self) -> str:
        """A mark that changes if the file's bytes may have changed; always queries the store."""
        if isinstance(self.path, Path):
            return local_digest(self.path)
        fs, key = file_system(self.path)
        with store_errors(self.path):
            fs.invalidate_cache()  # fsspec answers `info` from its last listing
            mark = _store_mark(fs.info(key))
        if mark is not None:
            return mark
        with self.open() as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()


def path_text(path: Path | str) -> str:
    """A path as text; bytes that are not UTF-8 become `\\xff`."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def is_url(text: str) -> bool:
    """Whether a path is a URL, such as `s3://bucket/key`."""
    return "://" in text


def file_system(url: str) -> tuple[Any, str]:
    """The fsspec file system of a URL, and the path in it. Raises SourceError if the store's client
    is not installed (E-SOURCE-EXTRA), the protocol is unknown or URLs are chained
    (E-SOURCE-PROTOCOL), or the store does not answer (E-SOURCE-NETWORK)."""
    if "::" in url:
        raise SourceError(
            "chained URLs are not supported",
            where=url,
            do="name the file",
            code="E-SOURCE-PROTOCOL",
        )
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise _missing_client(url, "reading remote files needs fsspec") from error
    try:
        with store_errors(url):
            return url_to_fs(url)
    except ImportError as error:
        raise _missing_client(url, one_line(error)) from error
    except ValueError as error:
        raise SourceError(
            f"cannot read this URL: {error}", where=url, code="E-SOURCE-PROTOCOL"
        ) from error


@contextmanager
def store_errors(where: str) -> Iterator[None]:
    """Convert errors of a store's client to SourceError with the file's name."""
    try:
        yield
    except FileNotFoundError as error:
        raise _absent(where) from error
    except _client_errors() as error:
        cause = one_line(error)
        raise SourceError(
            f"cannot read from the store: {cause}",
            where=where,
            do="check the credentials, the endpoint and the network, and run again",
            code="E-SOURCE-NETWORK",
        ) from error


class _RemoteStream(io.RawIOBase):
    """A stream of a remote file that converts the client's errors to SourceError."""

    def __init__(self, stream: Any, url: str) -> None:
        self._stream = stream
        self._url = url

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._stream.tell()

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        return self._stream.seek(offset, whence)

    def readinto(self, buffer: Any, /) -> int:
        with store_errors(self._url):
            payload = self._stream.read(len(buffer))
        buffer[: len(payload)] = payload
        return len(payload)

    def close(self) -> None:
        if not self.closed:
            self._stream.close()
        super().close()


def _store_mark(info: dict[str, Any]) -> str | None:
    for key, name in _DIGESTS.items():
        if info.get(key):
            return f"{name}:{str(info[key]).strip(chr(34))}:{info.get('size')}"
    for key in _TIMES:
        if info.get(key):
            return f"modified:{info[key]}:{info.get('size')}"
    return None


def _client_errors() -> tuple[type[Exception], ...]:
    """Base classes of errors of the imported clients; most of their errors are OSErrors."""
    roots: list[type[Exception]] = [OSError]
    for module, name in (("botocore.exceptions", "BotoCoreError"), ("aiohttp", "ClientError")):
        if module in sys.modules:
            roots.append(getattr(sys.modules[module], name))
    return tuple(roots)


def _absent(where: str) -> SourceError:
    return SourceError("no such file", where=where, do="correct the path", code="E-SOURCE-NOTFOUND")


def _missing_client(url: str, what: str) -> SourceError:
    return SourceError(what, where=url, do="pip install 'nmoe-data[remote]'", code="E-SOURCE-EXTRA")


def decompressed(stored: BinaryIO, suffix: str) -> Read:
    """A function that reads decompressed bytes; the suffix of the file sets the format. It returns
    b"" at the end."""
    if suffix == ".gz":
        return gzip.GzipFile(fileobj=stored, mode="rb").read
    if suffix == ".bz2":
        return bz2.BZ2File(stored).read
    if suffix == ".xz":
        return reader_of(_xz_pieces(stored))
    if suffix not in COMPRESSED:
        return stored.read
    return reader_of(_zstd_pieces(stored))


def reader_of(pieces: Iterator[bytes]) -> Read:
    """A function that reads from an iterable of pieces; no piece may be empty."""
    rest = memoryview(b"")

    def read(size: int) -> bytes:
        nonlocal rest
        parts: list[memoryview] = []
        while size and (piece := rest or memoryview(next(pieces, b""))):
            parts.append(piece[:size])
            rest = piece[size:]
            size -= len(parts[-1])
        return b"".join(parts)

    return read


class _Stream(io.RawIOBase):
    """A stream of the bytes that `read` returns."""

    def __init__(self, read: Read) -> None:
        self._read = read

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        payload = self._read(len(buffer))
        buffer[: len(payload)] = payload
        return len(payload)


def stream_of(read: Read) -> io.BufferedReader:
    """A stream that cannot seek, of the bytes that `read` returns."""
    return io.BufferedReader(_Stream(read), _STREAM_BYTES)


@contextmanager
def open_plain(path: Path) -> Iterator[BinaryIO]:
    """Open the decompressed bytes of a local file as a seekable stream: the file itself, or a
    decompressed copy.

    The copy is an unnamed temporary file (in `TMPDIR`). Raises SourceError if the compressed file
    is damaged (E-SOURCE-TORN).
    """
    with open_file(path) as stored:
        suffix = path.suffix.lower()
        if suffix not in COMPRESSED:
            yield stored
            return
        with TemporaryFile() as copy:
            with named_errors(gettempdir()):
                read = decompressed(stored, suffix)
                while payload := _read_whole(read, path):
                    copy.write(payload)
                copy.seek(0)
            yield copy


def _read_whole(read: Read, path: Path) -> bytes:
    try:
        return read(_READ_BYTES)
    except TORN as error:
        raise torn(path_text(path), error) from error


def torn(where: str, error: Exception) -> SourceError:
    """The error for a damaged compressed file."""
    return SourceError(
        f"file cannot be read to its end: {error}", where=where, code="E-SOURCE-TORN"
    )


def _xz_pieces(stored: BinaryIO) -> Iterator[bytes]:
    """The bytes of all streams of a file; `lzma.LZMAFile` cannot limit the memory of a stream.
    Raises EOFError if the last stream is truncated; other bytes after it are ignored."""
    chunk = stored.read(_XZ_INPUT_BYTES)
    while True:
        stream = lzma.LZMADecompressor(memlimit=_XZ_MEMORY_BYTES)
        while not stream.eof:
            if stream.needs_input and not (chunk := chunk or stored.read(_XZ_INPUT_BYTES)):
                raise EOFError("the last xz stream is truncated")
            if piece := stream.decompress(chunk, _READ_BYTES):
                yield piece
            chunk = b""
        chunk = stream.unused_data + stored.read(_XZ_INPUT_BYTES)
        if not chunk or chunk[:6] != _XZ_MAGIC[: len(chunk)]:
            return


def _zstd_pieces(stored: BinaryIO) -> Iterator[bytes]:
    """The bytes of all frames of a file. Raises EOFError if the last frame is truncated.

    The library's stream reader treats a truncated frame as the end of the data. Frame objects
    detect a truncated frame, but return the whole output of a piece of input at once, up to 128 KiB
    per 4 bytes. So a large piece is read only if the last output was small, which limits an output
    to 128 MiB.
    """
    frame = None
    size = _LEAST_ZSTD_INPUT_BYTES
    while chunk := stored.read(size):
        produced = 0
        while chunk:
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            if piece := frame.decompress(chunk):
                produced += len(piece)
                yield piece
            chunk = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
        is_dense = produced > _MUCH_BYTES
        size = _LEAST_ZSTD_INPUT_BYTES if is_dense else min(2 * size, _ZSTD_INPUT_BYTES)
    if frame is not None:
        raise EOFError("the last zstd frame is truncated")
