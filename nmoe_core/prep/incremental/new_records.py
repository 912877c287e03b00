"""Selects the records of a block to tokenise: those that the split does not have yet.

A JSON line without passthrough columns is recognised by its bytes, without parsing; other records
are recognised by id and raw text.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from nmoe_core.prep.incremental.known_keys import KnownKeys
from nmoe_core.prep.incremental.record_digests import RecordDigests
from nmoe_core.prep.incremental.reuse import KnownDocuments, LineMatch
from nmoe_core.shards.lines import line_keys, placed_keys
from nmoe_core.sources.file_sources import BLOCK_BYTES
from nmoe_core.sources.forms.tokens.source import TokensBlock
from nmoe_core.sources.jsonl import LinesBlock
from nmoe_core.sources.passthrough_columns import Kept
from nmoe_core.sources.records import BadRecord, Block, Record, RecordColumns, Rows
from nmoe_core.text.transforms.batch import Batch

_BATCH_CHARS = 4 * 2**20


class Note(NamedTuple):
    """A fact about a record that prep counts."""

    row: int
    what: str
    """`skipped_records`, `file_encodings` or `changed_tokens`."""
    name: str
    """The reason why the record is left out, the detected encoding, or the change."""


class BlockRecords(NamedTuple):
    """Records of a block that are to be tokenised."""

    records: RecordColumns
    keys: np.ndarray
    """uint64 `[records, 2]`: key of each record's line; 0 if the line does not identify the
    document."""
    kept: Kept | None = None
    """Passthrough columns of all records of the block, including records that are copied whole."""
    match: LineMatch | None = None
    """Documents of the block that are copied whole."""
    notes: tuple[Note, ...] = ()
    places: np.ndarray = np.zeros(0, np.int64)
    """int64: place of each record in `kept`."""

    def column(self, name: str, numbers: Sequence[int]) -> list[Any]:
        """The values of a passthrough column of some records."""
        if self.kept is None:
            return [None] * len(numbers)
        return self.kept.values(name, self.places[list(numbers)].tolist())

    def known_columns(self, names: Sequence[str]) -> dict[str, list[Any]]:
        """The values of passthrough columns of the known records."""
        if self.kept is None:
            return {name: [] for name in names}
        known = np.delete(np.arange(self.kept.rows.num_rows), self.places).tolist()
        return {name: self.kept.values(name, known) for name in names}

    def batches(
        self, wanted: np.ndarray, columns: Sequence[str] = ()
    ) -> Iterator[tuple[slice, Batch]]:
        """Batches of the records with the indices `wanted`, and where they are in `wanted`.

        Their texts are not normalised yet, and not kept elsewhere, so that the caller can free
        them; `columns` are the passthrough columns that they need.
        """
        numbers = wanted.tolist()
        names = [self.records.ids[i] for i in numbers]
        rows = [self.records.rows[i] for i in numbers]
        texts = [self.records.texts[i] for i in numbers]
        self.records.texts.clear()
        values = {name: self.column(name, numbers) for name in columns}
        start = 0
        while texts:
            batch = _take_batch(texts)
            part = slice(start, start := start + len(batch))
            own = {name: column[part] for name, column in values.items()}
            yield part, Batch(batch, (), names[part], rows[part], own)


def _take_batch(texts: list[str]) -> list[str]:
    """Remove a batch of texts from the front of the list; a long text forms a batch alone."""
    ends = np.cumsum([len(text) for text in texts])
    fitting = max(int(np.searchsorted(ends, _BATCH_CHARS, side="right")), 1)
    batch = texts[:fitting]
    texts[:] = texts[fitting:]
    return batch


def read_block(
    block: Block,
    rows: Rows,
    known: KnownDocuments | KnownKeys | None,
    digests: RecordDigests | None,
    key_columns: Sequence[str] = (),
) -> BlockRecords:
    """The records of a block that belong to the split and are not known. `digests`, and the values
    of the passthrough columns `key_columns`, are part of their keys."""
    if not rows.overlaps(block.start.row, block.end.row):
        return BlockRecords(RecordColumns(), np.zeros((0, 2), np.uint64))
    has_columns = bool(block.reading.kept)  # the values of columns exist only in parsed records
    if isinstance(block, LinesBlock) and not has_columns and (lines := block.lines()) is not None:
        return _read_lines(block, lines, rows, known, digests)
    if isinstance(block, TokensBlock):
        return _read_tokens(block, rows, known)
    records = list(block.records())
    match = None
    kept = block.kept(records) if has_columns else None
    if rows != Rows():
        wanted = [i for i, record in enumerate(records) if record.row in rows]
        records = [records[i] for i in wanted]
        kept = kept and kept.take(wanted)
    notes = (*_notes(block, records),)
    read: list[list[Any]] = []
    if kept is not None and key_columns:
        read = [kept.values(name, range(len(records))) for name in key_columns]
    keys = _record_keys(records, [*zip(*read)])
    row_numbers = np.array([record.row for record in records], np.int64)
    places = np.arange(len(records))
    if digests is not None:
        keys = digests.mixed(keys, row_numbers)
    if known is not None and known.has_lines:
        match = known.find_lines(keys)
        new = places = np.delete(places, match.lines)
        match = match._replace(lines=row_numbers[match.lines] - block.start.row)
        records = [records[i] for i in new.tolist()]
        keys = keys[new]
    return BlockRecords(RecordColumns.of(records), keys, kept, match, notes, places)


def _notes(block: Block, records: Iterable[Record | BadRecord] = ()) -> Iterator[Note]:
    if block.detected:
        yield Note(block.start.row, "file_encodings", block.detected)
    for record in records:
        if isinstance(record, Record):
            if record.encoding:
                yield Note(record.row, "file_encodings", record.encoding)
        elif record.is_skipped:
            yield Note(record.row, "skipped_records", record.reason)


def _read_lines(
    block: LinesBlock,
    lines: list[bytes],
    rows: Rows,
    known: KnownDocuments | KnownKeys | None,
    digests: RecordDigests | None,
) -> BlockRecords:
    keys = line_keys(lines)
    if digests is not None:
        keys = digests.mixed(keys, np.arange(block.start.row, block.start.row + len(lines)))
    match = None
    wanted = _are_in(rows, block, len(lines))
    if known is not None and known.has_lines:
        match = _known_lines(block, keys, known)
        match = LineMatch(*(values[wanted[match.lines]] for values in match))
        wanted[match.lines] = False
    numbers = np.flatnonzero(wanted).tolist()
    records = block.parse((i, lines[i]) for i in numbers)
    keys = keys[np.array(records.rows, np.int64) - block.start.row]
    places = (records.ids[i] for i in records.placed)
    keys[records.placed] = placed_keys(keys[records.placed], places)
    # known lines are not counted, but records with replaced bytes must be counted
    keys[records.replaced] = 0
    return BlockRecords(records, keys, match=match, notes=(*_notes(block),))


def _read_tokens(
    block: TokensBlock, rows: Rows, known: KnownDocuments | KnownKeys | None
) -> BlockRecords:
    names = block.ids()
    keys = line_keys(block.keys(names))
    match = None
    wanted = _are_in(rows, block, len(names))
    if known is not None and known.has_lines:
        match = known.find_lines(keys)
        match = LineMatch(*(values[wanted[match.lines]] for values in match))
        wanted[match.lines] = False
    numbers = np.flatnonzero(wanted).tolist()
    tokens = block.tokens()
    records = RecordColumns(
        rows=[block.start.row + i for i in numbers],
        ids=[names[i] for i in numbers],
        tokens=[tokens[i] for i in numbers],
    )
    return BlockRecords(records, keys[wanted], match=match)


def _are_in(rows: Rows, block: Block, count: int) -> np.ndarray:
    """Whether each of the records of a block is in the split."""
    wanted = np.ones(count, np.bool_)
    if rows != Rows():
        wanted[:] = [block.start.row + i in rows for i in range(count)]
    return wanted


def _known_lines(
    block: LinesBlock, keys: np.ndarray, known: KnownDocuments | KnownKeys
) -> LineMatch:
    """The known lines of a block: first lines with an id field, then lines identified by
    position."""
    own = known.find_lines(keys)
    others = np.delete(np.arange(len(keys)), own.lines)
    placed = known.find_lines(placed_keys(keys[others], block.places(others.tolist())))
    placed = placed._replace(lines=others[placed.lines])
    return LineMatch(*map(np.concatenate, zip(own, placed)))


def _record_keys(records: list[Record | BadRecord], read: Sequence[tuple[Any, ...]]) -> np.ndarray:
    """A key per record, made of its id and raw text, and of the values in `read` if it has any; 0
    for long texts and texts with replaced bytes."""
    keys = np.zeros((len(records), 2), np.uint64)
    places: list[int] = []
    payloads: list[bytes] = []
    for i, record in enumerate(records):
        # A record with replaced bytes must be counted, and a long text must not be copied again.
        if isinstance(record, BadRecord) or record.is_replaced or len(record.text) > BLOCK_BYTES:
            continue
        values = json.dumps(read[i]) if read else ""
        text = f"{values}{len(record.id)}:{record.id}{record.text}"
        payload = text.encode("utf-8", "surrogatepass")
        places.append(i)
        payloads.append(payload)
    keys[places] = line_keys(payloads)
    return keys
