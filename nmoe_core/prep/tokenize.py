"""The worker's part of prep: one raw block in, token ids grouped by shard out.

A block is tokenised in one call. The answer is one run of bytes per shard and a few numbers per
record, so that the writer does no work per document. Texts too long for that are tokenised by
pieces, as far as `max_doc_tokens`.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from nmoe_core.base.docid import buckets_of
from nmoe_core.base.errors import FormatError
from nmoe_core.prep.growth.known import KnownDocuments, LineMatch
from nmoe_core.prep.read import read_block
from nmoe_core.prep.settings import PrepSettings, shard_format
from nmoe_core.shards.lines import LINE_ROW
from nmoe_core.shards.shard_file import id_line
from nmoe_core.sources.kept import Kept
from nmoe_core.sources.records import BadRecord, Block, Position, Record, Rows
from nmoe_core.text.long_text import PIECE_CHARS
from nmoe_core.text.normalise import normalize_batch
from nmoe_core.text.tokenizer import Tokenizer, load_tokenizer

OUTCOMES = ("kept", "truncated", "filtered", "empty", "bad", "elsewhere")
KEPT, TRUNCATED, FILTERED, EMPTY, BAD, ELSEWHERE = range(len(OUTCOMES))
_BATCH_CHARS = 4 * 2**20


@dataclass(slots=True)
class Columns:
    """One entry per record, in order."""

    rows: np.ndarray
    """int64: row number."""
    outcomes: np.ndarray
    """uint8: index into OUTCOMES."""
    buckets: np.ndarray
    """int32: shard, -1 for a record that could not be read."""
    num_tokens: np.ndarray
    """int64: tokens with BOS and EOS; 0 unless kept or truncated."""
    id_bytes: np.ndarray
    """int64: bytes of its line of ids; 0 unless it is stored here."""
    are_replaced: np.ndarray
    """bool: whether bytes of the record were replaced."""
    numbers: np.ndarray
    """int64: number of the known document that is copied whole, else -1."""

    def merged(self, others: "Columns") -> "Columns":
        """These records and others, by row."""
        order = np.argsort(np.concatenate([self.rows, others.rows]), kind="stable")
        names = (one.name for one in fields(Columns))
        pairs = ((getattr(self, name), getattr(others, name)) for name in names)
        return Columns(*(np.concatenate(pair)[order] for pair in pairs))


@dataclass(slots=True)
class TokenizedBlock:
    """The records of one block."""

    start: Position
    end: Position
    size_bytes: int
    columns: Columns
    tokens: np.ndarray
    """In the integers of the shards: ids of the stored documents with their BOS and EOS, by shard,
    in order in each; without those that are copied whole."""
    ids: bytes
    """Their lines of ids in the same order."""
    lines: np.ndarray
    """LINE_ROW: their rows in the same order."""
    num_tokenized: int
    num_known: int
    """Documents whose tokens were taken over."""
    num_text_bytes: int
    bad: list[str]
    kept: Kept | None = None
    """Kept columns of the stored documents, in the same order."""


class _Stored(NamedTuple):
    """A document for one of the asked-for shards: its ids without BOS and EOS, its line of ids."""

    bucket: int
    tokens: np.ndarray
    line: bytes
    record: int
    """Its number among the records."""
    text_bytes: int


class BlockTokenizer(NamedTuple):
    """State that a worker opens once."""

    tokenizer: Tokenizer
    settings: PrepSettings
    rows: Rows
    buckets: frozenset[int]
    """Shards that are made."""
    count_all: bool
    """Whether a token budget needs the lengths of documents of other shards."""
    integers: np.dtype
    """Of the tokens in shard files."""
    known: KnownDocuments | None
    """Documents that the split holds already."""


def open_tokenizer(
    settings: PrepSettings,
    rows: Rows,
    buckets: frozenset[int],
    count_all: bool,
    known: KnownDocuments | None,
) -> BlockTokenizer:
    """Load the tokenizer of a worker."""
    tokenizer, integers = load_tokenizer(settings.chosen), shard_format(settings).integers
    return BlockTokenizer(tokenizer, settings, rows, buckets, count_all, integers, known)


def tokenize_block(worker: BlockTokenizer, block: Block) -> TokenizedBlock:
    """Read, normalise and tokenise the records of one block.

    Documents of shards that were not asked for are skipped, unless the token budget needs their
    length.

    Raises:
        FormatError: Tokens that no shard may hold (E-SHARD-DOCUMENT).
        SourceError: The block cannot be read.
    """
    read = read_block(block, worker.rows, worker.known)
    columns, match = _columns(worker, read.records), read.match
    bad = [str(record) for record in read.records if isinstance(record, BadRecord)]
    wanted = np.flatnonzero(columns.outcomes == KEPT).tolist()
    chosen = [(i, record) for i in wanted if isinstance(record := read.records[i], Record)]
    read.records.clear()
    stored: list[_Stored] = []
    num_text_bytes = num_known = 0
    while chosen:
        batch = _take_batch(chosen)
        counts = _tokenize(worker, batch, columns, stored)
        num_text_bytes, num_known = num_text_bytes + counts[0], num_known + counts[1]
    tokens, ids = _by_shard(worker, stored)
    order = [document.record for document in stored]
    lines = np.empty(len(stored), LINE_ROW)
    lines["key"], lines["text_bytes"] = read.keys[order], [one.text_bytes for one in stored]
    if match is not None:
        whole = _whole(worker, block, match)
        is_here = whole.outcomes == KEPT
        num_text_bytes += int(match.text_bytes[is_here].sum())
        num_known += int(is_here.sum())
        columns = columns.merged(whole)
    kept = read.kept
    if kept is not None:
        held = np.flatnonzero(columns.id_bytes)
        kept = kept.take(held[np.argsort(columns.buckets[held], kind="stable")].tolist())
    return TokenizedBlock(
        start=block.start,
        end=block.end,
        size_bytes=block.size_bytes,
        columns=columns,
        tokens=tokens,
        ids=ids,
        lines=lines,
        num_tokenized=int(np.isin(columns.outcomes, (KEPT, TRUNCATED, FILTERED)).sum()) - num_known,
        num_known=num_known,
        num_text_bytes=num_text_bytes,
        bad=bad,
        kept=kept,
    )


def _whole(worker: BlockTokenizer, block: Block, match: LineMatch) -> Columns:
    """Columns of the documents that are copied whole."""
    is_asked = np.isin(match.buckets, list(worker.buckets))
    is_counted = is_asked | worker.count_all
    return Columns(
        rows=match.lines + block.start.row,
        outcomes=np.where(is_counted, KEPT, ELSEWHERE).astype(np.uint8),
        buckets=match.buckets,
        num_tokens=np.where(is_counted, match.num_tokens, 0),
        id_bytes=np.where(is_asked, match.id_bytes, 0),
        are_replaced=np.zeros(len(is_asked), np.bool_),
        numbers=match.numbers,
    )


def _by_shard(worker: BlockTokenizer, stored: list[_Stored]) -> tuple[np.ndarray, bytes]:
    """Tokens with BOS and EOS, and lines of ids, of the documents of each shard in turn."""
    stored.sort(key=attrgetter("bucket"))  # keeps the order of equal ones
    tokenizer, integers = worker.tokenizer, worker.integers
    eos = np.array([tokenizer.eos_token_id], integers).tobytes()
    has_bos = tokenizer.bos_token_id is not None
    bos = [np.array([tokenizer.bos_token_id], integers).tobytes()] if has_bos else []
    payload = b"".join([part for one in stored for part in (*bos, one.tokens.data, eos)])
    tokens = np.frombuffer(payload, integers)
    # Two tests of a whole block cost less than one of every document.
    num_eos = int(np.count_nonzero(tokens == tokenizer.eos_token_id))
    if num_eos != len(stored) or (num_eos and int(tokens.max()) >= tokenizer.vocab_size):
        raise FormatError(
            "the tokenizer gave an EOS inside a text, or an id outside its vocabulary",
            where=tokenizer.name,
            code="E-SHARD-DOCUMENT",
        )
    return tokens, b"".join([document.line for document in stored])


def _columns(worker: BlockTokenizer, records: Sequence[Record | BadRecord]) -> Columns:
    """Columns before anything is tokenised; KEPT stands for "to be tokenised"."""
    num_shards = worker.settings.num_shards
    are_read = np.array([isinstance(record, Record) for record in records], np.bool_)
    good = [record for record in records if isinstance(record, Record)]
    buckets = np.full(len(records), -1, np.int32)
    buckets[are_read] = buckets_of([record.id for record in good], num_shards)
    outcomes = np.where(buckets < 0, BAD, KEPT).astype(np.uint8)
    if not worker.count_all and len(worker.buckets) < num_shards:
        outcomes[(buckets >= 0) & ~np.isin(buckets, list(worker.buckets))] = ELSEWHERE
    are_replaced = np.zeros(len(records), np.bool_)
    are_replaced[are_read] = [record.is_replaced for record in good]
    rows = np.fromiter((record.row for record in records), np.int64, len(records))
    zeros = np.zeros(len(records), np.int64)
    return Columns(rows, outcomes, buckets, zeros, zeros.copy(), are_replaced, zeros - 1)


def _take_batch(chosen: list[tuple[int, Record]]) -> list[tuple[int, Record]]:
    """Take documents off the front, as many as one call tokenises: a long one goes alone."""
    ends = np.cumsum([len(record.text) for _, record in chosen])
    fitting = int(np.searchsorted(ends, _BATCH_CHARS, side="right"))
    batch = chosen[: max(fitting, 1)]
    del chosen[: len(batch)]
    return batch


def _tokenize(
    worker: BlockTokenizer, batch: list[tuple[int, Record]], columns: Columns, stored: list[_Stored]
) -> tuple[int, int]:
    """Tokenise one batch into columns and documents; return the bytes of its texts, and how many
    were known."""
    texts, encoded = normalize_batch([record.text for _, record in batch])
    names = [record.id for _, record in batch]
    numbers = np.array([i for i, _ in batch])
    batch.clear()
    digests = [hashlib.sha256(payload).hexdigest() for payload in encoded]
    text_bytes = np.array([len(payload) for payload in encoded])
    known = _known(worker, digests)
    if known:
        new = [place for place in range(len(texts)) if place not in known]
        texts, encoded = [texts[place] for place in new], [encoded[place] for place in new]
    encoded_ids = _encode(worker, texts, encoded)
    ids = [known[k] if k in known else next(encoded_ids) for k in range(len(names))]
    lengths = np.array([len(one) for one in ids])
    least, most = worker.settings.min_doc_tokens, worker.settings.max_doc_tokens
    outcomes = np.where(lengths > most, TRUNCATED, KEPT)
    outcomes[lengths < least] = FILTERED
    outcomes[text_bytes == 0] = EMPTY
    columns.outcomes[numbers] = outcomes
    num_ends = 1 if worker.tokenizer.bos_token_id is None else 2
    is_kept, buckets = outcomes <= TRUNCATED, columns.buckets[numbers]
    columns.num_tokens[numbers] = (np.minimum(lengths, most) + num_ends) * is_kept
    here = np.flatnonzero(is_kept & np.isin(buckets, list(worker.buckets)))
    lines = [id_line(names[k], digests[k]) for k in here.tolist()]
    columns.id_bytes[numbers[here]] = [len(line) for line in lines]
    rows = (one[here].tolist() for one in (buckets, numbers, text_bytes))
    for k, line, bucket, number, size in zip(here.tolist(), lines, *rows):
        stored.append(_Stored(bucket, ids[k][:most], line, number, size))
    return int(text_bytes.sum()), len(known)


def _known(worker: BlockTokenizer, digests: Sequence[str]) -> dict[int, np.ndarray]:
    """Tokens of the texts that the split holds already, by their place in the batch."""
    if worker.known is None:
        return {}
    found = worker.known.find_texts(digests)
    return {place: ids.astype(worker.integers, copy=False) for place, ids in found.items()}


def _encode(worker: BlockTokenizer, texts: list[str], encoded: list[bytes]) -> Iterator[np.ndarray]:
    """The ids of each text; of a long one as many as decide what is stored of it."""
    tokenizer = worker.tokenizer
    if not texts:
        return iter(())
    if len(texts) == 1 and len(texts[0]) > 2 * PIECE_CHARS:
        ids = tokenizer.encode_long(texts[0], worker.settings.max_doc_tokens + 1)
        bounds = [0, len(ids)]
    else:
        ids, offsets = tokenizer.encode_batch(texts, encoded)
        bounds = offsets.tolist()
    ids = ids.astype(worker.integers, copy=False)
    return (ids[start:stop] for start, stop in pairwise(bounds))
