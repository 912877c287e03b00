"""The records of a block that are to be tokenised; known lines are not parsed."""

from typing import NamedTuple

import numpy as np

from nmoe_core.prep.growth.known import KnownDocuments, LineMatch
from nmoe_core.shards.lines import line_keys, placed_keys
from nmoe_core.sources.jsonl import LinesBlock
from nmoe_core.sources.kept import Kept
from nmoe_core.sources.records import BadRecord, Block, Record, Rows


class BlockRecords(NamedTuple):
    """Records of a block that are to be tokenised."""

    records: list[Record | BadRecord]
    keys: np.ndarray
    """uint64 `[records, 2]`: of their lines, zero where that says too little."""
    kept: Kept | None = None
    match: LineMatch | None = None
    """Documents of the block that are copied whole."""


def read_block(block: Block, rows: Rows, known: KnownDocuments | None) -> BlockRecords:
    """The records of a block that belong to the split; of its lines, those that are not known."""
    if not rows.overlaps(block.start.row, block.end.row):
        return BlockRecords([], _no_keys(0))
    has_columns = bool(block.reading.kept)  # which are taken from parsed records
    if isinstance(block, LinesBlock) and not has_columns and (lines := block.lines()) is not None:
        return _read_lines(block, lines, rows, known)
    records = list(block.records())
    kept = block.kept(records) if has_columns else None
    if rows != Rows():
        wanted = [i for i, record in enumerate(records) if record.row in rows]
        records = [records[i] for i in wanted]
        kept = kept and kept.take(wanted)
    return BlockRecords(records, _no_keys(len(records)), kept)


def _read_lines(
    block: LinesBlock, lines: list[bytes], rows: Rows, known: KnownDocuments | None
) -> BlockRecords:
    keys, match = line_keys(lines), None
    wanted = np.ones(len(lines), np.bool_)
    if rows != Rows():
        wanted[:] = [block.start.row + i in rows for i in range(len(lines))]
    if known is not None and known.has_lines:
        match = _known_lines(block, keys, known)
        match = LineMatch(*(values[wanted[match.lines]] for values in match))
        wanted[match.lines] = False
    numbers = np.flatnonzero(wanted).tolist()
    records: list[Record | BadRecord] = []
    at, placed, replaced = list[int](), dict[int, str](), list[int]()
    for i in numbers:
        if (record := block.record(i, lines[i])) is None:
            continue
        if isinstance(record, Record):
            if record.is_placed:
                placed[len(records)] = record.id
            if record.is_replaced:
                replaced.append(len(records))
        at.append(i)
        records.append(record)
    keys = keys[at]
    keys[[*placed]] = placed_keys(keys[[*placed]], placed.values())
    keys[replaced] = 0  # such a record is counted, which a known line is not
    return BlockRecords(records, keys, match=match)


def _known_lines(block: LinesBlock, keys: np.ndarray, known: KnownDocuments) -> LineMatch:
    """The known lines of a block, first those whose documents have ids of their own."""
    own = known.find_lines(keys)
    others = np.delete(np.arange(len(keys)), own.lines)
    placed = known.find_lines(placed_keys(keys[others], map(block.place, others.tolist())))
    placed = placed._replace(lines=others[placed.lines])
    return LineMatch(*map(np.concatenate, zip(own, placed)))


def _no_keys(num_records: int) -> np.ndarray:
    return np.zeros((num_records, 2), np.uint64)
