"""The worker's part of prep: turns one raw block into token ids, grouped by shard.

A block is tokenised in one call. The result is one array of tokens per block, sorted by shard, and
a few numbers per document as arrays, so the writer does no work per document.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from nmoe_core.base.docid import buckets_of
from nmoe_core.base.errors import FormatError
from nmoe_core.prep.encoding.texts import Encoded, Encoder
from nmoe_core.prep.encoding.tokens import given_documents
from nmoe_core.prep.incremental.new_records import Note, read_block
from nmoe_core.prep.incremental.record_digests import RecordDigests
from nmoe_core.prep.incremental.reuse import KnownDocuments, LineMatch
from nmoe_core.prep.settings import PrepSettings, shard_format
from nmoe_core.shards.lines import LINE_ROW
from nmoe_core.shards.shard_file import id_lines
from nmoe_core.sources.passthrough_columns import Kept
from nmoe_core.sources.records import BadRecord, Block, Position, RecordColumns, Rows
from nmoe_core.text.normalise import normalize_batch
from nmoe_core.text.tokenizer import Tokenizer, load_tokenizer
from nmoe_core.text.transforms.batch import Batch
from nmoe_core.text.transforms.chain import Chain, Changed

OUTCOMES = ("kept", "truncated", "filtered", "empty", "bad", "elsewhere", "skipped")
KEPT, TRUNCATED, FILTERED, EMPTY, BAD, ELSEWHERE, SKIPPED = range(len(OUTCOMES))
DROPPED = FILTERED, EMPTY
"""Outcomes of records that can be read and leave no document."""


@dataclass(slots=True)
class Columns:
    """One entry per document, in order; a record without a document has an entry too."""

    rows: np.ndarray
    """int64: row number of the record."""
    outcomes: np.ndarray
    """uint8: index into OUTCOMES."""
    buckets: np.ndarray
    """int32: shard, -1 for a record that could not be read."""
    num_tokens: np.ndarray
    """int64: tokens with BOS and EOS; 0 unless kept or truncated."""
    id_bytes: np.ndarray
    """int64: bytes of its line in the ids file; 0 unless it is stored in a requested shard."""
    are_replaced: np.ndarray
    """bool: whether invalid bytes of the record were replaced."""
    numbers: np.ndarray
    """int64: number of the known document to copy, else -1."""
    parts: np.ndarray
    """int32: number of the part of its record, from 1; 0 if the record is not split."""
    are_emptied: np.ndarray
    """bool: whether the transforms left nothing of the record."""
    lines: np.ndarray
    """LINE_ROW: key of the record's line, and bytes of its text; key 0 for a part."""

    def take(self, chosen: np.ndarray) -> "Columns":
        """The chosen entries."""
        return Columns(*(getattr(self, one.name)[chosen] for one in fields(Columns)))

    @classmethod
    def joined(cls, columns: Sequence["Columns"]) -> "Columns":
        """The entries of all `columns`, sorted by row."""
        order = np.argsort(np.concatenate([one.rows for one in columns]), kind="stable")
        names = [one.name for one in fields(Columns)]
        every = (np.concatenate([getattr(one, name) for one in columns]) for name in names)
        return cls(*(values[order] for values in every))


@dataclass(slots=True)
class TokenizedBlock:
    """The documents of one block."""

    start: Position
    end: Position
    size_bytes: int
    columns: Columns
    tokens: np.ndarray
    """Token ids of the new documents with BOS and EOS, in the integer type of shards, sorted by
    shard and in order within each."""
    ids: bytes
    """Their lines of the ids file, in the same order."""
    lines: np.ndarray
    """LINE_ROW: their rows, in the same order."""
    num_tokenized: int
    num_known: int
    """Number of documents whose tokens were reused."""
    num_text_bytes: int
    bad: list[str]
    kept: Kept | None = None
    """Passthrough columns of the stored documents, in the same order."""
    changes: Any = None
    """Record batch: what transforms changed in the new documents, in the same order; None without
    transforms."""
    notes: tuple[Note, ...] = ()


