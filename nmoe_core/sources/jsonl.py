"""Source kind `jsonl`: one JSON object a line, plain, `.gz` or `.zst`.

One reader decompresses and cuts blocks at line ends; workers parse. Blank lines are records that
hold nothing. A last line without a newline counts; a torn stream is an error that names the file.
Memory: about 2 MiB a block, or one line where a line is longer.
"""

from __future__ import annotations

import codecs
import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import zstandard

from nmoe_core.errors import SourceError
from nmoe_core.fingerprint import sha256_file, sha256_json
from nmoe_core.sources.paths import SourceFile
from nmoe_core.sources.records import BadRecord, Fields, OnError, Record, make_record

_BLOCK_BYTES = 2 * 2**20
_ZSTD_INPUT_BYTES = 4096


@dataclass(frozen=True, slots=True)
class LinesBlock:
    """Whole lines of one file, still bytes."""

    source: str
    file: SourceFile
    first_row: int
    first_line: int
    payload: bytes
    fields: Fields
    on_error: OnError

    def records(self) -> Iterator[Record | BadRecord]:
        """Parse each line; blank lines hold no record but keep their number."""
        lines = self.payload.split(b"\n")
        if lines[-1] == b"":
            lines.pop()
        for i, line in enumerate(lines):
            if line.strip():
                yield self._parse(self.first_row + i, self.first_line + i, line)

    def _parse(self, row: int, line: int, payload: bytes) -> Record | BadRecord:
        where = f"{self.file.where}:{line + 1}"
        try:
            value = _loads(payload, self.on_error)
        except ValueError as error:
            return BadRecord(row, where, f"not JSON: {error}")
        except RecursionError:
            return BadRecord(row, where, "JSON is nested too deep")
        if not isinstance(value, dict):
            return BadRecord(row, where, f"not a JSON object but {type(value).__name__}")
        if self.fields.text not in value:
            return BadRecord(row, where, f"field {self.fields.text!r} is missing")
        id_ = value.get(self.fields.id or "id")
        if id_ is None and self.fields.id is not None:
            return BadRecord(row, where, f"field {self.fields.id!r} is missing")
        default_id = f"{self.source}/{self.file.name}:{line}"
        return make_record(row, where, self.fields, value[self.fields.text], id_, default_id)


def _loads(payload: bytes, on_error: OnError) -> Any:
    try:
        return orjson.loads(payload)
    except orjson.JSONDecodeError:
        # orjson refuses lone surrogate escapes, which are JSON; normalisation replaces them.
        errors = "replace" if on_error == "replace" else "strict"
        return json.loads(payload.decode("utf-8", errors))


class JsonlSource:
    """JSON lines as documents.

    Args:
        name: Source name, first part of ids that the records do not give.
        files: The files in their final order.
        text_field: Field that holds the text.
        id_field: Field that holds the id and must be there; None takes `id` where it exists.
        on_error: What to do with a line that cannot be read.
    """

    def __init__(
        self,
        name: str,
        files: Sequence[SourceFile],
        text_field: str = "text",
        id_field: str | None = None,
        on_error: OnError = "fail",
    ) -> None:
        self.name = name
        self.files = files
        self.fields = Fields(text_field, id_field)
        self.on_error: OnError = on_error

    def revision(self) -> str:
        """SHA-256 over names and contents of the files."""
        return sha256_json([[file.name, sha256_file(file.path)] for file in self.files])

    def check(self) -> None:
        """Nothing to check: the files were found, and a line is a record or a bad record."""

    def num_rows(self) -> int:
        """Number of lines; costs one pass."""
        return sum(_num_lines(payload) for file in self.files for payload in _chunks(file))

    def blocks(self) -> Iterator[LinesBlock]:
        """Blocks of about 2 MiB of whole lines."""
        row = 0
        for file in self.files:
            line = 0
            for payload in _chunks(file):
                yield LinesBlock(self.name, file, row, line, payload, self.fields, self.on_error)
                row += _num_lines(payload)
                line += _num_lines(payload)


def _num_lines(payload: bytes) -> int:
    return payload.count(b"\n") + (not payload.endswith(b"\n"))


def _chunks(file: SourceFile) -> Iterator[bytes]:
    """Whole lines of a file, about 2 MiB at a time, without a byte order mark."""
    is_first = True
    try:
        for chunk in _whole_lines(_decompressed(file.path)):
            payload = chunk.removeprefix(codecs.BOM_UTF8) if is_first else chunk
            is_first = False
            if payload:
                yield payload
    except (EOFError, OSError, zlib.error, zstandard.ZstdError) as error:
        raise SourceError(
            f"file cannot be read to its end: {error}", where=file.where, code="E-SOURCE-TORN"
        ) from error


def _whole_lines(stream: Iterator[bytes]) -> Iterator[bytes]:
    """Join and cut pieces at the last line end of the piece that fills a block."""
    parts: list[bytes] = []
    size_bytes = 0
    for piece in stream:
        parts.append(piece)
        size_bytes += len(piece)
        if size_bytes < _BLOCK_BYTES:
            continue
        if cut := piece.rfind(b"\n") + 1:
            parts[-1] = piece[:cut]
            yield b"".join(parts)
            parts = [piece[cut:]]
            size_bytes = len(parts[0])
    if rest := b"".join(parts):
        yield rest


def _decompressed(path: Path) -> Iterator[bytes]:
    """The bytes of a file in pieces of at most 2 MiB."""
    if path.suffix == ".zst":
        for piece in _zstd_frames(path):
            for start in range(0, len(piece), _BLOCK_BYTES):
                yield piece[start : start + _BLOCK_BYTES]
        return
    with gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb") as stream:
        while piece := stream.read(_BLOCK_BYTES):
            yield piece


def _zstd_frames(path: Path) -> Iterator[bytes]:
    # The library's stream reader takes a cut frame for the end of the data; frame objects know,
    # but give all that an input holds at once. A small input bounds that: 128 KiB per 4 bytes.
    frame = None
    with open(path, "rb") as stream:
        while chunk := stream.read(_ZSTD_INPUT_BYTES):
            while chunk:
                frame = frame or zstandard.ZstdDecompressor().decompressobj()
                yield frame.decompress(chunk)
                chunk = frame.unused_data if frame.eof else b""
                frame = None if frame.eof else frame
    if frame is not None:
        raise EOFError("the last zstd frame is cut short")
