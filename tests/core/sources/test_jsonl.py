"""JSON lines: what counts as a text and an id, the same for any cut, in bounded memory."""

import bz2
import gzip
import io
import json
import lzma
import sys
import tracemalloc
import zlib
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import zstandard
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from nmoe_core.base.errors import SourceError
from nmoe_core.base.jsonl import marked_encoding
from nmoe_core.sources.jsonl import JsonlSource
from nmoe_core.sources.records import OnError, Reading, Record
from nmoe_core.sources.storage import SourceFile, decompressed
from tests.core.sources.read import ANY_BYTES, MARK, outcome, records, texts
from tests.growth import growth
from tests.refusals import refused

PACKS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": lambda payload: gzip.compress(payload, mtime=0),
    ".zst": lambda payload: b"".join(map(zstandard.compress, (payload[:9], payload[9:]))),
    ".zstd": zstandard.compress,
    ".bz2": bz2.compress,
    ".XZ": lzma.compress,
}
MIB = 2**20
LIMIT_MB = 8
LINE = b'{"text": "a"}\n'
NO_ID = "field 'id' is %s, not text or a whole number"


def _source(directory: Path, payload: bytes, suffix: str = "", **how: Any) -> JsonlSource:
    path = directory / f"a.jsonl{suffix}"
    path.write_bytes(PACKS[suffix](payload))
    return JsonlSource(Reading("web", **how), [SourceFile(path, "a.jsonl")])


def _fields(count: int) -> bytes:
    """A line with so many fields, of one letter each."""
    return json.dumps(dict.fromkeys("abcdefghi"[:count], 1)).encode()


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (b'{"text": "a", "id": 1.0}', NO_ID % "float"),
        (b'{"text": "a", "id": true}', NO_ID % "bool"),
        (b'{"text": "a", "id": ["a"]}', NO_ID % "list"),
        (b'{"text": "a", "id": {"a": 1}}', NO_ID % "dict"),
        (b'{"text": "a", "id": 18446744073709551616}', NO_ID % "float"),
        (b'{"text": null}', ""),
        (b'{"body": "b"}', "field 'text' is missing among 'body'"),
        (_fields(8), "field 'text' is missing among 'a', 'b', 'c', 'd', 'e', 'f', 'g', 'h'"),
        (_fields(9), "field 'text' is missing among 'a', 'b', 'c', 'd', 'e', 'f', 'g', 'h', ..."),
        (b'{"%b": 1}' % (b"k" * 41), f"field 'text' is missing among '{'k' * 40}'"),
        (b'{"text": 3}', "field 'text' is int, not text"),
        (b'{"x": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", "not JSON: "),
        (MARK + b'{"text": "a"}', "not JSON: "),
    ],
)
def test_a_line_is_a_text_or_says_why_it_is_none(tmp_path: Path, line: bytes, found: str) -> None:
    first, second, third = records(_source(tmp_path, LINE + line + b"\n" + LINE))
    expected = [Record(row, f"web/a.jsonl:{row}", "a", is_placed=True) for row in (0, 2)]
    assert [first, third] == expected
    assert outcome(second) == found or (found.endswith(": ") and outcome(second).startswith(found))


def test_an_item_of_an_array_that_is_nested_too_deep_is_a_bad_record(tmp_path: Path) -> None:
    deep = b"[" * 1000 + b"]" * 1000
    found = records(_source(tmp_path, b'[{"text": "a"}, ' + deep + b', {"text": "b"}]'))
    assert list(map(outcome, found)) == ["a", "not a JSON object but list", "b"]


def test_ids_come_from_the_record_or_from_its_place_and_a_byte_order_mark_is_skipped(
    tmp_path: Path,
) -> None:
    lines = MARK + b'{"text": "a", "id": "x"}\n\n{"text": "b"}\n{"text": "c", "id": 7}'
    found = [(record.row, record.id) for record in records(_source(tmp_path, lines))]
    assert found == [(0, "x"), (2, "web/a.jsonl:2"), (3, "7")]
    assert texts(_source(tmp_path, lines, id_field="key")) == []
    assert _source(tmp_path, MARK).num_rows() == 0


