"""Inputs of grading: documents of token shards, whose tokens are read directly, or JSONL text."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from loader.files.format import Manifest
from nmoe_core.base.fingerprint import Fingerprints, sha256_json
from nmoe_core.labels.documents import JsonlTexts
from nmoe_core.labels.slices import data_digest, source_manifest
from nmoe_core.quality.heads.scores import as_seen
from nmoe_core.shards.documents import DocumentReader, document_ids, require_undamaged
from nmoe_core.shards.manifest import documents_digest
from nmoe_core.text.models import ModelIds
from nmoe_core.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class GradeDocument:
    """One document: its id, its source, and the token ids that heads read, uint32
    `[1..max_ctx]`."""

    doc_id: str
    source: str
    tokens: np.ndarray


@dataclass(frozen=True, slots=True)
class GradeInput:
    """Documents in a fixed order.

    `documents(start, max_ctx)` yields the documents from number `start` on, each cut to `max_ctx`
    tokens; `start` lets a killed grading resume. `fingerprints` identify the inputs of the
    documents.
    """

    count: int
    fingerprints: Fingerprints
    documents: Callable[[int, int], Iterator[GradeDocument]]


def shard_input(
    manifest: Manifest,
    data_root: Path,
    source: str,
    model: ModelIds | None = None,
    more: Mapping[str, str] | None = None,
) -> GradeInput:
    """All documents of one manifest (a shard's or a split's), in slice order.

    `model` translates documents whose tokenizer is not the backbone's; `more` are fingerprints of
    other inputs of the grades.
    """

    def documents(start: int, max_ctx: int) -> Iterator[GradeDocument]:
        require_undamaged(manifest)
        reader = DocumentReader(data_root)
        eos = manifest.eos_token_id
        for document in islice(document_ids(data_root, manifest), start, None):
            tokens = as_seen(reader.tokens(document, eos), eos, max_ctx, model)
            yield GradeDocument(str(document), source, tokens)

    made_from = {"shard": documents_digest(manifest), **_made_with(model), **(more or {})}
    return GradeInput(manifest.total_documents, made_from, documents)


def docid_input(
    rows: Sequence[tuple[str, str]],
    data_root: Path,
    sample: int | None = None,
    model: ModelIds | None = None,
) -> GradeInput:
    """Documents of a slice file, (document id, source) pairs, read from the shards they name.

    With `sample`, only that many documents are graded, chosen by the MD5 of their ids. `model` as
    in `shard_input`.
    """

    def place(i: int) -> str:
        return hashlib.md5(f"sample:{rows[i][0]}".encode(), usedforsecurity=False).hexdigest()

    if sample is not None:
        rows = [rows[i] for i in sorted(sorted(range(len(rows)), key=place)[:sample])]
    sources = sorted({source for _, source in rows})

    def documents(start: int, max_ctx: int) -> Iterator[GradeDocument]:
        reader = DocumentReader(data_root)
        eos = {source: source_manifest(data_root, source).eos_token_id for source in sources}
        for doc_id, source in rows[start:]:
            tokens = as_seen(reader.tokens(doc_id, eos[source]), eos[source], max_ctx, model)
            yield GradeDocument(doc_id, source, tokens)

    made_from = {
        "documents": sha256_json(rows),
        "data": data_digest(data_root, sources),
        **_made_with(model),
    }
    return GradeInput(len(rows), made_from, documents)


def text_input(
    path: Path, tokenizer: Tokenizer, text_field: str = "text", id_field: str | None = None
) -> GradeInput:
    """The documents of a JSON lines file (`JsonlTexts`), tokenised as prep does it.

    `tokenizer` is the tokenizer of the heads' backbone. Without `id_field`, the id of a line is its
    `doc_id`, else its `id`, if present.

    Raises:
        SourceError: A line is not a document (E-SOURCE-RECORD).
        FormatError: A document id occurs twice (E-DOCID).
    """
    texts = JsonlTexts(path, text_field, id_field)
    eos = tokenizer.eos_token_id

    def documents(start: int, max_ctx: int) -> Iterator[GradeDocument]:
        for doc_id, source in texts.rows[start:]:
            tokens = tokenizer.encode_long(texts.text(doc_id), max_ctx)
            yield GradeDocument(doc_id, source, as_seen(tokens, eos, max_ctx))

    made_from = {"texts": texts.sha256, "tokenizer": tokenizer.fingerprint, **texts.fingerprints}
    return GradeInput(len(texts.rows), made_from, documents)


def _made_with(model: ModelIds | None) -> Fingerprints:
    return {} if model is None else model.fingerprints
