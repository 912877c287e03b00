"""Source kinds `warc` and `wet`: the records of web archives.

`warc` reads the pages of `response` records, `wet` the texts of `conversion` records. The other
records are counted by the reason why they are left out, so the counts add up to the records of the
files. An archive is plain or compressed (`.gz`, `.zst`, `.bz2`, `.xz`). The main process finds
where records end, and workers parse and extract them with fastwarc and resiliparse.

The document's id is the record's own id, which stays the same if files are moved, renamed or packed
anew; without one it is the file's name and the byte in the unpacked file. Fields for columns are
`url`, `domain`, `warc_date`, `content_type` and `record_id`. Memory: about 2 MiB per block, or one
longer record of at most MAX_PAGE_BYTES.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from nmoe_core.base.errors import SourceError
from nmoe_core.base.jsonl import encodable, not_utf8
from nmoe_core.sources.file_sources import BLOCK_BYTES, FileSource
from nmoe_core.sources.forms.encoding import missing_extra
from nmoe_core.sources.records import (
    SAMPLED_RECORDS,
    START,
    WARC_FIELDS,
    BadRecord,
    Block,
    Position,
    Record,
    Sample,
)
from nmoe_core.sources.storage import TORN, SourceFile, decompressed, stream_of, torn
from nmoe_core.sources.web.pages import MAX_PAGE_BYTES, asks_not_to_be_indexed, page_of

if TYPE_CHECKING:
    from fastwarc.warc import WarcRecord

_TYPES = ("warcinfo", "response", "resource", "request", "metadata", "revisit", "conversion")
_HTML = ("text/html", "application/xhtml+xml")
_MOST_HEADER_BYTES = 2**16
_MOST_RECORDS = 1024  # of a block
_SKIP_BYTES = 2**20
TOO_LARGE = f"records of more than {MAX_PAGE_BYTES // 2**20} MiB"


class _Skipped(Exception):
    """The record is left out by rule; its text is the reason."""


class Frame(NamedTuple):
    """A record of an archive: where it starts and ends in the unpacked file, and its bytes, or why
    it is left out."""

    start: int
    end: int
    payload: bytes
    skipped: str


@dataclass(frozen=True, slots=True)
class WarcBlock(Block):
    """Consecutive records of one file."""

    file: SourceFile
    frames: tuple[Frame, ...]
    is_html: bool

    def records(self) -> Iterator[Record | BadRecord]:
        """The document of each record that has one."""
        for row, frame in enumerate(self.frames, self.start.row):
            if frame.skipped:
                yield BadRecord(row, self.where(row), frame.skipped, is_skipped=True)
                continue
            try:
                yield self._record(row, frame)
            except _Skipped as error:
                yield BadRecord(row, self.where(row), str(error), is_skipped=True)
            except UnicodeDecodeError as error:
                yield BadRecord(row, self.where(row), not_utf8(error))
            except (ValueError, OSError) as error:
                yield BadRecord(row, self.where(row), f"not a WARC record: {error}")

    def where(self, row: int) -> str:
        return f"{self.file.where}: byte {self.frames[row - self.start.row].start}"

    def _record(self, row: int, frame: Frame) -> Record:
        try:
            from fastwarc.warc import WarcRecord
        except ImportError as error:
            raise missing_extra("a web archive", self.file.where) from error
        record = WarcRecord.from_bytes(frame.payload)
        if self.is_html:
            text, is_replaced, content_type = self._page(record)
        else:
            text, is_replaced = self.reading.decode(record.reader.read())
            content_type = record.headers.get("Content-Type")
        url = _bare(record.headers.get("WARC-Target-URI"))
        id_ = _bare(record.record_id)
        place = f"{self.reading.source}/{self.file.name}:{frame.start}"
        date = record.headers.get("WARC-Date")
        values = (url, _domain(url), date, content_type, id_)
        fields: dict[str, str | None] = dict(zip(WARC_FIELDS, values))
        kept = tuple(fields[name] for name in self.reading.kept)
        return Record(row, encodable(id_ or place), text, is_replaced, kept)

    def _page(self, record: WarcRecord) -> tuple[str, bool, str]:
        """The main text of a response, whether bytes were replaced, and its type of content."""
        if not record.is_http:
            raise _Skipped("responses not by HTTP")
        try:
            record.parse_http(auto_decode="all")
            payload = record.reader.read(MAX_PAGE_BYTES + 1)
        except OSError:
            raise _Skipped("responses whose HTTP body cannot be decoded") from None
        if record.http_headers.status_code != 200:
            raise _Skipped("responses whose HTTP status is not 200")
        content_type = (record.http_content_type or "").lower()
        if content_type not in _HTML:
            raise _Skipped("responses that are not HTML")
        if len(payload) > MAX_PAGE_BYTES:
            raise _Skipped(TOO_LARGE)
        asked = record.http_headers.get_multiple("X-Robots-Tag")
        try:
            page = page_of(payload, record.http_charset, self.reading, self.file.where)
        except UnicodeDecodeError:
            raise _Skipped("pages with bytes that are not of their encoding") from None
        except SourceError as error:
            if error.code != "E-SOURCE-ENCODING":
                raise
            raise _Skipped("pages whose encoding is not found") from None
        except ValueError as error:
            raise _Skipped(f"pages whose {error}") from None
        if page.asks_not_to_be_indexed or any(map(asks_not_to_be_indexed, asked)):
            raise _Skipped("pages that ask robots not to index them")
        return page.text, page.is_replaced, content_type


def _bare(value: str | None) -> str | None:
    """A URI without the angle brackets that some writers put around it."""
    return value.strip().removeprefix("<").removesuffix(">") if value else None


def _domain(url: str | None) -> str | None:
    with suppress(ValueError):
        return urlsplit(url or "").hostname
    return None


class WarcSource(FileSource[WarcBlock]):
    """Responses of web archives as documents, their main text as the text."""

    wanted = "response"
    is_html = True

    def check(self) -> None:
        """Raise SourceError if the packages for archives are not installed (E-SOURCE-EXTRA), or a
        column is not a field of records (E-SOURCE-FIELD)."""
        try:
            import fastwarc  # noqa: F401
            import resiliparse  # noqa: F401
        except ImportError as error:
            raise missing_extra("a web archive", self.reading.source) from error
        absent = [name for name in self.reading.kept if name not in WARC_FIELDS]
        if absent:
            raise SourceError(
                "records of a web archive have no such field",
                where=self.reading.source,
                found=absent[0],
                expected=", ".join(WARC_FIELDS),
                do="set columns of this source",
                code="E-SOURCE-FIELD",
            )

    def blocks(self, start: Position = START) -> Iterator[WarcBlock]:
        """Blocks of about 2 MiB. Raises as `check`, and SourceError with the byte in the unpacked
        file if an archive is damaged (E-SOURCE-TORN)."""
        self.check()
        return super().blocks(start)

    def file_samples(self, file: SourceFile) -> Iterator[Sample]:
        """The text and the fields of the first documents of a file."""
        self.check()
        reading = self.reading._replace(kept=WARC_FIELDS)
        blocks = type(self)(reading, [file]).blocks()
        found = (record for block in blocks for record in block.records())
        records = (record for record in found if isinstance(record, Record))
        for record in islice(records, SAMPLED_RECORDS):
            yield {reading.text_field: record.text, **dict(zip(WARC_FIELDS, record.kept))}

    def _file_blocks(self, file: SourceFile, start: Position) -> Iterator[WarcBlock]:
        at = start
        held: list[Frame] = []
        held_bytes = last_bytes = 0
        with file.open() as stored:
            try:
                for frame in self._frames(file, stored, start.offset):
                    held.append(frame)
                    held_bytes += len(frame.payload)
                    if held_bytes >= BLOCK_BYTES or len(held) >= _MOST_RECORDS:
                        here = stored.tell()
                        yield (block := self._block(file, at, held, here - last_bytes))
                        at = block.end
                        last_bytes = here
                        held = []
                        held_bytes = 0
                if held:
                    yield self._block(file, at, held, stored.tell() - last_bytes)
            except TORN as error:
                raise torn(file.where, error) from error

    def _block(
        self, file: SourceFile, at: Position, held: list[Frame], size_bytes: int
    ) -> WarcBlock:
        count = len(held)
        end = Position(at.file, held[-1].end, at.line + count, at.row + count)
        return WarcBlock(self.reading, at, end, size_bytes, file, tuple(held), self.is_html)

    def _frames(self, file: SourceFile, stored: io.BufferedReader, offset: int) -> Iterator[Frame]:
        read = decompressed(stored, file.suffix)
        to_skip = offset
        while to_skip and (piece := read(min(to_skip, _SKIP_BYTES))):
            to_skip -= len(piece)
        stream = stream_of(read)
        while header := _header(stream, file, offset):
            kind, size_bytes = _kind_and_size(header, file, offset)
            skipped = ""
            if kind != self.wanted:
                skipped = f"{kind if kind in _TYPES else 'other'} records"
            elif size_bytes > MAX_PAGE_BYTES:
                skipped = TOO_LARGE
            payload = _body(stream, size_bytes, is_kept=not skipped)
            if payload is None or stream.read(4) != b"\r\n\r\n":
                raise _damaged("Content-Length does not lead to the record's end", file, offset)
            end = offset + len(header) + size_bytes + 4
            yield Frame(offset, end, b"" if skipped else header + payload, skipped)
            offset = end


class WetSource(WarcSource):
    """Texts of `conversion` records as documents."""

    wanted = "conversion"
    is_html = False


def _header(stream: io.BufferedReader, file: SourceFile, offset: int) -> bytes:
    """The header of the next record, with the empty line after it; empty at the end of the
    file."""
    lines: list[bytes] = []
    left = _MOST_HEADER_BYTES
    while line := stream.readline(left):
        if not lines and not line.startswith(b"WARC/1."):
            raise _damaged(f"a record starts with {line[:20]!r}, not WARC/1.", file, offset)
        lines.append(line)
        left -= len(line)
        if line == b"\r\n":
            return b"".join(lines)
        if not line.endswith(b"\r\n"):
            break
    if lines:
        what = f"a header has no end within {_MOST_HEADER_BYTES} bytes"
        raise _damaged(what, file, offset)
    return b""


def _kind_and_size(header: bytes, file: SourceFile, offset: int) -> tuple[str, int]:
    """The type of a record and the bytes after its header."""
    fields: dict[bytes, bytes] = {}
    for line in header.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        name = name.strip().lower()
        if name in fields and name == b"content-length":
            raise _damaged("a header has two Content-Length", file, offset)
        fields[name] = value.strip()
    size = fields.get(b"content-length", b"")
    if not size.isdigit() or len(size) > 18:
        raise _damaged(f"Content-Length is {size[:20]!r}, not a number of bytes", file, offset)
    return fields.get(b"warc-type", b"").decode("latin-1"), int(size)


def _body(stream: io.BufferedReader, size_bytes: int, *, is_kept: bool) -> bytes | None:
    """The bytes after a header, which are only passed over unless `is_kept`; None if the file ends
    before."""
    if is_kept:
        payload = stream.read(size_bytes)
        return payload if len(payload) == size_bytes else None
    while size_bytes and (piece := stream.read(min(size_bytes, _SKIP_BYTES))):
        size_bytes -= len(piece)
    return None if size_bytes else b""


def _damaged(what: str, file: SourceFile, offset: int) -> SourceError:
    return SourceError(
        f"damaged web archive: {what}",
        where=f"{file.where}: byte {offset}",
        do="restore the file, or leave it out with `exclude`",
        code="E-SOURCE-TORN",
    )
