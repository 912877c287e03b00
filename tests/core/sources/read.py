"""Sources in tests: opened from a table, and read to their end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nmoe_core.base.strict import validate
from nmoe_core.sources.open import open_source
from nmoe_core.sources.records import START, BadRecord, Position, Record, Rows, Source, Split
from nmoe_core.sources.spec import SourceSpec


def opened(base: Path, split: str = "train", **keys: Any) -> Split:
    """The source of a mixture's table named `web`."""
    return open_source(validate(SourceSpec, {"id": "web", **keys}, "test"), base, split)


def records(source: Source, start: Position = START, rows: Rows | None = None) -> list[Any]:
    """Records and bad records, of some rows."""
    found = [record for block in source.blocks(start) for record in block.records()]
    return [record for record in found if rows is None or record.row in rows]


def good(source: Source, rows: Rows | None = None) -> list[Record]:
    """Records alone."""
    return [record for record in records(source, rows=rows) if isinstance(record, Record)]


def texts(source: Source) -> list[str]:
    """Texts of the records."""
    return [record.text for record in good(source)]


def spans(source: Source, start: Position = START) -> list[tuple[Position, Position, list[Any]]]:
    """Start, end and records of each block."""
    return [(block.start, block.end, list(block.records())) for block in source.blocks(start)]


def outcome(record: Record | BadRecord) -> str:
    """The text, or why there is none."""
    return record.text if isinstance(record, Record) else record.reason
