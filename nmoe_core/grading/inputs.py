"""Documents to grade: from token shards by id, without tokenising again, or from JSONL text.

An input yields its documents in a fixed order from any position on, so that a grading that was
killed can go on; it names, as fingerprints, what its documents are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Protocol

import numpy as np

from loader.files.format import Manifest
from nmoe_core.base.fingerprint import Fingerprints, sha256_json
from nmoe_core.heads.features import as_seen
from nmoe_core.labels.documents import JsonlTexts
from nmoe_core.labels.slices import data_digest, source_manifest
from nmoe_core.shards.documents import DocumentReader, document_ids
from nmoe_core.shards.manifest import documents_digest
from nmoe_core.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class GradeDocument:
    """One document: its id, its source, and the token ids that heads see, uint32 `[1..max_ctx]`."""

    doc_id: str
    source: str
    tokens: np.ndarray


class GradeInput(Protocol):
    """Where documents come from."""

    def fingerprints(self) -> Fingerprints:
        """What the documents are made from."""
        ...

    def count(self) -> int | None:
        """How many there are, where that is known beforehand."""
        ...

    def documents(self, start: int, max_ctx: int) -> Iterator[GradeDocument]:
        """Documents from number `start` on, each cut to `max_ctx` tokens."""
        ...


class ShardInput:
    """All documents of one manifest of a source, of a shard or a split, in slice order.

    Document ids are relative to `data_root`.
    """

    def __init__(self, manifest: Manifest, data_root: Path, source: str) -> None:
        self._manifest, self._data_root, self._source = manifest, data_root, source

    def fingerprints(self) -> Fingerprints:
        return {"shard": documents_digest(self._manifest)}

    def count(self) -> int:
        return self._manifest.total_documents

    def documents(self, start: int, max_ctx: int) -> Iterator[GradeDocument]:
        reader, eos = DocumentReader(self._data_root), self._manifest.eos_token_id
        for document in islice(document_ids(self._data_root, self._manifest), start, None):
            tokens = as_seen(reader.tokens(document, eos), eos, max_ctx)
            yield GradeDocument(str(document), self._source, tokens)


class DocIdInput:
    """Documents of a slice file, (document id, source) pairs, read from the shards they name.

    Of a `sample` only so many are graded, chosen by the MD5 of their ids.
    """

    def __init__(
        self, rows: Sequence[tuple[str, str]], data_root: Path, sample: int | None = None
    ) -> None:
        self._rows = _sampled(rows, sample) if sample is not None else list(rows)
        self._data_root = data_root

    def fingerprints(self) -> Fingerprints:
        sources = sorted({source for _, source in self._rows})
        return {"documents": sha256_json(self._rows), "data": data_digest(self._data_root, sources)}

    def count(self) -> int:
        return len(self._rows)

    def documents(self, start: int, max_ctx: int) -> Iterator[GradeDocument]:
        reader = DocumentReader(self._data_root)
        eos = {
            source: source_manifest(self._data_root, source).eos_token_id
            for source in sorted({source for _, source in self._rows})
        }
        for doc_id, source in self._rows[start:]:
            tokens = as_seen(reader.tokens(doc_id, eos[source]), eos[source], max_ctx)
            yield GradeDocument(doc_id, source, tokens)


class TextInput:
    """The documents of a JSON lines file , tokenised as prep does it.

    Args:
        path: The file.
        tokenizer: The one the heads' backbone was trained with.
        text_field: Key of the text.
        id_field: Key of the id; None takes `doc_id`, or else `id`, where a line has one.

    Raises:
        SourceError: A line is not a document (E-SOURCE-RECORD).
        FormatError: A document id comes twice (E-DOCID).
    """

    def __init__(
        self,
        path: Path,
        tokenizer: Tokenizer,
        text_field: str = "text",
        id_field: str | None = None,
    ) -> None:
        self._texts, self._tokenizer = JsonlTexts(path, text_field, id_field), tokenizer

    def fingerprints(self) -> Fingerprints:
        return {
            "texts": self._texts.sha256,
            "tokenizer": self._tokenizer.fingerprint,
            **self._texts.fingerprints,
        }

    def count(self) -> int:
        return len(self._texts.rows)

    def documents(self, start: int, max_ctx: int) -> Iterator[GradeDocument]:
        for doc_id, source in self._texts.rows[start:]:
            tokens = self._tokenizer.encode_long(self._texts.text(doc_id), max_ctx)
            seen = as_seen(tokens, self._tokenizer.eos_token_id, max_ctx)
            yield GradeDocument(doc_id, source, seen)


def _sampled(rows: Sequence[tuple[str, str]], count: int) -> list[tuple[str, str]]:
    def place(i: int) -> str:
        return hashlib.md5(f"sample:{rows[i][0]}".encode(), usedforsecurity=False).hexdigest()

    chosen = sorted(range(len(rows)), key=place)[:count]
    return [rows[i] for i in sorted(chosen)]