@dataclass(slots=True)
class _Stored:
    """Documents of the requested shards, one entry each."""

    buckets: list[int] = field(default_factory=list)
    tokens: list[memoryview] = field(default_factory=list)
    """Their token ids without BOS and EOS, in the integer type of shards."""
    id_lines: list[bytes] = field(default_factory=list)
    """Their lines of the ids file."""
    lines: list[np.ndarray] = field(default_factory=list)
    """LINE_ROW: their rows, in some arrays."""
    changes: list[Changed | None] = field(default_factory=list)
    """What transforms changed; a record that is split has its changes at its first part."""
    columns: list[Columns] = field(default_factory=list)
    """Columns of all tokenised documents."""
    failed: dict[int, str] = field(default_factory=dict)
    """Reason why a text could not be encoded, by record."""
    num_text_bytes: int = 0
    num_known: int = 0


class _Made(NamedTuple):
    """What was made of some records."""

    names: list[str]
    """Their ids."""
    documents: Sequence[Sequence[Encoded]]
    """The documents of each."""
    changed: Mapping[int, Changed]
    """What transforms changed, by the number of the record."""


class BlockTokenizer(NamedTuple):
    """The state of a worker: tokenizer, settings and known documents; created once."""

    tokenizer: Tokenizer
    encoder: Encoder
    settings: PrepSettings
    rows: Rows
    buckets: frozenset[int]
    """Shards that the pass makes."""
    count_all: bool
    """Whether documents of other shards are tokenised too, because a token budget needs their
    lengths."""
    integers: np.dtype
    """Integer type of the tokens in shard files."""
    known: KnownDocuments | None
    """Documents that the split already has."""
    transforms: Chain | None
    """Changes of the text before it is tokenised."""
    digests: RecordDigests | None
    """What transforms that read the corpus decide about each record."""


def open_tokenizer(
    settings: PrepSettings,
    rows: Rows,
    buckets: frozenset[int],
    count_all: bool,
    known: KnownDocuments | None,
    shared: Path,
) -> BlockTokenizer:
    """Create the state of a worker; `shared` is the directory of what documents share."""
    tokenizer = load_tokenizer(settings.chosen)
    integers = shard_format(settings).integers
    encoder = Encoder(tokenizer, settings, integers, known)
    transforms = Chain(settings.transforms, shared) if settings.transforms else None
    digests = RecordDigests(shared) if settings.reads_corpus else None
    return BlockTokenizer(
        tokenizer, encoder, settings, rows, buckets, count_all, integers, known, transforms, digests
    )


def tokenize_block(worker: BlockTokenizer, block: Block) -> TokenizedBlock:
    """Read, normalise and tokenise the records of one block.

    Documents of shards that were not requested are skipped, unless the token budget needs their
    length.

    Raises:
        FormatError: The tokenizer returned ids that a shard must not contain (E-SHARD-DOCUMENT).
        SourceError: The block cannot be read.
    """
    chain = worker.transforms
    key_columns = () if chain is None else chain.key_columns
    read = read_block(block, worker.rows, worker.known, worker.digests, key_columns)
    records = read.records
    columns = _columns(worker, records, read.keys)
    is_wanted = columns.outcomes == KEPT
    wanted = np.flatnonzero(is_wanted)
    stored = _Stored(columns=[columns.take(~is_wanted)])
    needed = [] if chain is None else chain.columns
    notes = [*read.notes]
    if block.reading.tokens is None:
        for part, batch in read.batches(wanted, needed):
            _tokenize(worker, batch, columns.take(wanted[part]), wanted[part], stored)
    else:
        given = given_documents(worker.encoder, block, records, wanted.tolist())
        notes += given.notes
        stored.num_text_bytes += given.num_text_bytes
        names = [records.ids[i] for i in wanted.tolist()]
        made = _Made(names, given.documents, {})
        _store(worker, made, columns.take(wanted), wanted, stored)
    for i, reason in stored.failed.items():
        records.bad[i] = BadRecord(records.rows[i], block.where(records.rows[i]), reason)
    tokens, ids, lines, changes = _by_shard(worker, stored)
    num_copied = 0
    if read.match is not None:
        whole = _whole(worker, block, read.match)
        is_here = whole.outcomes != ELSEWHERE
        stored.num_text_bytes += int(read.match.text_bytes[is_here].sum())
        num_copied = int((whole.outcomes == KEPT).sum())
        stored.columns.append(whole)
    columns = Columns.joined(stored.columns)
    is_tokenized = np.isin(columns.outcomes, (KEPT, TRUNCATED, FILTERED)) & (columns.numbers < 0)
    kept = read.kept
    if kept is not None:
        # Index of the record of each entry.
        places = np.unique(columns.rows, return_inverse=True)[1]
        held = np.flatnonzero(columns.id_bytes)
        held = held[np.argsort(columns.buckets[held], kind="stable")]
        kept = kept.take(places[held].tolist())
    return TokenizedBlock(
        start=block.start,
        end=block.end,
        size_bytes=block.size_bytes,
        columns=columns,
        tokens=tokens,
        ids=ids,
        lines=lines,
        num_tokenized=int(is_tokenized.sum()) - stored.num_known,
        num_known=stored.num_known + num_copied,
        num_text_bytes=stored.num_text_bytes,
        bad=[str(one) for one in sorted(records.bad.values()) if not one.is_skipped],
        kept=kept,
        changes=changes,
        notes=(*notes,),
    )


