"""Sources in tests: opened from a table, and read to their end."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hypothesis import strategies as st

from nmoe_core.base.strict import validate
from nmoe_core.sources.open import open_source
from nmoe_core.sources.records import START, BadRecord, Position, Record, Source, Split
from nmoe_core.sources.spec import SourceSpec

MARK = b"\xef\xbb\xbf"
_PIECES = [
    *(b'{"text": "a"}', b'{"text": "b", "id": "x"}', '{"text": "\u6771\\ud800"}'.encode()),
    *(b'{"text": 3}', b'{"id": 7, "text": null}', b'["text"]', b'{"text": "torn', b"[" * 2000),
    *(b"\xff\xfe", MARK, b"\r", b" ", b"\n", b"\n", b"\x00"),
]
ANY_BYTES = st.lists(st.sampled_from(_PIECES) | st.binary(max_size=6), max_size=20).map(b"".join)


def opened(base: Path, split: str = "train", **keys: Any) -> Split:
    """The source of a mixture's table named `web`."""
    return open_source(validate(SourceSpec, {"id": "web", **keys}, "test"), base, split)


def records(source: Source, start: Position = START) -> list[Any]:
    """Records and bad records."""
    return [record for block in source.blocks(start) for record in block.records()]


def good(source: Source) -> list[Record]:
    """Records alone."""
    return [record for record in records(source) if isinstance(record, Record)]


def texts(source: Source) -> list[str]:
    """Texts of the records."""
    return [record.text for record in good(source)]


def spans(source: Source, start: Position = START) -> list[tuple[Position, Position, list[Any]]]:
    """Start, end and records of each block."""
    return [(block.start, block.end, list(block.records())) for block in source.blocks(start)]


def outcome(record: Record | BadRecord) -> str:
    """The text, or why there is none."""
    return record.text if isinstance(record, Record) else record.reason


def builder_of(rows: Any) -> Any:
    """A stand-in for what the `datasets` library opens a dataset of the hub with, without files."""
    config = SimpleNamespace(data_files=None, name="default")
    return SimpleNamespace(config=config, as_streaming_dataset=lambda split: rows)
