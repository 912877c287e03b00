"""The documents of a JSON lines file: one id, one source and one normalised text per line.

Labelling, grading and calibration read such files here alone, so a line is one document to all of
them. The rules are those of prep (docs/formats.md): an id is text or a whole number, a line
without one is named `{source}/{file name}:{line}`, lines count from 0, blank ones too. One pass
checks the whole file before anything is made of it. Memory: ids and offsets, and one line.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from nmoe_core.base.errors import FormatError, SourceError
from nmoe_core.base.fingerprint import Fingerprints, sha256_json
from nmoe_core.base.jsonl import (
    encodable,
    id_of,
    is_plain_file,
    parse_object,
    read_objects,
    text_of,
)
from nmoe_core.sources.records import Fields
from nmoe_core.text.normalise import NORMALIZER, normalize_text

READER = "jsonl-texts/1"
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
            document or is longer than 256 MiB (E-SOURCE-RECORD).
        FormatError: A document id comes twice (E-DOCID).
    """

    def __init__(self, path: Path, text_field: str = "text", id_field: str | None = None) -> None:
        self._path, self._fields = path, Fields(text_field, id_field)
        self.rows: list[tuple[str, str]] = []
        self._places: dict[str, tuple[int, int]] = {}
        if not is_plain_file(path):
            raise SourceError(
                "not a plain JSON lines file",
                where=path,
                do="correct the path; decompress the file first if it is compressed",
                code="E-SOURCE-NOTFOUND",
            )
        digest = hashlib.sha256()
        for line, row in read_objects(path, self._bad, digest):
            doc_id, source, _ = self._document(line.number, row)
            if doc_id in self._places:
                raise FormatError(
                    "a document is named twice",
                    where=f"{path}:{line.number}",
                    found=doc_id,
                    do="give each line an id of its own",
                    code="E-DOCID",
                )
            self.rows.append((doc_id, source))
            self._places[doc_id] = (line.number, line.offset)
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
            return normalize_text(self._document(number, parse_object(file.readline()))[2])

    def _document(self, number: int, row: dict[str, Any]) -> tuple[str, str, str]:
        """(id, source, text as it is written) of a line."""
        source = row.get("source")
        if not isinstance(source, str | None):
            raise self._bad(number, f"field 'source' is {type(source).__name__}, not text")
        source = encodable(source or self._path.stem)
        default_id = f"{source}/{self._path.name}:{number - 1}"
        try:
            text = text_of(row, self._fields.text)
            return id_of(row, self._fields.id, default_id, _ID_FIELDS), source, text
        except ValueError as error:
            raise self._bad(number, str(error)) from None

    def _bad(self, number: int, found: str) -> SourceError:
        return SourceError(
            "a line is not a document",
            where=f"{self._path}:{number}",
            found=found,
            expected=f'an object with a text under "{self._fields.text}"',
            code="E-SOURCE-RECORD",
        )