def _whole(worker: BlockTokenizer, block: Block, match: LineMatch) -> Columns:
    """Columns of the known documents that are copied whole, and of known records without one."""
    is_asked = np.isin(match.buckets, list(worker.buckets))
    is_counted = is_asked | worker.count_all
    lines = np.empty(len(is_asked), LINE_ROW)
    lines["key"] = match.keys
    lines["text_bytes"] = match.text_bytes
    return Columns(
        rows=match.lines + block.start.row,
        outcomes=np.where(is_counted, match.outcomes, ELSEWHERE).astype(np.uint8),
        buckets=match.buckets,
        num_tokens=np.where(is_counted, match.num_tokens, 0),
        id_bytes=np.where(is_asked, match.id_bytes, 0),
        are_replaced=np.zeros(len(is_asked), np.bool_),
        numbers=match.numbers,
        parts=np.zeros(len(is_asked), np.int32),
        are_emptied=is_counted & (match.are_emptied > 0),
        lines=lines,
    )


def _by_shard(worker: BlockTokenizer, stored: _Stored) -> tuple[np.ndarray, bytes, np.ndarray, Any]:
    """Data of the documents, sorted by shard: tokens with BOS and EOS, lines of the ids file,
    LINE_ROW rows, and rows of changes."""
    order = np.argsort(np.array(stored.buckets, np.int32), kind="stable").tolist()
    rows = np.concatenate([np.zeros(0, LINE_ROW), *stored.lines])[order]
    ids = [stored.tokens[i] for i in order]
    tokenizer = worker.tokenizer
    integers = worker.integers
    ends = (tokenizer.eos_token_id, tokenizer.bos_token_id)
    eos, bos = (b"" if end is None else np.array([end], integers).tobytes() for end in ends)
    payload = b"".join([part for one in ids for part in (bos, one, eos)])
    tokens = np.frombuffer(payload, integers)
    # Two checks of the whole block are cheaper than one check per document.
    num_eos = int(np.count_nonzero(tokens == tokenizer.eos_token_id))
    if num_eos != len(order) or (num_eos and int(tokens.max()) >= tokenizer.vocab_size):
        raise FormatError(
            "the tokenizer gave an EOS inside a text, or an id outside its vocabulary",
            where=tokenizer.name,
            code="E-SHARD-DOCUMENT",
        )
    changes = None
    if worker.transforms is not None:
        from nmoe_core.shards.changes import as_rows

        changes = as_rows([stored.changes[i] for i in order])
    return tokens, b"".join([stored.id_lines[i] for i in order]), rows, changes


def _columns(worker: BlockTokenizer, records: RecordColumns, keys: np.ndarray) -> Columns:
    """Columns before tokenisation; KEPT means "to be tokenised". `keys` are those of the records'
    lines."""
    num_shards = worker.settings.num_shards
    count = len(records.rows)
    buckets = np.full(count, -1, np.int32)
    are_read = np.ones(count, np.bool_)
    are_read[[*records.bad]] = False
    buckets[are_read] = buckets_of(compress(records.ids, are_read), num_shards)
    outcomes = np.where(are_read, KEPT, BAD).astype(np.uint8)
    if not worker.count_all and len(worker.buckets) < num_shards:
        outcomes[are_read & ~np.isin(buckets, list(worker.buckets))] = ELSEWHERE
    outcomes[[place for place, one in records.bad.items() if one.is_skipped]] = SKIPPED
    are_replaced = np.zeros(count, np.bool_)
    are_replaced[records.replaced] = True
    rows = np.array(records.rows, np.int64)
    zeros = np.zeros(count, np.int64)
    parts = np.zeros(count, np.int32)
    are_emptied = np.zeros(count, np.bool_)
    sizes = zeros, zeros.copy()
    lines = np.zeros(count, LINE_ROW)
    lines["key"] = keys
    flags = are_replaced, zeros - 1, parts, are_emptied
    return Columns(rows, outcomes, buckets, *sizes, *flags, lines)


