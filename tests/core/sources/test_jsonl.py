"""JSON lines: what counts as a text and an id, and memory that does not follow the input."""

from __future__ import annotations

import gzip
import json
import sys
import tracemalloc
from pathlib import Path

import pytest
import zstandard

from nmoe_core.sources.jsonl import JsonlSource
from nmoe_core.sources.records import BadRecord, Reading, Record
from nmoe_core.sources.storage import SourceFile


def _source(tmp_path: Path, payload: bytes, name: str = "a.jsonl") -> JsonlSource:
    (tmp_path / name).write_bytes(payload)
    return JsonlSource(Reading("web", on_error="skip"), [SourceFile(tmp_path / name, name)])


def _records(source: JsonlSource) -> list[Record | BadRecord]:
    source.check()
    return [record for block in source.blocks() for record in block.records()]


@pytest.mark.parametrize("value", [1.0, True, ["a"], {"a": 1}, 2**64])
def test_only_text_and_whole_numbers_are_ids(tmp_path: Path, value: object) -> None:
    line = json.dumps({"text": "a", "id": value}).encode()
    (bad,) = _records(_source(tmp_path, line))
    assert isinstance(bad, BadRecord)
    kind = "float" if value == 2**64 else type(value).__name__
    assert bad.reason == f"field 'id' is {kind}, not text or a whole number"


def test_a_null_text_is_empty_and_a_missing_one_is_bad(tmp_path: Path) -> None:
    lines = b'{"text": null}\n{"body": "b"}\n{"text": 3}\n'
    empty, missing, number = _records(_source(tmp_path, lines))
    assert empty == Record(0, "web/a.jsonl:0", "")
    assert isinstance(missing, BadRecord)
    assert missing.reason == "field 'text' is missing"
    assert isinstance(number, BadRecord)
    assert number.reason == "field 'text' is int, not text"


def test_json_nested_too_deep_is_a_bad_record(tmp_path: Path) -> None:
    deep = b'{"text": "a", "x": ' + b"[" * 200_000 + b"]" * 200_000 + b"}\n"
    bad, good = _records(_source(tmp_path, deep + b'{"text": "b"}\n'))
    assert isinstance(bad, BadRecord)
    assert good == Record(1, "web/a.jsonl:1", "b")


@pytest.mark.parametrize("block_bytes", [1, 2**20])
def test_a_byte_order_mark_is_skipped_at_the_start_of_a_file_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    monkeypatch.setattr("nmoe_core.sources.jsonl.BLOCK_BYTES", block_bytes)
    mark = b"\xef\xbb\xbf"
    line = b'{"text": "a"}\n'
    assert _records(_source(tmp_path, mark + line)) == [Record(0, "web/a.jsonl:0", "a")]
    good, bad = _records(_source(tmp_path, line + mark + line))
    assert isinstance(good, Record)
    assert isinstance(bad, BadRecord)
    assert _source(tmp_path, mark).num_rows() == 0


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


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_a_line_longer_than_many_blocks_is_one_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    monkeypatch.setattr("nmoe_core.sources.jsonl.BLOCK_BYTES", 256)
    texts = ["short", "x" * 10_000_000, "end"]
    payload = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    pack = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}[suffix]
    source = _source(tmp_path, pack(payload), "a.jsonl" + suffix)
    num_joins = 0

    def count_joins(frame: object, event: str, called: object) -> None:
        nonlocal num_joins
        num_joins += event == "c_call" and getattr(called, "__name__", "") == "join"

    sys.setprofile(count_joins)
    try:
        assert [r.text for r in _records(source) if isinstance(r, Record)] == texts
    finally:
        sys.setprofile(None)
    assert [block.start.row for block in source.blocks()][-1] <= 2
    # The pieces of a line are joined once, besides once in each of 39,000 reads of a .zst;
    # joining all at each piece would copy 195 GB.
    assert num_joins < (50_000 if suffix == ".zst" else 100)
