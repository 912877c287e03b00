"""The documents that an oracle is asked about: their ids, sources and texts, one text at a time.

From token shards a text is the decoded beginning of the document; from JSON lines it is the text
itself, cut to as many tokens. Ids are unique or refused before anything is asked. Memory: ids and
offsets, and the texts that are asked about at the moment.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from nmoe_core.docid import DocumentReader
from nmoe_core.errors import FormatError
from nmoe_core.fingerprint import Fingerprints, sha256_file
from nmoe_core.hydra.slices import data_digest, former_data_digest, read_slice


class Decoder(Protocol):
    """The part of a tokenizer that labelling needs."""

    @property
    def fingerprint(self) -> str: ...

    def decode(self, ids: np.ndarray) -> str: ...


class Encoder(Decoder, Protocol):
    """A tokenizer that also cuts long texts."""

    def encode_long(self, text: str, max_tokens: int) -> np.ndarray: ...


class Text(NamedTuple):
    """What an oracle is shown of a document."""

    text: str
    is_truncated: bool


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
        is_truncated = len(tokens) > self._max_doc_tokens
        return _decoded(self._tokenizer, tokens[: self._max_doc_tokens], is_truncated)


class JsonlDocuments:
    """The documents of a JSON lines file: `text`, `doc_id` or `id`, `source`.

    A line without an id is named `{file}:{line}`, one without a source has the file's name.

    Raises:
        FormatError: A line is not such an object, or an id comes twice (E-DOCID).
    """

    def __init__(self, path: Path, tokenizer: Encoder, max_doc_tokens: int) -> None:
        self._path, self._tokenizer, self._max_doc_tokens = path, tokenizer, max_doc_tokens
        self.rows: list[tuple[str, str]] = []
        self._offsets: dict[str, int] = {}
        offset = 0
        with open(path, "rb") as file:
            for i, line in enumerate(file):
                if line.strip():
                    row = _text_row(line, f"{path}:{i + 1}")
                    doc_id = str(row.get("doc_id", row.get("id", f"{path.name}:{i + 1}")))
                    self.rows.append((doc_id, str(row.get("source", path.stem))))
                    self._offsets[doc_id] = offset
                offset += len(line)
        _refuse_twice((doc_id for doc_id, _ in self.rows), path)

    @property
    def fingerprints(self) -> Fingerprints:
        """Digests of the file and of how its texts are cut."""
        return {
            "slice": sha256_file(self._path),
            "tokenizer": self._tokenizer.fingerprint,
            "max_doc_tokens": str(self._max_doc_tokens),
        }

    @property
    def former_fingerprints(self) -> Fingerprints:
        """No other."""
        return self.fingerprints

    def text(self, doc_id: str) -> Text:
        """A document's text, cut where it is long."""
        with open(self._path, "rb") as file:
            file.seek(self._offsets[doc_id])
            text = _text_row(file.readline(), self._path)["text"]
        # Half a surrogate pair is no text; it could not be written down.
        text = text.encode("utf-8", "replace").decode()
        tokens = self._tokenizer.encode_long(text, self._max_doc_tokens + 1)
        if len(tokens) <= self._max_doc_tokens:
            return Text(text, False)
        return _decoded(self._tokenizer, tokens[: self._max_doc_tokens], True)


def _decoded(tokenizer: Decoder, tokens: np.ndarray, is_truncated: bool) -> Text:
    text = tokenizer.decode(tokens)
    # A cut between tokens may fall inside a character.
    return Text(text.rstrip("\ufffd") if is_truncated else text, is_truncated)


def _text_row(line: bytes, where: object) -> dict[str, Any]:
    try:
        row = json.loads(line)
        if isinstance(row["text"], str):
            return row
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise FormatError(
        "not an object with a text", where=where, found=repr(line[:80]), code="E-DOCID"
    )


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
