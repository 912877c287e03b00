"""The documents that an oracle is asked about: their ids, sources and texts, one text at a time.

From token shards a text is the decoded beginning of the document; from JSON lines it is the
normalised text, cut to as many tokens. Ids are unique or refused before anything is asked. Memory:
ids and offsets, and the texts that are asked about at the moment.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from nmoe_core.base.errors import FormatError
from nmoe_core.base.fingerprint import Fingerprints, sha256_file
from nmoe_core.labels.jsonl_texts import JsonlTexts
from nmoe_core.labels.slices import data_digest, former_data_digest, read_slice
from nmoe_core.shards.documents import DocumentReader, Text, beginning
from nmoe_core.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Documents:
    """Documents to label.

    Attributes:
        rows: (document id, source) of each, in their order.
        fingerprints: Digests of everything the texts come from.
        former_fingerprints: The same as an earlier version named it: its labels were paid for and
            stay.
        text: The text of a document id. Raises FormatError where it cannot be read.
    """

    rows: list[tuple[str, str]]
    fingerprints: Fingerprints
    former_fingerprints: Fingerprints
    text: Callable[[str], Text]


def shard_documents(
    slice_file: Path, data_root: Path, tokenizer: Tokenizer, max_doc_tokens: int
) -> Documents:
    """The documents of a slice file, decoded from token shards.

    Args:
        slice_file: Rows of (document id, source).
        data_root: Directory that document ids are relative to.
        tokenizer: Decodes token ids.
        max_doc_tokens: Tokens of a document that are read, from its start; the EOS is left out.

    Raises:
        FormatError: The slice is missing or malformed, names a document twice (E-DOCID), or a
            source of it has no committed manifest.
    """
    rows = read_slice(slice_file)
    seen: set[str] = set()
    for doc_id, _ in rows:
        if doc_id in seen:
            raise FormatError(
                "a document is named twice", where=slice_file, found=doc_id, code="E-DOCID"
            )
        seen.add(doc_id)
    reader, sources = DocumentReader(data_root), sorted({source for _, source in rows})

    def text(doc_id: str) -> Text:
        tokens = reader.tokens(doc_id, tokenizer.eos_token_id)
        return beginning(tokens, tokenizer, max_doc_tokens)

    fingerprints = {
        "slice": sha256_file(slice_file),
        "data": data_digest(data_root, sources),
        "tokenizer": tokenizer.fingerprint,
        "max_doc_tokens": str(max_doc_tokens),
    }
    former = fingerprints | {"data": former_data_digest(data_root, sources)}
    return Documents(rows, fingerprints, former, text)


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
    return Documents(texts.rows, fingerprints, fingerprints, text)


def sample_of(documents: Documents, count: int) -> Documents:
    """`count` of the documents, chosen by a hash of their ids, in their order."""

    def key(doc_id: str) -> bytes:
        return hashlib.sha256(f"relabel/{doc_id}".encode("utf-8", "replace")).digest()

    chosen = set(sorted((doc_id for doc_id, _ in documents.rows), key=key)[:count])
    return replace(
        documents,
        rows=[row for row in documents.rows if row[0] in chosen],
        fingerprints={**documents.fingerprints, "sample": str(count)},
        former_fingerprints={**documents.former_fingerprints, "sample": str(count)},
    )