@settings(max_examples=150)
@given(payload=ANY_BYTES, on_error=st.sampled_from(["fail", "replace"]), size=st.integers(1, 40))
@example(payload=b"\n\n\n", on_error="fail", size=2)
@example(payload=MARK + LINE, on_error="fail", size=1)
@example(payload=MARK, on_error="fail", size=40)
def test_any_bytes_are_records_the_same_in_every_container_and_cut(
    tmp_path_factory: pytest.TempPathFactory, payload: bytes, on_error: OnError, size: int
) -> None:
    # Other forms are read by items, not by their own lines.
    start = payload.removeprefix(MARK).lstrip()
    assume(start[:1] != b"{" or start.partition(b"\n")[0].strip() != b"{")
    assume(start[:1] != b"[" and marked_encoding(payload) == "utf-8")
    found = []
    for suffix in PACKS:
        source = _source(tmp_path_factory.getbasetemp(), payload, suffix, on_error=on_error)
        whole = records(source)
        with patch("nmoe_core.sources.jsonl.BLOCK_BYTES", size):
            assert records(source) == whole
            blocks = list(source.blocks())
            for block, after in pairwise(blocks):
                assert block.end == after.start
            for block in blocks[:: max(1, len(blocks) // 3)]:
                before = [r for r in whole if r.row < block.end.row]
                assert before + records(source, block.end) == whole
            num_rows = source.num_rows()
            assert num_rows == (blocks[-1].end.row if blocks else 0)
        found.append((num_rows, [(r.row, type(r), r[2]) for r in whole]))
    assert all(one == found[0] for one in found)
    lines = payload.removeprefix(MARK).split(b"\n")
    assert len(found[0][1]) == sum(bool(line.strip()) for line in lines)


@settings(max_examples=60)
@given(payload=ANY_BYTES, cut=st.integers(0, 60), suffix=st.sampled_from([*PACKS][1:]))
def test_a_damaged_container_is_records_or_one_error(
    tmp_path_factory: pytest.TempPathFactory, payload: bytes, cut: int, suffix: str
) -> None:
    source = _source(tmp_path_factory.getbasetemp(), payload, suffix)
    path = Path(source.files[0].path)
    packed = bytearray(path.read_bytes())
    packed[cut % len(packed)] ^= 0xFF
    path.write_bytes(packed)
    with suppress(SourceError):
        records(source)


@pytest.mark.parametrize("suffix", [*PACKS][1:])
def test_a_torn_stream_is_an_error_that_names_the_file(tmp_path: Path, suffix: str) -> None:
    source = _source(tmp_path, LINE * 100, suffix)
    path = Path(source.files[0].path)
    path.write_bytes(path.read_bytes()[:-20])
    with refused("E-SOURCE-TORN", f"a.jsonl{suffix}"):
        records(source)


def test_an_xz_file_that_needs_much_memory_is_refused_before_it_takes_it(tmp_path: Path) -> None:
    source = _source(tmp_path, LINE, ".XZ")
    path = Path(source.files[0].path)
    payload = bytearray(path.read_bytes())
    payload[16] = 40  # a dictionary of 4 GiB, in the header of the first block
    end = 8 + 4 * payload[12]
    payload[12 + end - 8 : 12 + end - 4] = zlib.crc32(payload[12 : 12 + end - 8]).to_bytes(
        4, "little"
    )
    path.write_bytes(payload)
    with refused("E-SOURCE-TORN", "Memory usage limit exceeded"):
        records(source)


@given(st.lists(st.binary(max_size=40), max_size=3), st.sampled_from([b"", b"\0" * 4, b"x" * 9]))
def test_every_stream_of_an_xz_file_is_read(parts: list[bytes], end: bytes) -> None:
    payload = b"".join(map(lzma.compress, [b"", *parts]))
    with patch("nmoe_core.sources.storage._XZ_INPUT_BYTES", 7):
        read = decompressed(io.BytesIO(payload + end), ".xz")
        assert b"".join(iter(lambda: read(5), b"")) == b"".join(parts)
        with pytest.raises(EOFError):
            decompressed(io.BytesIO(payload + b"\xfd7z"), ".xz")(1000)


def test_a_blank_line_takes_about_the_time_of_a_record(tmp_path: Path) -> None:
    """A megabyte may hold a million of them."""
    (tmp_path / "blank").mkdir()
    of_records = _source(tmp_path, LINE * 100_000)
    of_blanks = _source(tmp_path / "blank", b"\n" * 100_000 + LINE)

    def read(source: JsonlSource) -> None:
        for block in source.blocks():
            assert [*block.records()]
            assert [*block.values()]

    assert growth(read, of_records, of_blanks) < 2.5


def test_blocks_of_blank_lines_take_less_time_than_records_and_count_in_line_numbers(
    tmp_path: Path,
) -> None:
    """A compressed megabyte may hold a thousand million of them."""
    (tmp_path / "blank").mkdir()
    num_lines = 4 * MIB
    of_records = _source(tmp_path, LINE * 50_000, ".gz")
    of_blanks = _source(tmp_path / "blank", b"\n" * num_lines + LINE, ".gz")

    assert [record.id for record in records(of_blanks)] == [f"web/a.jsonl:{num_lines}"]
    assert growth(records, of_records, of_blanks) < 1


def test_a_small_zstd_file_does_not_become_one_large_block(tmp_path: Path) -> None:
    line = b'{"text": "' + b"a" * 1000 + b'"}\n'
    source = _source(tmp_path, line * 200_000, ".zst")
    assert source.size_bytes() < 60_000
    tracemalloc.start()
    sizes = [len(block.payload or b"") for block in source.blocks()]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sum(sizes) == 200_000 * len(line)
    assert max(sizes) <= 4 * MIB
    assert min(sizes[:-1]) >= MIB
    assert peak < 150 * MIB


@pytest.mark.parametrize("suffix", PACKS)
def test_a_line_longer_than_many_blocks_is_one_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    monkeypatch.setattr("nmoe_core.sources.jsonl.BLOCK_BYTES", 256)
    written = ["short", "x" * 10_000_000, "end"]
    payload = "".join(json.dumps({"text": text}) + "\n" for text in written).encode()
    source = _source(tmp_path, payload, suffix)
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
    # The pieces of a line are joined once, besides once in each of 39,000 reads of pieces;
    # joining all at each piece would copy 195 GB.
    assert num_joins < (50_000 if suffix in (".zst", ".zstd", ".XZ") else 100)


@pytest.mark.parametrize("suffix", PACKS)
def test_a_line_past_the_limit_is_refused_before_more_is_held_and_one_below_it_is_read(
    tmp_path: Path, suffix: str
) -> None:
    def lines(size_mb: int) -> JsonlSource:
        long_line = b'{"text": "' + b"a" * (size_mb * MIB) + b'"}\n'
        limit = LIMIT_MB * MIB
        return _source(tmp_path, LINE * 50 + long_line + LINE, suffix, max_record_bytes=limit)

    source = lines(200)
    tracemalloc.start()
    with refused("E-SOURCE-RECORD", naming=[f"{source.files[0].path}:51", "max_record_mb"]):
        records(source)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # One input of zstd or xz may give more than is asked for, and xz has a dictionary of 8 MiB.
    assert peak < (LIMIT_MB + {".zst": 16, ".zstd": 16, ".XZ": 24}.get(suffix, 8)) * MIB
    with pytest.raises(SourceError):
        source.num_rows()
    found = records(lines(LIMIT_MB - 1))
    assert len(found) == 52
    assert len(found[50].text) == (LIMIT_MB - 1) * MIB


@pytest.mark.parametrize("unit", ["[]", "{}", '{"":0}', '{"":""}', "1", "1.5", '"\\u6771"', '"aa"'])
@pytest.mark.parametrize("form", ['{"text": "", "n": [%s 1]}', "[%s 1]"])
def test_a_line_takes_at_most_fifty_times_its_bytes(tmp_path: Path, form: str, unit: str) -> None:
    line = (form % (f"{unit}, " * (2**19 // len(unit)))).replace(" ", "").encode() + b"\n"
    source = _source(tmp_path, LINE + line)
    tracemalloc.start()
    try:
        assert len(records(source)) == 2
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 50 * len(line)


@pytest.mark.parametrize("suffix", PACKS)
def test_a_line_as_long_as_the_limit_is_read_with_and_without_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    monkeypatch.setattr("nmoe_core.sources.jsonl.BLOCK_BYTES", 16)
    for end in (b"", b"\n"):
        line = b'{"text": "' + b"a" * 52 + b'"}' + end
        source = _source(tmp_path, LINE + line, suffix, max_record_bytes=len(line))
        assert texts(source) == ["a", "a" * 52]
        source.reading = source.reading._replace(max_record_bytes=len(line) - 1)
        with refused("E-SOURCE-RECORD", r"a\.jsonl\S*:2"):
            records(source)


def test_the_names_of_fields_lead_into_objects_but_not_too_deep(tmp_path: Path) -> None:
    deep = b'{"a": {"b": {"c": {"d": {"e": 1}}}}, "f": []}\n{"g": 1}\n{"a": '
    assert _source(tmp_path, deep).field_names() == ["a", "a.b", "a.b.c", "a.b.c.d", "f", "g"]
