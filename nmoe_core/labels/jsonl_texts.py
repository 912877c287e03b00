"""The documents of a JSON lines file: one id, one source and one normalised text a line.

Labelling, grading and calibration read such files here alone, so a line is one document to all of
them. The rules are those of prep (docs/formats.md): an id is text or a whole number, a line
without one is named `{source}/{file name}:{line}`, lines count from 0, blank ones too. One pass
checks the whole file before anything is made of it. Memory: ids and offsets, and one line.
"""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from nmoe_core.base.errors import FormatError, SourceError
from nmoe_core.base.fingerprint import Fingerprints, sha256_json
from nmoe_core.sources.jsonl import load_line
from nmoe_core.sources.records import BadRecord, Fields, make_record
from nmoe_core.text.normalise import NORMALIZER, normalize_text

READER = "jsonl-texts/1"
MAX_LINE_BYTES = 256 * 2**20
_ID_FIELDS = ("doc_id", "id")


class JsonlTexts:
    """The documents of a plain JSON lines file.

    Args:
        path: The file, UTF-8; a byte order mark is passed over.
        text_field: Key of the text; null is an empty text.
        id_field: Key of the id, which each line must then have. None takes `doc_id`, or else
            `id`, where a line has one.

    Attributes:
        rows: (document id, source) of each line that is not blank. The source is the line's
            `source`, or the file's stem.

    Raises:
        SourceError: The file is missing or compressed (E-SOURCE-NOTFOUND), or a line is not a
            document or is longer than `MAX_LINE_BYTES` (E-SOURCE-RECORD).
        FormatError: A document id comes twice (E-DOCID).
    """

    def __init__(self, path: Path, text_field: str = "text", id_field: str | None = None) -> None:
        self._path, self._fields = path, Fields(text_field, id_field)
        self.rows: list[tuple[str, str]] = []
        self._places: dict[str, tuple[int, int]] = {}
        digest = hashlib.sha256()
        for number, offset, line in self._lines(digest):
            if not line.strip():
                continue
            doc_id, source, _ = self._document(number, line)
            if doc_id in self._places:
                raise FormatError(
                    "a document is named twice",
                    where=f"{path}:{number + 1}",
                    found=doc_id,
                    do="give each line an id of its own",
                    code="E-DOCID",
                )
            self.rows.append((doc_id, source))
            self._places[doc_id] = (number, offset)
        self.sha256 = digest.hexdigest()

    @property
    def fingerprints(self) -> Fingerprints:
        """Which fields hold the documents, and the rule they are read by."""
        return {"reader": f"{READER} {NORMALIZER}", "fields": sha256_json(list(self._fields))}

    def text(self, doc_id: str) -> str:
        """The normalised text of a document."""
        number, offset = self._places[doc_id]
        with open(self._path, "rb") as file:
            file.seek(offset)
            return normalize_text(self._document(number, file.readline())[2])

    def _lines(self, digest: Any) -> Iterator[tuple[int, int, bytes]]:
        """Number from 0, first byte, and bytes of each line."""
        if self._path.suffix in (".gz", ".zst") or not self._path.is_file():
            raise SourceError(
                "not a plain JSON lines file",
                where=self._path,
                do="correct the path; decompress the file first if it is compressed",
                code="E-SOURCE-NOTFOUND",
            )
        number = offset = 0
        with open(self._path, "rb") as file:
            while line := file.readline(MAX_LINE_BYTES + 1):
                if len(line) > MAX_LINE_BYTES:
                    raise self._bad(number, f"more than {MAX_LINE_BYTES} bytes")
                digest.update(line)
                mark = codecs.BOM_UTF8 if number == 0 else b""
                yield number, offset + len(mark) * line.startswith(mark), line.removeprefix(mark)
                offset += len(line)
                number += 1

    def _document(self, number: int, line: bytes) -> tuple[str, str, str]:
        """(id, source, text as it is written) of a line."""
        row = self._object(number, line)
        source = row.get("source")
        if not isinstance(source, str | None):
            raise self._bad(number, f"field 'source' is {type(source).__name__}, not text")
        source = _encodable(source or self._path.stem)
        name = self._fields.id
        for field in (self._fields.text, name):
            if field is not None and field not in row:
                raise self._bad(number, f"field {field!r} is missing")
        if name is None:
            name = next((key for key in _ID_FIELDS if row.get(key) not in (None, "")), "id")
        elif row[name] in (None, ""):
            raise self._bad(number, f"field {name!r} is empty")
        where, default = f"{self._path}:{number + 1}", f"{source}/{self._path.name}:{number}"
        fields = Fields(self._fields.text, name)
        text = row[self._fields.text]
        record = make_record(number, where, fields, text, row.get(name), default)
        if isinstance(record, BadRecord):
            raise self._bad(number, record.reason)
        return _encodable(record.id), source, record.text

    def _object(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            try:
                value = orjson.loads(line)
            except orjson.JSONDecodeError:
                value, _ = load_line(line)
        except (ValueError, RecursionError) as error:
            raise self._bad(number, f"not JSON: {error}") from None
        if not isinstance(value, dict):
            raise self._bad(number, f"not a JSON object but {type(value).__name__}")
        return value

    def _bad(self, number: int, found: str) -> SourceError:
        return SourceError(
            "a line is not a document",
            where=f"{self._path}:{number + 1}",
            found=found,
            expected=f'an object with a text under "{self._fields.text}"',
            code="E-SOURCE-RECORD",
        )


def _encodable(text: str) -> str:
    """The text with half surrogate pairs replaced, which no file of results can hold."""
    return text.encode("utf-8", "replace").decode()
