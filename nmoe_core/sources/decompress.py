"""Files as streams of bytes: as they are, `.gz` and `.zst`, in memory that does not follow them."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from typing import BinaryIO, Protocol, cast

import zstandard

COMPRESSED = (".gz", ".zst")
# What reading a damaged stream raises.
TORN = (EOFError, OSError, zlib.error, zstandard.ZstdError)
_ZSTD_INPUT_BYTES = 4096
_LEAST_ZSTD_INPUT_BYTES = 64
_MUCH_BYTES = 2**18


class Readable(Protocol):
    """A stream of bytes."""

    def read(self, size: int, /) -> bytes:
        """At most `size` bytes, none at the end."""
        ...


def decompressed(stored: BinaryIO, suffix: str) -> Readable:
    """The bytes behind a file's bytes, by the file's suffix; `stored` itself where it is plain."""
    if suffix == ".gz":
        return cast(Readable, gzip.GzipFile(fileobj=stored, mode="rb"))
    return _ZstdFrames(stored) if suffix == ".zst" else stored


class _ZstdFrames:
    """The bytes of all frames of a file, whole or an EOFError.

    The library's stream reader takes a cut frame for the end of the data; frame objects know, but
    give all that an input holds at once. A small input bounds that, 128 KiB per 4 bytes: inputs are
    large only where little came of the last, so at most 128 MiB come at once.
    """

    def __init__(self, stored: BinaryIO) -> None:
        self._pieces = self._decompress(stored)
        self._rest = memoryview(b"")

    def read(self, size: int) -> bytes:
        """Exactly `size` bytes, fewer at the end."""
        parts: list[memoryview] = []
        missing = size
        while missing and (piece := self._rest or memoryview(next(self._pieces, b""))):
            parts.append(piece[:missing])
            self._rest = piece[missing:]
            missing -= len(parts[-1])
        return b"".join(parts)

    def _decompress(self, stored: BinaryIO) -> Iterator[bytes]:
        frame, size = None, _LEAST_ZSTD_INPUT_BYTES
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
            raise EOFError("the last zstd frame is cut short")
