"""The worker's part of prep: one raw block in, token ids grouped by record out."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from nmoe_core.docid import bucket_of
from nmoe_core.prep.text import normalize_text
from nmoe_core.prep.tokenizer import Engine, Tokenizer, load_tokenizer
from nmoe_core.sources.records import BadRecord, Block, OnError, Rows

Outcome = Literal["kept", "truncated", "filtered", "empty", "bad", "elsewhere"]


@dataclass(frozen=True, slots=True)
class TokenizeSettings:
    """What a worker needs to know."""

    tokenizer: str
    engine: Engine
    num_shards: int
    min_doc_tokens: int
    max_doc_tokens: int
    on_error: OnError
    rows: Rows
    buckets: frozenset[int]
    count_all: bool


class TokenizedRecord(NamedTuple):
    """One record and what became of it; `tokens` is empty unless kept or truncated."""

    row: int
    outcome: Outcome
    bucket: int
    ingest_id: str
    text_sha256: str
    tokens: np.ndarray


@dataclass(slots=True)
class TokenizedBlock:
    """The records of one block, in order."""

    records: list[TokenizedRecord] = field(default_factory=list)
    num_tokenized: int = 0
    num_text_bytes: int = 0


_settings: TokenizeSettings
_tokenizer: Tokenizer
_NOTHING = np.empty(0, np.uint32)


def start_worker(settings: TokenizeSettings) -> None:
    """Load the tokenizer once in a worker process."""
    global _settings, _tokenizer
    _settings = settings
    _tokenizer = load_tokenizer(settings.tokenizer, settings.engine)


def tokenize_block(block: Block) -> TokenizedBlock:
    """Normalise and tokenise the records of one block.

    Documents of shards nobody asked for are hashed and passed over, unless the token budget needs
    their length.

    Raises:
        SourceError: A record cannot be read and `on_error` is `fail` (E-SOURCE-RECORD).
    """
    result = TokenizedBlock()
    pending = list(_normalized(block))
    texts = [text for _, text in pending if text is not None]
    result.num_tokenized = len(texts)
    result.num_text_bytes = sum(map(len, texts))
    rows = iter(_tokenizer.encode_batch([text.decode() for text in texts]))
    for record, text in pending:
        if text is not None:
            record = _fitted(record, next(rows), hashlib.sha256(text).hexdigest())
        result.records.append(record)
    return result


def _normalized(block: Block) -> Iterator[tuple[TokenizedRecord, bytes | None]]:
    """Each record with its normalised UTF-8 text, or None where there is nothing to tokenise."""
    for record in block.records():
        if record.row not in _settings.rows:
            continue
        if isinstance(record, BadRecord):
            if _settings.on_error == "fail":
                raise record.error()
            yield TokenizedRecord(record.row, "bad", -1, record.where, "", _NOTHING), None
            continue
        ingest_id = _encodable(record.id)
        bucket = bucket_of(ingest_id, _settings.num_shards)
        outcome: Outcome = "kept"
        text = None
        if bucket in _settings.buckets or _settings.count_all:
            text = normalize_text(record.text).encode() or None
            outcome = "kept" if text else "empty"
        else:
            outcome = "elsewhere"
        yield TokenizedRecord(record.row, outcome, bucket, ingest_id, "", _NOTHING), text


def _fitted(record: TokenizedRecord, tokens: np.ndarray, text_sha256: str) -> TokenizedRecord:
    if len(tokens) < _settings.min_doc_tokens:
        return record._replace(outcome="filtered")
    outcome: Outcome = "kept" if len(tokens) <= _settings.max_doc_tokens else "truncated"
    # A copy: a view would keep the whole batch alive, and travel with it between processes.
    tokens = np.array(tokens[: _settings.max_doc_tokens], np.uint32)
    return record._replace(outcome=outcome, text_sha256=text_sha256, tokens=tokens)


def _encodable(text: str) -> str:
    """Ids stay distinct: a lone surrogate is spelled out, not replaced."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()
