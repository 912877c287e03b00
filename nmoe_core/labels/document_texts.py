"""The documents that an oracle is asked about: their ids, sources and texts, one text at a time.

From token shards a text is the decoded beginning of the document; from JSON lines it is the
normalised text, cut to as many tokens. Ids are unique or refused before anything is asked. Memory:
ids and offsets, and the texts that are asked about at the moment.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from nmoe_core.base.errors import FormatError
from nmoe_core.base.fingerprint import Fingerprints, sha256_file
from nmoe_core.labels.jsonl_texts import JsonlTexts
from nmoe_core.labels.slices import data_digest, former_data_digest, read_slice
from nmoe_core.shards.documents import DocumentReader, Text, beginning


class Decoder(Protocol):
    """The part of a tokenizer that labelling needs."""

    @property
    def fingerprint(self) -> str: ...

    def decode(self, ids: np.ndarray) -> str: ...


class Encoder(Decoder, Protocol):
    """A tokenizer that also cuts long texts."""

    def encode_long(self, text: str, max_tokens: int) -> np.ndarray: ...


class Documents(Protocol):
    """Documents to label, `rows` of (document id, source) in their order."""

    rows: list[tuple[str, str]]

    @property
    def fingerprints(self) -> Fingerprints:
        """Digests of everything the texts come from."""
        ...

    @property
    def former_fingerprints(self) -> Fingerprints:
        """The same as an earlier version named it: its labels were paid for and stay."""
        ...

    def text(self, doc_id: str) -> Text: ...


class ShardDocuments:
    """The documents of a slice file, decoded from token shards.

    Args:
        slice_file: Rows of (document id, source).
        data_root: Directory that document ids are relative to.
        tokenizer: Decodes token ids.
        max_doc_tokens: Tokens of a document that are read, from its start; the EOS is left out.
        eos_token_id: Token that ends every document.

    Raises:
        FormatError: The slice is missing or malformed, or names a document twice (E-DOCID).
    """

    def __init__(
        self,
        slice_file: Path,
        data_root: Path,
        tokenizer: Decoder,
        max_doc_tokens: int,
        eos_token_id: int,
    ) -> None:
        self.rows = read_slice(slice_file)
        _refuse_twice((doc_id for doc_id, _ in self.rows), slice_file)
        self._slice_file, self._data_root = slice_file, data_root
        self._reader = DocumentReader(data_root)
        self._tokenizer, self._max_doc_tokens = tokenizer, max_doc_tokens
        self._eos_token_id = eos_token_id

    @property
    def fingerprints(self) -> Fingerprints:
        """Digests of the slice, of its sources' contents, and of how they are decoded."""
        return {
            "slice": sha256_file(self._slice_file),
            "data": data_digest(self._data_root, self._sources()),
            "tokenizer": self._tokenizer.fingerprint,
            "max_doc_tokens": str(self._max_doc_tokens),
        }

    @property
    def former_fingerprints(self) -> Fingerprints:
        """With the digest of whole manifests."""
        return self.fingerprints | {"data": former_data_digest(self._data_root, self._sources())}

    def _sources(self) -> list[str]:
        return sorted({source for _, source in self.rows})

    def text(self, doc_id: str) -> Text:
        """The beginning of a document.

        Raises:
            FormatError: It cannot be read.
        """
        tokens = self._reader.tokens(doc_id, self._eos_token_id)
        return beginning(tokens, self._tokenizer, self._max_doc_tokens)


class JsonlDocuments:
    """The documents of a JSON lines file (`jsonl_texts`), cut to `max_doc_tokens`.

    Raises:
        SourceError: A line is not a document (E-SOURCE-RECORD).
        FormatError: An id comes twice (E-DOCID).
    """

    def __init__(self, texts: JsonlTexts, tokenizer: Encoder, max_doc_tokens: int) -> None:
        self._texts, self._tokenizer, self._max_doc_tokens = texts, tokenizer, max_doc_tokens
        self.rows = texts.rows

    @property
    def fingerprints(self) -> Fingerprints:
        """Digests of the file and of how its texts are read and cut."""
        return {
            "slice": self._texts.sha256,
            **self._texts.fingerprints,
            "tokenizer": self._tokenizer.fingerprint,
            "max_doc_tokens": str(self._max_doc_tokens),
        }

    @property
    def former_fingerprints(self) -> Fingerprints:
        """No other."""
        return self.fingerprints

    def text(self, doc_id: str) -> Text:
        """A document's text, cut where it is long."""
        text = self._texts.text(doc_id)
        tokens = self._tokenizer.encode_long(text, self._max_doc_tokens + 1)
        if len(tokens) <= self._max_doc_tokens:
            return Text(text, False)
        return beginning(tokens, self._tokenizer, self._max_doc_tokens)


def _refuse_twice(doc_ids: Iterable[str], where: Path) -> None:
    seen: set[str] = set()
    for doc_id in doc_ids:
        if doc_id in seen:
            raise FormatError(
                "a document is named twice", where=where, found=doc_id, code="E-DOCID"
            )
        seen.add(doc_id)


def sample_of(rows: Sequence[tuple[str, str]], count: int) -> list[tuple[str, str]]:
    """`count` of the rows, chosen by a hash of their ids, in their order."""
    import hashlib

    def key(doc_id: str) -> bytes:
        return hashlib.sha256(f"relabel/{doc_id}".encode("utf-8", "replace")).digest()

    chosen = set(sorted((doc_id for doc_id, _ in rows), key=key)[:count])
    return [row for row in rows if row[0] in chosen]
