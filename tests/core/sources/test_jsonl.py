"""JSON lines: what counts as a text and an id, and memory that does not follow the input."""

from __future__ import annotations

import gzip
import json
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import zstandard

from nmoe_core.sources.jsonl import JsonlSource
from nmoe_core.sources.records import Reading, Record
from nmoe_core.sources.storage import SourceFile
from tests.core.sources.read import outcome, records, texts
from tests.refusals import refused

PACKS = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}
MARK = b"\xef\xbb\xbf"
LINE = b'{"text": "a"}\n'
NO_ID = "field 'id' is %s, not text or a whole number"


def _source(tmp_path: Path, payload: bytes, name: str = "a.jsonl", **how: Any) -> JsonlSource:
    (tmp_path / name).write_bytes(payload)
    reading = Reading("web", on_error="skip", **how)
    return JsonlSource(reading, [SourceFile(tmp_path / name, name)])


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (b'{"text": "a", "id": 1.0}', NO_ID % "float"),
        (b'{"text": "a", "id": true}', NO_ID % "bool"),
        (b'{"text": "a", "id": ["a"]}', NO_ID % "list"),
        (b'{"text": "a", "id": {"a": 1}}', NO_ID % "dict"),
        (b'{"text": "a", "id": 18446744073709551616}', NO_ID % "float"),
        (b'{"text": null}', ""),
        (b'{"body": "b"}', "field 'text' is missing"),
        (b'{"text": 3}', "field 'text' is int, not text"),
        (b'{"x": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", "not JSON: "),
        (MARK + b'{"text": "a"}', "not JSON: "),
    ],
)
def test_a_line_is_a_text_or_says_why_it_is_none(tmp_path: Path, line: bytes, found: str) -> None:
    first, second, third = records(_source(tmp_path, LINE + line + b"\n" + LINE))
    assert (first, third) == (Record(0, "web/a.jsonl:0", "a"), Record(2, "web/a.jsonl:2", "a"))
    assert outcome(second) == found or (found.endswith(": ") and outcome(second).startswith(found))


def test_ids_come_from_the_record_or_from_its_place(tmp_path: Path) -> None:
    lines = b'{"text": "a", "id": "x"}\n\n{"text": "b"}\n{"text": "c", "id": 7}'
    found = [(record.row, record.id) for record in records(_source(tmp_path, lines))]
    assert found == [(0, "x"), (2, "web/a.jsonl:2"), (3, "7")]
    assert texts(_source(tmp_path, lines, id_field="key")) == []


@pytest.mark.parametrize("block_bytes", [1, 2**20])
def test_a_byte_order_mark_is_skipped_at_the_start_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    monkeypatch.setattr("nmoe_core.sources.jsonl.BLOCK_BYTES", block_bytes)
    assert records(_source(tmp_path, MARK + LINE)) == [Record(0, "web/a.jsonl:0", "a")]
    assert _source(tmp_path, MARK).num_rows() == 0


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_torn_stream_is_an_error_that_names_the_file(tmp_path: Path, suffix: str) -> None:
    payload = PACKS[suffix](LINE * 100)
    with refused("E-SOURCE-TORN", f"a.jsonl{suffix}"):
        records(_source(tmp_path, payload[: len(payload) // 2], "a.jsonl" + suffix))


def test_a_small_zstd_file_does_not_become_one_large_block(tmp_path: Path) -> None:
    line = b'{"text": "' + b"a" * 1000 + b'"}\n'
    payload = zstandard.ZstdCompressor(level=1).compress(line * 200_000)
    assert len(payload) < 60_000
    source = _source(tmp_path, payload, "a.jsonl.zst")
    tracemalloc.start()
    sizes = [len(block.payload or b"") for block in source.blocks()]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sum(sizes) == 200_000 * len(line)
    assert max(sizes) <= 4 * 2**20
    assert min(sizes[:-1]) >= 2**20
    assert peak < 150 * 2**20


@pytest.mark.parametrize("suffix", PACKS)
def test_a_line_longer_than_many_blocks_is_one_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    monkeypatch.setattr("nmoe_core.sources.jsonl.BLOCK_BYTES", 256)
    written = ["short", "x" * 10_000_000, "end"]
    payload = "".join(json.dumps({"text": text}) + "\n" for text in written).encode()
    source = _source(tmp_path, PACKS[suffix](payload), "a.jsonl" + suffix)
    num_joins = 0

    def count_joins(frame: object, event: str, called: object) -> None:
        nonlocal num_joins
        num_joins += event == "c_call" and getattr(called, "__name__", "") == "join"

    sys.setprofile(count_joins)
    try:
        assert texts(source) == written
    finally:
        sys.setprofile(None)
    assert [block.start.row for block in source.blocks()][-1] <= 2
    # The pieces of a line are joined once, besides once in each of 39,000 reads of a .zst;
    # joining all at each piece would copy 195 GB.
    assert num_joins < (50_000 if suffix == ".zst" else 100)
