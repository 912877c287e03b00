"""Source kind `jsonl`: one JSON object per line, plain, `.gz` or `.zst`.

Plain local files are cut into ranges at line ends, and workers read the ranges for themselves; a
compressed or remote file is read here and its blocks carry their bytes. Blank lines count as rows
but hold no record. A last line without a newline counts; a torn stream is an error that names the
file. Memory: about 2 MiB a block, or one line where a line is longer, up to `max_record_bytes`: a
longer one is refused before more of it is held.
"""

import codecs
import io
import mmap
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import orjson

from nmoe_core.base.jsonl import (
    as_object,
    encodable,
    id_of,
    parse_json,
    parse_object,
    text_of,
    value_of,
)
from nmoe_core.sources.files import BLOCK_BYTES, FileSource
from nmoe_core.sources.kept import MISSING
from nmoe_core.sources.records import BadRecord, Block, Position, Record, RecordColumns
from nmoe_core.sources.storage import COMPRESSED, TORN, Read, SourceFile, decompressed, torn

_NEWLINE = 10
_Payload = TypeVar("_Payload", bytes, memoryview)
_MAX_DEPTH = 3  # of the objects whose fields an error names


@dataclass(frozen=True, slots=True)
class LinesBlock(Block):
    """Whole lines of one file: their bytes, or None where the worker is to read them."""

    file: SourceFile
    payload: bytes | None = None

    def records(self) -> Iterator[Record | BadRecord]:
        """Parse each line; blank lines hold no record but keep their number."""
        if (lines := self.lines()) is not None:
            yield from self._records(lines)
        elif self.payload is not None:
            yield from self._records(_split(self._unmarked(self.payload)))
        else:
            # A long line is parsed where it lies in the page cache: no copy of its raw bytes.
            with (
                self.file.open() as file,
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages,
                memoryview(pages) as whole,
                whole[self.start.offset : self.end.offset] as part,
            ):
                yield from self._records(_split(self._unmarked(part)))

    def lines(self) -> list[bytes] | None:
        """The lines as they are; None for a long one."""
        first, last = self.start.offset, self.end.offset
        if last - first > 2 * BLOCK_BYTES:
            return None
        payload = self.payload
        if payload is None:
            with self.file.open() as file:
                file.seek(first)
                payload = file.read(last - first)
        lines = self._unmarked(payload).split(b"\n")
        return lines if lines[-1] else lines[:-1]

    def places(self, numbers: Iterable[int]) -> list[str]:
        """The ids of those lines' documents that have none of their own."""
        prefix, first = self._prefix(), self.start.line
        return [f"{prefix}{first + i}" for i in numbers]

    def _prefix(self) -> str:
        return encodable(f"{self.reading.source}/{self.file.name}:")

    def _unmarked(self, payload: _Payload) -> _Payload:
        is_marked = self.start.offset == 0 and payload[:3] == codecs.BOM_UTF8
        return payload[3:] if is_marked else payload

    def _records(self, lines: Iterable[bytes | memoryview]) -> Iterator[Record | BadRecord]:
        return self.parse(enumerate(lines)).records()

    def parse(self, lines: Iterable[tuple[int, bytes | memoryview]]) -> RecordColumns:
        """Parse lines of the block, each with how many come before it; a blank one holds no
        record."""
        reading, start, prefix = self.reading, self.start, self._prefix()
        text_field, id_field, kept_fields = reading.text_field, reading.id_field, reading.kept
        replaces, own_id = reading.on_error == "replace", id_field or "id"
        found = RecordColumns()
        rows, ids, texts = found.rows, found.ids, found.texts
        for i, raw in lines:
            is_replaced = is_placed = False
            # Nearly all records need none of the rules: skipping them saves five calls, a third of
            # the time.
            try:
                try:
                    value = orjson.loads(raw)
                except orjson.JSONDecodeError:
                    value, is_replaced = parse_json(raw, replace=replaces)
                fields = value if type(value) is dict else as_object(value)
                text = fields.get(text_field)
                if type(text) is not str:
                    text = text_of(fields, text_field)
                id_ = fields.get(own_id)
                if type(id_) is not str or not id_ or not id_.isascii():
                    place = f"{prefix}{start.line + i}"
                    has_none = id_ is None and id_field is None
                    id_ = place if has_none else id_of(fields, id_field, place)
                    is_placed = id_ == place
                if kept_fields:
                    found.kept.append(tuple(value_of(fields, k, MISSING) for k in kept_fields))
                if is_replaced:
                    found.replaced.append(len(rows))
                if is_placed:
                    found.placed.append(len(rows))
            except ValueError as error:
                if not bytes(raw).strip():
                    continue
                where = f"{self.file.where}:{start.line + i + 1}"
                found.bad[len(rows)] = BadRecord(start.row + i, where, str(error))
                id_ = text = ""
                if kept_fields:
                    found.kept.append(())
            rows.append(start.row + i)
            ids.append(id_)
            texts.append(text)
        return found


