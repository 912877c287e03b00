"""Documents whose source has tokens: they are taken as they are, and decoded for their text.

The text is normalised, and its SHA-256 and length are recorded, as for a source of texts. An EOS
inside a record ends a document; a document without EOS gets one, like every document of a shard.
"""

import hashlib
from collections.abc import Sequence
from itertools import islice, pairwise
from typing import NamedTuple

import numpy as np

from nmoe_core.base.errors import SourceError
from nmoe_core.prep.encoding.texts import Encoded, Encoder
from nmoe_core.prep.incremental.new_records import Note
from nmoe_core.sources.records import Block, RecordColumns
from nmoe_core.text.documents import decode_tokens
from nmoe_core.text.normalise import normalize_batch

_ADDED = "the end had no EOS, which was added"
_INSIDE = "an EOS inside was taken as the end of a document"
_REPEATED = "repeated EOS tokens were left out"


class Given(NamedTuple):
    """The documents of some records of a block."""

    documents: list[list[Encoded]]
    """The documents of each record: parts, if there are several."""
    notes: list[Note]
    num_text_bytes: int


def given_documents(
    encoder: Encoder, block: Block, records: RecordColumns, wanted: Sequence[int]
) -> Given:
    """The documents of the records with the indices `wanted`. Raises SourceError if an id is not in
    the vocabulary (E-SOURCE-TOKENS)."""
    tokenizer = encoder.tokenizer
    own = [records.tokens[i] for i in wanted]
    _require_known(own, tokenizer.vocab_size, block, [records.rows[i] for i in wanted])
    notes: list[Note] = []
    rows: list[np.ndarray] = []
    counts: list[int] = []
    are_plain = _are_plain(own, tokenizer.eos_token_id, tokenizer.bos_token_id)
    for i, tokens, is_plain in zip(wanted, own, are_plain):
        pieces = [tokens[:-1]]
        if not is_plain:
            pieces, noted = _pieces(tokens, tokenizer.eos_token_id, tokenizer.bos_token_id)
            notes += [Note(records.rows[i], "changed_tokens", one) for one in noted]
        if max(map(len, pieces)) > encoder.settings.max_doc_tokens:
            pieces = [part for piece in pieces for part in _parts(piece, encoder)]
        rows += pieces
        counts.append(len(pieces))
    texts = decode_tokens(tokenizer.reference, rows).to_pylist()
    payloads = normalize_batch(texts)[1]
    documents = iter(_documents(rows, payloads, encoder.integers))
    found = [[*islice(documents, count)] for count in counts]
    for place, parts in enumerate(found):
        if len(parts) > 1:
            found[place] = [one._replace(part=number) for number, one in enumerate(parts, 1)]
    return Given(found, notes, sum(map(len, payloads)))


def _require_known(
    own: Sequence[np.ndarray], vocab_size: int, block: Block, rows: Sequence[int]
) -> None:
    """Refuse ids that are not in the vocabulary; `rows` are the row numbers of the records."""
    tokens = np.concatenate([np.empty(0, np.uint8), *own])
    if not len(tokens) or (int(tokens.max()) < vocab_size and int(tokens.min()) >= 0):
        return
    first = np.flatnonzero((tokens < 0) | (tokens >= vocab_size))[0]
    place = int(np.searchsorted(np.cumsum([*map(len, own)]), first, side="right"))
    raise SourceError(
        "a token is not in the vocabulary",
        where=block.where(rows[place]),
        found=int(tokens[first]),
        expected=f"0 to {vocab_size - 1}",
        do="name the tokenizer that made these files, and the type of their integers",
        code="E-SOURCE-TOKENS",
    )


def _are_plain(own: Sequence[np.ndarray], eos: int, bos: int | None) -> list[bool]:
    """Whether each record is one document with its EOS at the end, and without BOS."""
    if not own:
        return []
    tokens = np.concatenate(own)
    ends = np.cumsum([*map(len, own)])
    starts = np.append(0, ends[:-1])
    num_eos = np.diff(np.searchsorted(np.flatnonzero(tokens == eos), np.append(0, ends)))
    are_plain = (num_eos == 1) & (ends - starts > 1)
    are_plain[are_plain] = tokens[ends[are_plain] - 1] == eos
    if bos is not None:
        are_plain[are_plain] = tokens[starts[are_plain]] != bos
    return are_plain.tolist()


def _pieces(tokens: np.ndarray, eos: int, bos: int | None) -> tuple[list[np.ndarray], list[str]]:
    """The documents in the tokens of a record, without BOS and EOS, and what was changed. A record
    without tokens is one empty document."""
    ends = np.flatnonzero(tokens == eos)
    noted = []
    if not len(ends) or ends[-1] != len(tokens) - 1:
        ends = np.append(ends, len(tokens))
        noted = [_ADDED] * (len(tokens) > 0)
    starts = np.append(0, ends[:-1] + 1)
    pieces = [tokens[start:end] for start, end in zip(starts.tolist(), ends.tolist())]
    if bos is not None:
        pieces = [piece[1:] if len(piece) and piece[0] == bos else piece for piece in pieces]
    full = [piece for piece in pieces if len(piece)]
    noted += [_INSIDE] * (len(full) > 1) + [_REPEATED] * (len(full) < len(pieces) > 1)
    return full or pieces[:1], noted


def _parts(tokens: np.ndarray, encoder: Encoder) -> list[np.ndarray]:
    """The tokens in parts of about equal length, within the limit of a document."""
    most = encoder.settings.max_doc_tokens
    if encoder.settings.long_documents == "cut" or len(tokens) <= most:
        return [tokens]
    return np.array_split(tokens, -(-len(tokens) // most))


def _documents(
    rows: Sequence[np.ndarray], payloads: Sequence[bytes], integers: np.dtype
) -> list[Encoded]:
    """The documents with these tokens and normalised texts."""
    tokens = np.concatenate([np.empty(0, integers), *rows], dtype=integers, casting="unsafe").data
    ends = np.cumsum([0, *map(len, rows)]).tolist()
    return [
        Encoded(hashlib.sha256(payload).hexdigest(), len(payload), tokens[start:end])
        for payload, (start, end) in zip(payloads, pairwise(ends))
    ]
