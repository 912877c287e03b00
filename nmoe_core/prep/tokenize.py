"""The worker's part of prep: one raw block in, token ids grouped by shard out.

A block is tokenised in one call. The answer is one run of bytes per shard and a few numbers per
record, so that the writer does no work per document. Texts too long for that are tokenised by
pieces, as far as `max_doc_tokens`.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import compress, pairwise
from typing import NamedTuple

import numpy as np

from nmoe_core.base.docid import buckets_of
from nmoe_core.base.errors import FormatError, TokenizerError
from nmoe_core.prep.growth.known import KnownDocuments, LineMatch
from nmoe_core.prep.read import read_block
from nmoe_core.prep.settings import PrepSettings, shard_format
from nmoe_core.shards.lines import LINE_ROW
from nmoe_core.shards.shard_file import id_lines
from nmoe_core.sources.kept import Kept
from nmoe_core.sources.records import BadRecord, Block, Position, RecordColumns, Rows
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


@dataclass(slots=True)
class _Stored:
    """Documents for the asked-for shards, an entry each."""

    buckets: list[int] = field(default_factory=list)
    records: list[int] = field(default_factory=list)
    """Their numbers among the records."""
    text_bytes: list[int] = field(default_factory=list)
    tokens: list[memoryview] = field(default_factory=list)
    """Their ids without BOS and EOS, in the integers of the shards."""
    lines: list[bytes] = field(default_factory=list)
    """Their lines of ids."""
    failed: dict[int, str] = field(default_factory=dict)
    """By record, why its text has no ids."""


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
    columns, match, records = _columns(worker, read.records), read.match, read.records
    wanted = np.flatnonzero(columns.outcomes == KEPT)
    names = [records.ids[i] for i in wanted.tolist()]
    texts = [records.texts[i] for i in wanted.tolist()]
    records.texts.clear()
    stored, start, num_text_bytes, num_known = _Stored(), 0, 0, 0
    while texts:
        batch = _take_batch(texts)
        part = slice(start, start := start + len(batch))
        counts = _tokenize(worker, batch, names[part], wanted[part], columns, stored)
        num_text_bytes, num_known = num_text_bytes + counts[0], num_known + counts[1]
    for i, reason in stored.failed.items():
        records.bad[i] = BadRecord(records.rows[i], block.where(records.rows[i]), reason)
    tokens, ids, lines = _by_shard(worker, stored, read.keys)
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
        bad=[*map(str, sorted(records.bad.values()))],
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


def _by_shard(
    worker: BlockTokenizer, stored: _Stored, keys: np.ndarray
) -> tuple[np.ndarray, bytes, np.ndarray]:
    """Of the documents of each shard in turn: tokens with BOS and EOS, lines of ids, and rows of
    lines out of `keys`, those of the records."""
    order = np.argsort(np.array(stored.buckets, np.int32), kind="stable").tolist()
    rows = np.empty(len(order), LINE_ROW)
    rows["key"] = keys[[stored.records[i] for i in order]]
    rows["text_bytes"] = [stored.text_bytes[i] for i in order]
    ids = [stored.tokens[i] for i in order]
    tokenizer, integers = worker.tokenizer, worker.integers
    ends = (tokenizer.eos_token_id, tokenizer.bos_token_id)
    eos, bos = (b"" if end is None else np.array([end], integers).tobytes() for end in ends)
    payload = b"".join([part for one in ids for part in (bos, one, eos)])
    tokens = np.frombuffer(payload, integers)
    # Two tests of a whole block cost less than one of every document.
    num_eos = int(np.count_nonzero(tokens == tokenizer.eos_token_id))
    if num_eos != len(order) or (num_eos and int(tokens.max()) >= tokenizer.vocab_size):
        raise FormatError(
            "the tokenizer gave an EOS inside a text, or an id outside its vocabulary",
            where=tokenizer.name,
            code="E-SHARD-DOCUMENT",
        )
    return tokens, b"".join([stored.lines[i] for i in order]), rows


def _columns(worker: BlockTokenizer, records: RecordColumns) -> Columns:
    """Columns before anything is tokenised; KEPT stands for "to be tokenised"."""
    num_shards, count = worker.settings.num_shards, len(records.rows)
    buckets = np.full(count, -1, np.int32)
    are_read = np.ones(count, np.bool_)
    are_read[[*records.bad]] = False
    buckets[are_read] = buckets_of(compress(records.ids, are_read), num_shards)
    outcomes = np.where(are_read, KEPT, BAD).astype(np.uint8)
    if not worker.count_all and len(worker.buckets) < num_shards:
        outcomes[are_read & ~np.isin(buckets, list(worker.buckets))] = ELSEWHERE
    are_replaced = np.zeros(count, np.bool_)
    are_replaced[records.replaced] = True
    rows, zeros = np.array(records.rows, np.int64), np.zeros(count, np.int64)
    return Columns(rows, outcomes, buckets, zeros, zeros.copy(), are_replaced, zeros - 1)


def _take_batch(texts: list[str]) -> list[str]:
    """Take texts off the front, as many as one call tokenises: a long one goes alone."""
    ends = np.cumsum([len(text) for text in texts])
    fitting = max(int(np.searchsorted(ends, _BATCH_CHARS, side="right")), 1)
    batch, texts[:] = texts[:fitting], texts[fitting:]
    return batch


def _tokenize(
    worker: BlockTokenizer,
    texts: list[str],
    names: list[str],
    numbers: np.ndarray,
    columns: Columns,
    stored: _Stored,
) -> tuple[int, int]:
    """Tokenise one batch into columns and documents; return the bytes of its texts, and how many
    were known. `texts` is emptied: what is held twice is long."""
    normal, encoded = normalize_batch(texts)
    texts.clear()
    digests = [hashlib.sha256(payload).hexdigest() for payload in encoded]
    text_bytes = np.fromiter(map(len, encoded), np.int64, len(encoded))
    known, num_text_bytes = _known(worker, digests), int(text_bytes.sum())
    if known:
        new = [place for place in range(len(normal)) if place not in known]
        normal, encoded = [normal[place] for place in new], [encoded[place] for place in new]
    new_ids, ids = iter(_encode(worker, normal, encoded)), []
    for k, number in enumerate(numbers.tolist()):
        found = known[k] if k in known else next(new_ids)
        if isinstance(found, str):
            stored.failed[number] = found
            found = memoryview(b"")
        ids.append(found)
    is_failed = np.isin(numbers, list(stored.failed))
    lengths = np.fromiter(map(len, ids), np.int64, len(ids))
    least, most = worker.settings.min_doc_tokens, worker.settings.max_doc_tokens
    outcomes = np.where(lengths > most, TRUNCATED, KEPT)
    outcomes[lengths < least] = FILTERED
    outcomes[text_bytes == 0] = EMPTY
    outcomes[is_failed] = BAD
    columns.buckets[numbers[is_failed]] = -1
    columns.outcomes[numbers] = outcomes
    num_ends = 1 if worker.tokenizer.bos_token_id is None else 2
    is_kept, buckets = outcomes <= TRUNCATED, columns.buckets[numbers]
    columns.num_tokens[numbers] = (np.minimum(lengths, most) + num_ends) * is_kept
    is_here = is_kept & np.isin(buckets, list(worker.buckets))
    lines = id_lines(list(compress(names, is_here)), list(compress(digests, is_here)))
    columns.id_bytes[numbers[is_here]] = [len(line) for line in lines]
    stored.buckets += buckets[is_here].tolist()
    stored.records += numbers[is_here].tolist()
    stored.text_bytes += text_bytes[is_here].tolist()
    stored.tokens += [one[:most] for one in compress(ids, is_here)]
    stored.lines += lines
    return num_text_bytes, len(known)


def _known(worker: BlockTokenizer, digests: Sequence[str]) -> dict[int, memoryview]:
    """Tokens of the texts that the split holds already, by their place in the batch."""
    if worker.known is None:
        return {}
    found = worker.known.find_texts(digests)
    return {place: ids.astype(worker.integers, copy=False).data for place, ids in found.items()}


def _encode(
    worker: BlockTokenizer, texts: list[str], encoded: list[bytes]
) -> list[memoryview | str]:
    """The ids of each text, of a long one as many as decide what is stored of it; or why a text has
    none."""
    try:
        return [*_ids(worker, texts, encoded)]
    except TokenizerError as error:
        if error.code != "E-TOKENIZER-TEXT":
            raise
        if len(texts) == 1:
            return [str(error)]
        pairs = zip(texts, encoded)
        return [found for text, payload in pairs for found in _encode(worker, [text], [payload])]


def _ids(worker: BlockTokenizer, texts: list[str], encoded: list[bytes]) -> list[memoryview]:
    tokenizer = worker.tokenizer
    if not texts:
        return []
    if len(texts) == 1 and len(texts[0]) > 2 * PIECE_CHARS:
        ids = tokenizer.encode_long(texts[0], worker.settings.max_doc_tokens + 1)
        return [ids.astype(worker.integers, copy=False).data]
    ids, offsets = tokenizer.encode_batch(texts, encoded)
    together = ids.astype(worker.integers, copy=False).data
    return [together[start:stop] for start, stop in pairwise(offsets.tolist())]
