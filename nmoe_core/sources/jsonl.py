"""Source kind `jsonl`: one JSON object per line, plain or compressed.

Plain local files are cut into ranges at line ends, and workers read the ranges themselves.
Compressed and remote files are read in the main process, and their blocks contain the bytes. Blank
lines count as rows but are not records. A last line without a newline counts; a truncated stream is
an error that names the file. Memory: about 2 MiB per block, or one longer line of up to
`max_record_bytes`; a longer line is not read further.

Other forms are converted to JSON lines: a file in another encoding, and a file that is one JSON
array, or one object over several lines. An array is read item by item. With a chat template, the
text is what the template makes of the list of messages in the text field.
"""

import codecs
import io
import mmap
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import orjson

from nmoe_core.base.errors import SourceError
from nmoe_core.base.jsonl import (
    MARKED,
    as_object,
    encodable,
    id_of,
    marked_encoding,
    parse_json,
    parse_object,
    text_of,
    value_of,
)
from nmoe_core.sources.file_sources import BLOCK_BYTES, FileSource
from nmoe_core.sources.formats import kind_of
from nmoe_core.sources.forms.arrays import json_items
from nmoe_core.sources.forms.chat import renderer
from nmoe_core.sources.forms.encoding import HEAD_BYTES, as_utf8, encoding_of
from nmoe_core.sources.passthrough_columns import MISSING
from nmoe_core.sources.records import (
    SAMPLED_RECORDS,
    START,
    BadRecord,
    Block,
    Position,
    Record,
    RecordColumns,
    Sample,
)
from nmoe_core.sources.storage import (
    COMPRESSED,
    TORN,
    Read,
    SourceFile,
    decompressed,
    reader_of,
    stream_of,
    torn,
)

_NEWLINE = 10
_ONE_VALUE = re.compile(r"\s*(\[|\{\s*\n)")  # a line with a record never starts with these bytes
_HEAD_BYTES = 2**16
_SAMPLED_BLOCKS = 4
_Payload = TypeVar("_Payload", bytes, memoryview)
_MAX_DEPTH = 3  # maximum depth of field names to list in an error


@dataclass(frozen=True, slots=True)
class LinesBlock(Block):
    """Complete lines of one file: their bytes, or None if the worker reads them."""

    file: SourceFile
    payload: bytes | None = None
    encoding: str = ""
    """The encoding of the file, if it was detected."""

    @property
    def detected(self) -> str:
        return self.encoding if self.start.line == 0 else ""

    def records(self) -> Iterator[Record | BadRecord]:
        """Parse each line; blank lines are not records but count as rows."""
        with self._opened_lines() as lines:
            yield from self.parse(enumerate(lines)).records()

    def values(self) -> Iterator[dict[str, Any]]:
        """The JSON objects; lines without an object are skipped."""
        with self._opened_lines() as lines:
            for line in lines:
                if bytes(line[:1]).strip() or bytes(line).strip():
                    with suppress(ValueError):  # bad records are skipped, since they have no fields
                        yield parse_object(line)

    @contextmanager
    def _opened_lines(self) -> Iterator[Iterable[Any]]:
        """Open the lines, as bytes or as views; views are valid only inside the context."""
        if (lines := self.lines()) is not None:
            yield lines
        elif self.payload is not None:
            yield _split(self._unmarked(self.payload))
        else:
            # A long line is parsed from the memory-mapped file, without a copy of its bytes.
            with (
                self.file.open() as file,
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages,
                memoryview(pages) as whole,
                whole[self.start.offset : self.end.offset] as part,
            ):
                yield _split(self._unmarked(part))

    def where(self, row: int) -> str:
        return f"{self.file.where}:{self.start.line + row - self.start.row + 1}"

    def lines(self) -> list[bytes] | None:
        """The raw lines, none of a blank block; None if the block is one long line."""
        size_bytes = self.end.offset - self.start.offset
        if size_bytes > 2 * BLOCK_BYTES:
            return None
        payload = self.payload
        if payload is None:
            with self.file.open() as file:
                file.seek(self.start.offset)
                payload = file.read(size_bytes)
        lines = [] if payload.isspace() else self._unmarked(payload).split(b"\n")
        return lines[:-1] if lines[-1:] == [b""] else lines

    def places(self, numbers: Iterable[int]) -> list[str]:
        """The generated ids of these lines, for documents without an id field."""
        prefix = self._prefix()
        return [f"{prefix}{self.start.line + i}" for i in numbers]

    def _prefix(self) -> str:
        return encodable(f"{self.reading.source}/{self.file.name}:")

    def _unmarked(self, payload: _Payload) -> _Payload:
        is_marked = self.start.offset == 0 and payload[:3] == codecs.BOM_UTF8
        return payload[3:] if is_marked else payload

    def parse(self, lines: Iterable[tuple[int, bytes | memoryview]]) -> RecordColumns:
        """Parse lines of the block, given with their index; blank lines are skipped."""
        reading = self.reading
        start = self.start
        prefix = self._prefix()
        text_field = reading.text_field
        id_field = reading.id_field
        kept_fields = reading.kept
        replaces = reading.on_error == "replace"
        render = None
        if reading.chat_template is not None:
            render = renderer(reading.chat_template, reading.source)
        own_id = id_field or "id"
        found = RecordColumns()
        rows = found.rows
        ids = found.ids
        texts = found.texts
        for i, raw in lines:
            if not raw:
                continue
            is_replaced = is_placed = False
            # Nearly all records take this short path, which saves five calls, a third of the time.
            try:
                try:
                    value = orjson.loads(raw)
                except orjson.JSONDecodeError:
                    if not bytes(raw).strip():
                        continue
                    value, is_replaced = parse_json(raw, replace=replaces)
                fields = value if type(value) is dict else as_object(value)
                if render is not None:
                    text = render(value_of(fields, text_field))
                else:
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
                row = start.row + i
                found.bad[len(rows)] = BadRecord(row, self.where(row), str(error))
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
    """The lines of a long payload, without copies."""
    view = memoryview(payload)
    start = 0
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
    """JSON lines as documents; without an id field, a field `id` is used if present."""

    def file_samples(self, file: SourceFile) -> Iterator[Sample]:
        """The first JSON objects of a file, searched in its first blocks."""
        blocks = islice(self._file_blocks(file, START), _SAMPLED_BLOCKS)
        values = (value for block in blocks for value in block.values())
        for value in islice(values, SAMPLED_RECORDS):
            texts = {path: value_of(value, path) for path in _paths(value)}
            yield {path: text if isinstance(text, str) else None for path, text in texts.items()}

    def _file_blocks(self, file: SourceFile, start: Position) -> Iterator[LinesBlock]:
        if kind_of(file.name) == "csv":
            raise SourceError(
                "the file is a table, not JSON lines",
                where=file.where,
                do='set kind = "csv" for this source',
                code="E-SOURCE-FORM",
            )
        at = start
        limit = self.reading.max_record_bytes
        detected = ""
        if self.reading.detects:
            with file.open() as stored:
                head = decompressed(stored, file.suffix)(HEAD_BYTES)
            detected = encoding_of(head, self.reading.encoding, file.where)
        pieces = _cut_file(file, detected or self.reading.encoding, start.offset, limit)
        for size_bytes, num_lines, stored_bytes, payload in pieces:
            if size_bytes > limit:  # the block is one line that was not read to its end
                raise self.reading.too_long(f"{file.where}:{at.line + 1}")
            moved = (at.offset + size_bytes, at.line + num_lines, at.row + num_lines)
            end = Position(at.file, *moved)
            yield LinesBlock(self.reading, at, end, stored_bytes, file, payload, detected)
            at = end


