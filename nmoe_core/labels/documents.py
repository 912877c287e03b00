"""The documents that an oracle scores: ids, sources, and a way to read one text at a time.

The text of a document in a token shard is decoded from its first tokens. Labelling, grading and
calibration parse a JSON lines file in the same way, by the rules of prep (docs/formats.md). A
duplicate id raises an error before files are written. Memory holds ids, offsets and one text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from loader.files.regular import open_file
from nmoe_core.base.docid import parse_doc_id
from nmoe_core.base.errors import FormatError, SourceError
from nmoe_core.base.fingerprint import Fingerprints, sha256_file, sha256_json
from nmoe_core.base.jsonl import (
    encodable,
    id_of,
    is_plain_file,
    parse_object,
    read_objects,
    text_of,
)
from nmoe_core.labels.slices import data_digest, former_data_digest, read_slice
from nmoe_core.shards.documents import DocumentReader, Text, beginning, shard_paths
from nmoe_core.text.normalise import NORMALIZER, normalize_text
from nmoe_core.text.tokenizer import Tokenizer

READER = "jsonl-texts/1"


@dataclass(frozen=True, slots=True)
class Documents:
    """Documents to label: `rows` holds (document id, source), in order.

    `fingerprints` are digests of everything that the texts depend on. `text` returns the text of a
    document id, and `num_tokens` its length in tokens; both may raise FormatError. Labels of
    earlier versions stay valid if their fingerprint `data` is `former_data`. `files` are the shard
    files of a bucket that `text` reads, in their order.
    """

    rows: list[tuple[str, str]]
    fingerprints: Fingerprints
    text: Callable[[str], Text]
    num_tokens: Callable[[str], int]
    former_data: str | None = None
    files: Sequence[Path] = ()

    def sample(self, count: int) -> Documents:
        """Sample `count` documents by a hash of their ids, in the same order."""

        def key(doc_id: str) -> bytes:
            return hashlib.sha256(f"relabel/{doc_id}".encode("utf-8", "replace")).digest()

        chosen = set(sorted((doc_id for doc_id, _ in self.rows), key=key)[:count])
        rows = [row for row in self.rows if row[0] in chosen]
        return replace(self, rows=rows, fingerprints=self.fingerprints | {"sample": str(count)})


def shard_documents(
    slice_file: Path,
    data_root: Path,
    tokenizer: Tokenizer,
    max_doc_tokens: int,
    rows: list[tuple[str, str]] | None = None,
) -> Documents:
    """The documents of a slice file, or only those in `rows`, each cut to `max_doc_tokens`, without
    the EOS. Raises FormatError if the slice is missing or malformed, names a document twice
    (E-DOCID), or a source has no committed manifest."""
    rows = read_slice(slice_file) if rows is None else rows
    seen: dict[str, None] = {}
    for doc_id, _ in rows:
        if doc_id in seen:
            raise _named_twice(slice_file, doc_id)
        seen[doc_id] = None
    reader = DocumentReader(data_root)
    sources = sorted({source for _, source in rows})

    def text(doc_id: str) -> Text:
        tokens = reader.tokens(doc_id, tokenizer.eos_token_id)
        return beginning(tokens, tokenizer, max_doc_tokens)

    fingerprints = {
        "slice": sha256_file(slice_file),
        "data": data_digest(data_root, sources),
        "tokenizer": tokenizer.fingerprint,
        "max_doc_tokens": str(max_doc_tokens),
    }

    def num_tokens(doc_id: str) -> int:
        _, _, start, end = parse_doc_id(doc_id)
        return min(end - start - 1, max_doc_tokens)

    former = former_data_digest(data_root, sources)
    files = shard_paths(data_root, seen)
    return Documents(rows, fingerprints, text, num_tokens, former, files)


def jsonl_documents(texts: JsonlTexts, tokenizer: Tokenizer, max_doc_tokens: int) -> Documents:
    """The documents of a JSON lines file, cut to `max_doc_tokens`."""

    def text(doc_id: str) -> Text:
        whole = texts.text(doc_id)
        tokens = tokenizer.encode_long(whole, max_doc_tokens + 1)
        if len(tokens) <= max_doc_tokens:
            return Text(whole, False)
        return beginning(tokens, tokenizer, max_doc_tokens)

    fingerprints = {
        "slice": texts.sha256,
        **texts.fingerprints,
        "tokenizer": tokenizer.fingerprint,
        "max_doc_tokens": str(max_doc_tokens),
    }

    def num_tokens(doc_id: str) -> int:
        return len(tokenizer.encode_long(texts.text(doc_id), max_doc_tokens))

    return Documents(texts.rows, fingerprints, text, num_tokens)


class JsonlTexts:
    """The documents of a plain JSON lines file; the whole file is checked before a document is
    used.

    Args:
        path: The file, UTF-8, with or without a byte order mark.
        text_field: Key of the text; a null value is an empty text.
        id_field: Key of the id, which each line must have. If None, a line's id is its `doc_id`,
            else its `id`, else `{source}/{file}:{row}`.

    Attributes:
        rows: (document id, source) of each line that is not blank. The source is the line's
            `source`, or the file's stem.
        sha256: SHA-256 of the file.
        fingerprints: The keys of text and id, and the version of the parsing rules.

    Raises:
        SourceError: The file is missing or compressed (E-SOURCE-NOTFOUND), or a line is not a
            document or is longer than 256 MiB (E-SOURCE-RECORD).
        FormatError: A document id appears twice (E-DOCID).
    """

    def __init__(self, path: Path, text_field: str = "text", id_field: str | None = None) -> None:
        if not is_plain_file(path):
            raise SourceError(
                "not a plain JSON lines file",
                where=path,
                do="correct the path; decompress the file first if it is compressed",
                code="E-SOURCE-NOTFOUND",
            )
        self._path = path
        self._text_field = text_field
        self._id_field = id_field
        self.rows: list[tuple[str, str]] = []
        self._places: dict[str, tuple[int, int]] = {}
        digest = hashlib.sha256()
        for line, row in read_objects(path, self._bad, digest):
            doc_id, source, _ = self._document(line.number, row)
            if doc_id in self._places:
                raise _named_twice(f"{path}:{line.number}", doc_id)
            self.rows.append((doc_id, source))
            self._places[doc_id] = (line.number, line.offset)
        self.sha256 = digest.hexdigest()
        fields = sha256_json([text_field, id_field])
        self.fingerprints = {"reader": f"{READER} {NORMALIZER}", "fields": fields}

    def text(self, doc_id: str) -> str:
        """Read the normalised text of a document."""
        number, offset = self._places[doc_id]
        with open_file(self._path) as file:
            file.seek(offset)
            return normalize_text(self._document(number, parse_object(file.readline()))[2])

    def _document(self, number: int, row: dict[str, Any]) -> tuple[str, str, str]:
        """(id, source, text as written) of a line."""
        source = row.get("source")
        if not isinstance(source, str | None):
            raise self._bad(number, f"field 'source' is {type(source).__name__}, not text")
        source = encodable(source or self._path.stem)
        place = f"{source}/{self._path.name}:{number - 1}"
        try:
            text = text_of(row, self._text_field)
            return id_of(row, self._id_field, place, ("doc_id", "id")), source, text
        except ValueError as error:
            raise self._bad(number, str(error)) from None

    def _bad(self, number: int, found: str) -> SourceError:
        return SourceError(
            "a line is not a document",
            where=f"{self._path}:{number}",
            found=found,
            expected=f'an object with a text under "{self._text_field}"',
            code="E-SOURCE-RECORD",
        )


def _named_twice(where: Path | str, doc_id: str) -> FormatError:
    return FormatError(
        "a document id occurs twice",
        where=where,
        found=doc_id,
        do="give each document a different id",
        code="E-DOCID",
    )