def _tokenize(
    worker: BlockTokenizer, raw: Batch, columns: Columns, records: np.ndarray, stored: _Stored
) -> None:
    """Tokenise one batch into documents; `columns` are the columns of its `records`. Empties its
    texts, so that long texts are not in memory twice."""
    names = list(raw.ids)
    texts = cast("list[str]", raw.texts)
    normal, encoded = normalize_batch(texts)
    texts.clear()
    changed: dict[int, Changed] = {}
    if worker.transforms is not None:
        normal, encoded, changed = worker.transforms.apply(
            raw._replace(texts=normal, payloads=encoded, source=worker.settings.name)
        )
        columns.are_emptied[:] = [i in changed and not encoded[i] for i in range(len(encoded))]
    stored.num_text_bytes += sum(map(len, encoded))
    of_texts, num_known = worker.encoder.documents(normal, encoded)
    stored.num_known += num_known
    _store(worker, _Made(names, of_texts, changed), columns, records, stored)


def _store(
    worker: BlockTokenizer, made: _Made, columns: Columns, records: np.ndarray, stored: _Stored
) -> None:
    """Store documents; `columns` are the columns of their `records`."""
    documents = [document for found in made.documents for document in found]
    places = np.repeat(np.arange(len(made.documents)), [*map(len, made.documents)])
    columns = columns.take(places)
    records = records[places]
    _fill(worker, documents, columns)
    stored.columns.append(columns)
    for number in np.flatnonzero(columns.outcomes == BAD).tolist():
        stored.failed[int(records[number])] = documents[number].failure
    is_here = (columns.outcomes <= TRUNCATED) & np.isin(columns.buckets, list(worker.buckets))
    here = list(compress(documents, is_here))
    of_ids = id_lines(
        [made.names[i] for i in places[is_here].tolist()], [one.sha256 for one in here]
    )
    columns.id_bytes[is_here] = [len(line) for line in of_ids]
    stored.buckets += columns.buckets[is_here].tolist()
    stored.lines.append(columns.lines[is_here])
    stored.tokens += [one.ids[: worker.settings.max_doc_tokens] for one in here]
    if worker.transforms is not None:
        texts_here = places[is_here].tolist()
        stored.changes += [
            made.changed.get(i) if one.part <= 1 else None for i, one in zip(texts_here, here)
        ]
    stored.id_lines += of_ids


def _fill(worker: BlockTokenizer, documents: Sequence[Encoded], columns: Columns) -> None:
    """Fill in the columns of tokenised documents, except the sizes of their lines."""
    count = len(documents)
    lengths = np.fromiter((len(one.ids) for one in documents), np.int64, count)
    is_failed = np.fromiter((bool(one.failure) for one in documents), np.bool_, count)
    is_empty = np.fromiter((one.text_bytes == 0 for one in documents), np.bool_, count)
    columns.parts[:] = np.fromiter((one.part for one in documents), np.int32, count)
    least = worker.settings.min_doc_tokens
    most = worker.settings.max_doc_tokens
    outcomes = np.where(lengths > most, TRUNCATED, KEPT)
    # A part is never dropped as too short, so that a long document is kept completely.
    outcomes[(lengths < least) & (columns.parts == 0)] = FILTERED
    outcomes[is_empty] = EMPTY
    outcomes[is_failed] = BAD
    columns.outcomes[:] = outcomes
    columns.buckets[is_failed] = -1
    columns.lines["text_bytes"] = [one.text_bytes for one in documents]
    # A known line is copied as one whole document, which a part is not.
    columns.lines["key"][columns.parts > 0] = 0
    columns.are_replaced &= columns.parts <= 1  # count a record once
    num_ends = 1 if worker.tokenizer.bos_token_id is None else 2
    is_kept = outcomes <= TRUNCATED
    columns.num_tokens[:] = (np.minimum(lengths, most) + num_ends) * is_kept