def _paths(value: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, inner in value.items():
        yield prefix + key
        if isinstance(inner, dict) and prefix.count(".") < _MAX_DEPTH:
            yield from _paths(inner, f"{prefix}{key}.")


def _split(payload: bytes | memoryview) -> Iterator[memoryview]:
    """The lines of a long payload, which are not copied."""
    view, start = memoryview(payload), 0
    while start < len(view):
        stop = _find_newline(view, start)
        yield view[start:stop]
        start = stop + 1


def _find_newline(view: memoryview, start: int) -> int:
    for chunk_start in range(start, len(view), BLOCK_BYTES):
        found = bytes(view[chunk_start : chunk_start + BLOCK_BYTES]).find(b"\n")
        if found >= 0:
            return chunk_start + found
    return len(view)


class JsonlSource(FileSource[LinesBlock]):
    """JSON lines as documents; without an id field, a field `id` is taken where it is there."""

    def field_names(self) -> list[str]:
        """Names of the fields of the first 2 MiB of records, with paths into objects."""
        found: dict[str, None] = {}
        for file in self.files[:1]:
            with file.open() as stored:
                payload = decompressed(stored, file.suffix)(BLOCK_BYTES)
            for line in payload.removeprefix(codecs.BOM_UTF8).split(b"\n"):
                with suppress(ValueError):  # the last line is cut; a bad record has no fields
                    found |= dict.fromkeys(_paths(parse_object(line)))
        return list(found)

    def _file_blocks(self, file: SourceFile, start: Position) -> Iterator[LinesBlock]:
        at, limit = start, self.reading.max_record_bytes
        for size_bytes, num_lines, stored_bytes, payload in _cut_file(file, start.offset, limit):
            if size_bytes > limit:  # a block of one line, cut short
                raise self.reading.too_long(f"{file.where}:{at.line + 1}")
            moved = (at.offset + size_bytes, at.line + num_lines, at.row + num_lines)
            end = Position(at.file, *moved)
            yield LinesBlock(self.reading, at, end, stored_bytes, file, payload)
            at = end


def _cut_file(
    file: SourceFile, offset: int, limit: int
) -> Iterator[tuple[int, int, int, bytes | None]]:
    """Size, number of lines, stored size and, if kept, bytes of the blocks from a place on.

    Reading stops inside a line of more than `limit` bytes, which is then the last block.
    """
    by_worker = file.is_local and file.suffix not in COMPRESSED
    try:
        with file.open() as stored:
            read, to_skip = decompressed(stored, file.suffix), offset
            if file.suffix not in COMPRESSED:
                stored.seek(offset)
                to_skip = 0
            while to_skip and (piece := read(min(to_skip, BLOCK_BYTES))):
                to_skip -= len(piece)
            before = stored.tell()
            blocks = _cut_ranges(stored, offset, limit) if by_worker else _cut(read, limit)
            for size_bytes, num_lines, payload in blocks:
                if offset == 0 and size_bytes == 3 and _is_only_mark(file):
                    return
                yield size_bytes, num_lines, stored.tell() - before, payload
                before = stored.tell()
    except TORN as error:
        raise torn(file.where, error) from error


def _cut(read: Read, limit: int) -> Iterator[tuple[int, int, bytes | None]]:
    """Cut after the last line end of 2 MiB, or after one longer line.

    Where a block ends depends only on where it starts, so reading may start at any block.
    """
    rest = b""
    while piece := rest + read(BLOCK_BYTES - len(rest)):
        if cut := piece.rfind(b"\n") + 1:
            rest = piece[cut:]
            yield cut, piece.count(b"\n", 0, cut), piece[:cut]
            continue
        size_bytes, parts, rest = len(piece), [piece], b""
        while piece := read(BLOCK_BYTES):
            cut = piece.find(b"\n") + 1 or len(piece)
            size_bytes += cut
            parts.append(piece[:cut])
            if piece[cut - 1] == _NEWLINE:
                rest = piece[cut:]
                break
            if size_bytes > limit:
                yield size_bytes, 1, None
                return
        yield size_bytes, 1, b"".join(parts)


def _cut_ranges(
    stored: io.BufferedReader, offset: int, limit: int
) -> Iterator[tuple[int, int, None]]:
    """The same cuts without the bytes: the file is read into one buffer, and lines are counted."""
    buffer = bytearray(BLOCK_BYTES)
    view, is_newline = np.frombuffer(buffer, np.uint8), np.empty(BLOCK_BYTES, np.bool_)
    while num_read := stored.readinto(buffer):
        size_bytes, num_lines = buffer.rfind(b"\n", 0, num_read) + 1, 1
        if size_bytes:
            np.equal(view, _NEWLINE, out=is_newline)
            num_lines = int(np.count_nonzero(is_newline[:size_bytes]))
        else:  # a longer line
            size_bytes = num_read
            while num_read := stored.readinto(buffer):
                cut = buffer.find(b"\n", 0, num_read) + 1
                size_bytes += cut or num_read
                if cut or size_bytes > limit:
                    break
        yield size_bytes, num_lines, None
        offset += size_bytes
        stored.seek(offset)


def _is_only_mark(file: SourceFile) -> bool:
    with file.open() as stored:
        return decompressed(stored, file.suffix)(4) == codecs.BOM_UTF8