def _cut_file(
    file: SourceFile, encoding: str, offset: int, limit: int
) -> Iterator[tuple[int, int, int, bytes | None]]:
    """Size, number of lines, stored size and (if read here) bytes of each block, from a position
    on.

    Reading stops inside a line of more than `limit` bytes; this line is then the last block.
    """
    try:
        with file.open() as stored:
            converted = _converted(file, stored, encoding, limit)
            read = converted or decompressed(stored, file.suffix)
            to_skip = offset
            by_worker = file.is_local and converted is None and file.suffix not in COMPRESSED
            if converted is None and file.suffix not in COMPRESSED:
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
    except (*TORN, UnicodeDecodeError) as error:
        raise torn(file.where, error) from error


def _converted(
    file: SourceFile, stored: io.BufferedReader, encoding: str, limit: int
) -> Read | None:
    """A function that reads another form as JSON lines in UTF-8; None if the file already has that
    form."""
    is_recoded = encoding not in ("utf-8", *MARKED)

    def read_text() -> Read:
        stored.seek(0)
        read = decompressed(stored, file.suffix)
        return reader_of(as_utf8(read, encoding, file.where)) if is_recoded else read

    head = read_text()(_HEAD_BYTES)
    marked = "utf-8" if is_recoded else marked_encoding(head)
    first_lines = head.decode(marked, "replace").removeprefix("\ufeff")
    read = read_text()
    is_value = _ONE_VALUE.match(first_lines)
    if not is_value and marked == "utf-8":
        return read if is_recoded else None
    opened = marked.replace("utf-8", "utf-8-sig")  # skips a byte order mark
    # Invalid bytes are passed through, so that the error belongs to their line.
    text = io.TextIOWrapper(stream_of(read), opened, "surrogateescape", newline="")
    return reader_of(map(_bytes, json_items(text, limit, file.where) if is_value else text))


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _cut(read: Read, limit: int) -> Iterator[tuple[int, int, bytes | None]]:
    """Cut after the last line end within 2 MiB, or after one longer line.

    The end of a block depends only on its start, so reading can start at any block.
    """
    rest = b""
    while piece := rest + read(BLOCK_BYTES - len(rest)):
        if cut := piece.rfind(b"\n") + 1:
            rest = piece[cut:]
            yield cut, piece.count(b"\n", 0, cut), piece[:cut]
            continue
        size_bytes = len(piece)
        parts = [piece]
        rest = b""
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
    """The same blocks without their bytes: the file is read through one buffer, only to count
    lines."""
    buffer = bytearray(BLOCK_BYTES)
    view = np.frombuffer(buffer, np.uint8)
    is_newline = np.empty(BLOCK_BYTES, np.bool_)
    while num_read := stored.readinto(buffer):
        size_bytes = buffer.rfind(b"\n", 0, num_read) + 1
        num_lines = 1
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
