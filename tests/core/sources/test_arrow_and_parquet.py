"""Parquet and Arrow: the rows of the file in its order, whatever its layout, or one error."""

import os
import pickle
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nmoe_core.base.errors import SourceError
from nmoe_core.sources.forms.arrow import ArrowSource, ParquetSource
from nmoe_core.sources.records import BadRecord, Reading, Record
from nmoe_core.sources.storage import SourceFile
from tests.conftest import Mutations
from tests.core.sources.read import good, records, spans
from tests.refusals import refused

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

KINDS = ("parquet", "file", "stream")
Source = ParquetSource | ArrowSource


def _write(path: Path, table: Any, kind: str, rows: int = 7) -> None:
    if kind == "parquet":
        pq.write_table(table, path, row_group_size=rows, write_page_checksum=True)
        return
    new = pa.ipc.new_file if kind == "file" else pa.ipc.new_stream
    with pa.OSFile(str(path), "wb") as sink, new(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)


def _source(kind: str, *paths: Path, **options: Any) -> Source:
    files = [SourceFile(path, path.name) for path in paths]
    return (ParquetSource if kind == "parquet" else ArrowSource)(Reading("web", **options), files)


def _records(source: Source) -> list[Record | BadRecord]:
    source.check()
    return records(source)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "of", ["string", "large_string", "string_view", "binary", "large_binary", "dictionary"]
)
def test_texts_of_every_arrow_type_are_read_and_numbered(
    tmp_path: Path, kind: str, of: str
) -> None:
    texts = ["naïve", None, "", "雪" * 9, "a\0b", "naïve", *map(str, range(30))]
    text = pa.array(texts, pa.string())
    text = text.dictionary_encode() if of == "dictionary" else text.cast(getattr(pa, of)())
    _write(tmp_path / "a", pa.table({"n": range(36), "body": text}), kind)
    source = _source(kind, tmp_path / "a", tmp_path / "a", text_field="body")
    found = good(source)
    assert [(r.row, r.text) for r in found] == list(enumerate([t or "" for t in texts] * 2))
    assert [r.id for r in found][34:38] == ["web/a:34", "web/a:35", "web/a:0", "web/a:1"]
    assert source.num_rows() == 72
    shares = [block.size_bytes for block in source.blocks()]
    assert 0 <= source.size_bytes() - sum(shares) < 2 * len(shares)  # each is rounded down


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_goes_to_a_worker_without_the_rest_of_its_batch(tmp_path: Path, kind: str) -> None:
    texts = [f"{i} " * 5000 for i in range(2000)]
    _write(tmp_path / "a", pa.table({"text": texts}), kind, 2000)
    blocks = list(_source(kind, tmp_path / "a").blocks())
    sizes = [len(pickle.dumps(block, protocol=5)) for block in blocks]
    assert len(sizes) > 10
    assert sum(sizes) < 1.1 * sum(map(len, texts))


@pytest.mark.parametrize("kind", KINDS)
def test_a_null_id_takes_its_place_and_text_that_is_not_utf8_is_a_bad_record(
    tmp_path: Path, kind: str
) -> None:
    raw = pa.array([b"good", b"b\xffd", b"good", b"good"], pa.binary())
    text = pa.Array.from_buffers(pa.string(), 4, raw.buffers())
    table = pa.table({"text": text, "key": ["x", "y", None, ""], "n": [3, 1, None, 2**62]})
    _write(tmp_path / "a", table, kind)
    for field, ids in (("key", ["x", "web/a:2", "web/a:3"]), ("n", ["3", "web/a:2", str(2**62)])):
        source = _source(kind, tmp_path / "a", id_field=field)
        assert [(r.id, r.text) for r in good(source)] == [(i, "good") for i in ids]
        assert records(source)[1] == BadRecord(1, f"{tmp_path}/a: row 1", "not UTF-8 at byte 1")
    assert good(_source(kind, tmp_path / "a", on_error="replace"))[1].text == "b\ufffdd"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"text_field": "body"}, "field is missing"),
        ({"text_field": "n"}, "field is int64, not text"),
        ({"text_field": "deep"}, "not text"),
        ({"id_field": "key"}, "field is missing"),
        ({"id_field": "half"}, "field is double, not text or whole numbers"),
    ],
)
def test_a_field_that_cannot_be_read_is_refused_before_the_first_row(
    tmp_path: Path, kind: str, options: dict[str, str], says: str
) -> None:
    table = pa.table({"text": ["a"], "n": [1], "half": [0.5], "deep": [{"text": "a"}]})
    _write(tmp_path / "a", table, kind)
    with refused("E-SOURCE-FIELD", f"{tmp_path}/a.*{says}"):
        _source(kind, tmp_path / "a", **options).check()


@pytest.mark.parametrize("kind", KINDS)
def test_a_cell_past_the_limit_is_refused_by_row(tmp_path: Path, kind: str) -> None:
    _write(tmp_path / "a", pa.table({"text": ["a", "b", "c" * 3 * 2**20, "d"]}), kind)
    with refused("E-SOURCE-RECORD", "row 2: a record is longer"):
        records(_source(kind, tmp_path / "a", max_record_bytes=2 * 2**20))
    assert len(records(_source(kind, tmp_path / "a", max_record_bytes=4 * 2**20))) == 4
    _write(tmp_path / "a", pa.table({"text": ["a" * 3 * 2**19] * 3}), kind)
    assert len(records(_source(kind, tmp_path / "a", max_record_bytes=2 * 2**20))) == 3


def test_a_flipped_byte_of_a_page_is_refused_where_the_page_has_a_checksum(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(
        pa.table({"text": ["a text to be flipped"]}),
        path,
        write_page_checksum=True,
        compression="none",
        use_dictionary=False,
        write_statistics=False,
        store_schema=False,
    )
    payload = path.read_bytes()
    assert payload.count(b"to be flipped") == 1
    path.write_bytes(payload.replace(b"to be flipped", b"to be skipped"))
    with refused("E-SOURCE-TORN", str(path)):
        records(_source("parquet", path))


def test_a_row_group_without_rows_is_passed_over(tmp_path: Path) -> None:
    table = pa.table({"text": ["a", "b"]})
    with pq.ParquetWriter(tmp_path / "a", table.schema) as writer:
        for part in (table[:1], table[:0], table[1:]):
            writer.write_table(part)
    assert pq.ParquetFile(tmp_path / "a").num_row_groups == 3
    assert [record.text for record in good(_source("parquet", tmp_path / "a"))] == ["a", "b"]


@settings(max_examples=30)
@given(
    kind=st.sampled_from(KINDS),
    lengths=st.lists(st.integers(0, 300), max_size=60),
    rows=st.integers(1, 20),
    block_bytes=st.sampled_from([1, 200, 10_000]),
)
def test_reading_resumes_at_the_end_of_any_block(
    tmp_path_factory: pytest.TempPathFactory,
    kind: str,
    lengths: list[int],
    rows: int,
    block_bytes: int,
) -> None:
    directory = tmp_path_factory.mktemp("arrow")
    texts = ["x" * n for n in lengths]
    for name in "ab":
        _write(directory / name, pa.table({"text": pa.array(texts, pa.string())}), kind, rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nmoe_core.sources.forms.columns.BLOCK_BYTES", block_bytes)
        patch.setattr("nmoe_core.sources.forms.arrow.BLOCK_BYTES", block_bytes)
        source = _source(kind, directory / "a", directory / "b")
        whole = spans(source)
        for i in range(0, len(whole), 5):
            assert spans(source, whole[i][1]) == whole[i + 1 :]
    assert [r.text for _, _, rs in whole for r in rs if isinstance(r, Record)] == texts * 2
    assert [start for start, _, _ in whole[1:]] == [
        end if end.file == start.file else start for (_, end, _), (start, _, _) in pairwise(whole)
    ]
    assert all(end.row - start.row == len(records) for start, end, records in whole)


def test_a_resumed_run_reads_no_row_group_before_its_start(tmp_path: Path) -> None:
    texts = [f"{i} " + "word " * 2000 for i in range(400)]
    _write(tmp_path / "a", pa.table({"text": texts}), "parquet", rows=20)
    source = _source("parquet", tmp_path / "a")
    starts = [block.start for block in source.blocks()]
    late = next(start for start in starts if start.offset >= 18)
    payload = bytearray((tmp_path / "a").read_bytes())
    payload[100:20_000] = bytes(19_900)  # the first row groups are no longer readable
    (tmp_path / "a").write_bytes(payload)
    assert [record.row for record in records(source, late)] == list(range(late.row, 400))
    with pytest.raises(SourceError):
        list(source.blocks())


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_stay_small_however_large_a_row_group_is(tmp_path: Path, kind: str) -> None:
    texts = [f"{i} " + "word " * (i % 997) for i in range(20_000)]
    _write(tmp_path / "a", pa.table({"text": texts}), kind, rows=20_000)
    sizes = [block.columns.nbytes for block in _source(kind, tmp_path / "a").blocks()]
    assert max(sizes) <= 2 * 2**20 + 8
    assert sum(sizes) / len(sizes) > 2**19


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cut", [0, 1, 7, 100, 0.3, 0.9, 0.999])
def test_a_file_cut_short_is_one_error_that_names_it(tmp_path: Path, kind: str, cut: float) -> None:
    _write(tmp_path / "a", pa.table({"text": [f"text {i}" * 9 for i in range(200)]}), kind)
    payload = (tmp_path / "a").read_bytes()
    num_bytes = cut if isinstance(cut, int) else int(len(payload) * cut)
    (tmp_path / "a").write_bytes(payload[:num_bytes])
    with refused("E-SOURCE-TORN", f"{tmp_path}/a"):
        _records(_source(kind, tmp_path / "a"))


def test_a_stream_cut_between_two_batches_is_not_taken_for_a_shorter_one(tmp_path: Path) -> None:
    batch = pa.record_batch({"text": ["a"] * 7})
    with open(tmp_path / "a", "wb") as file, pa.ipc.new_stream(file, batch.schema) as writer:
        writer.write_batch(batch)
        writer.write_batch(batch)
        after_two = file.tell()
        writer.write_batch(batch)
    os.truncate(tmp_path / "a", after_two)
    assert pa.ipc.open_stream((tmp_path / "a").read_bytes()).read_all().num_rows == 14
    with pytest.raises(SourceError, match="no end marker"):
        _records(_source("stream", tmp_path / "a"))


_MANY = pytest.param(range(150, 6000), 1000, marks=pytest.mark.slow)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("seeds", "least"), [(range(150), 30), _MANY])
def test_damaged_files_give_records_or_one_error(
    tmp_path: Path, kind: str, seeds: range, least: int
) -> None:
    texts = [f"text {i} " + "x" * (i % 50) for i in range(60)]
    _write(tmp_path / "whole", pa.table({"text": texts, "key": texts}), kind, rows=16)
    payload, num_refused = (tmp_path / "whole").read_bytes(), 0
    for seed in seeds:
        (tmp_path / "a").write_bytes(Mutations(seed).any_bytes(payload))
        try:
            _records(_source(kind, tmp_path / "a", id_field="key"))
        except SourceError as error:
            num_refused += str(tmp_path / "a") in str(error)
    assert num_refused > least


_LONG = random.Random(5).randbytes(2**14).hex()
"""32 KiB that do not compress, so that they are about all of a file."""


_POOLS: list[Any] = []  # a pool must outlive its buffers


def _naming(of: str, count: int) -> Any:
    """A column of which many rows name one long value that is stored once."""
    values = pa.array([_LONG, "short"])
    if of == "view":
        view = values.cast(pa.string_view()).buffers()
        rows = np.tile(np.frombuffer(view[1], np.uint8)[:16], count)
        return pa.Array.from_buffers(pa.string_view(), count, [None, pa.py_buffer(rows), view[2]])
    if of == "text":  # the format finds out
        return pa.array([_LONG] * count)
    values = values if of == "words" else values[:1]
    places = pa.array([0, None, *([0] * (count - 2))], pa.int32())
    return pa.DictionaryArray.from_arrays(places, values)


@pytest.mark.parametrize("field", ["text", "kept", "deep.text"])
@pytest.mark.parametrize(
    ("kind", "of"),
    [
        *((kind, of) for kind in KINDS for of in ("words", "word")),
        *(("file", "view"), ("stream", "view"), ("parquet", "text")),
    ],
)
def test_rows_that_name_one_long_value_take_the_memory_of_a_few(
    tmp_path: Path, kind: str, of: str, field: str
) -> None:
    if (field, of) == ("kept", "view"):
        pytest.skip("passthrough columns keep their type")
    naming, count = _naming(of, 4000), 4000
    columns = {"text": ["a"] * count, "kept": naming}
    if field != "kept":
        columns = {"text": naming, "deep": pa.StructArray.from_arrays([naming], ["text"])}
    table = pa.table(columns).select(["text", "kept"] if field == "kept" else [field[:4]])
    if kind == "parquet" and of == "text":
        encodings = {"use_dictionary": False, "column_encoding": "DELTA_BYTE_ARRAY"}
        pq.write_table(table, tmp_path / "a", **encodings)
    else:
        _write(tmp_path / "a", table, kind, count)
    options = {"kept": ("kept",)} if field == "kept" else {"text_field": field}
    pool, before = pa.proxy_memory_pool(pa.system_memory_pool()), pa.default_memory_pool()
    _POOLS.append(pool)
    pa.set_memory_pool(pool)
    try:
        source, found = _source(kind, tmp_path / "a", max_record_bytes=2**22, **options), []
        with refused("E-SOURCE-RECORD", "row [0-9]+: decoded rows are more than 1000 times"):
            for block in source.blocks():
                found += [record.row for record in block.records()]
    finally:
        pa.set_memory_pool(before)
    assert pool.max_memory() < 48 * 2**20
    assert len(found) > 1000


@pytest.mark.parametrize("kind", KINDS)
def test_samples_of_a_file_are_few_if_its_texts_share_a_long_value(
    tmp_path: Path, kind: str
) -> None:
    for value, count in (("a" * 2**22, 3), ("short", 50)):
        naming = pa.DictionaryArray.from_arrays(pa.array([0] * 60, pa.int32()), pa.array([value]))
        _write(tmp_path / "a", pa.table({"n": range(60), "text": naming}), kind, 60)
        found = list(_source(kind, tmp_path / "a").samples())
        assert 1 <= len(found) <= count
        assert found[0] == {"n": None, "text": value}
    assert len(found) == 50


def test_many_short_values_of_one_dictionary_are_no_fault(tmp_path: Path) -> None:
    texts = [f"{i % 7} short" for i in range(30_000)]
    table = pa.table({"text": pa.array(texts).dictionary_encode()})
    for kind in KINDS:
        _write(tmp_path / "a", table, kind, len(texts))
        source = _source(kind, tmp_path / "a", max_record_bytes=2**22)
        assert [record.text for record in good(source)] == texts
        assert len(list(source.blocks())) < 20


def test_a_passthrough_column_may_be_a_list_a_struct_or_missing(tmp_path: Path) -> None:
    columns = {"text": ["a", "b"], "tags": [["x", "y"], None], "deep": [{"n": 1}, None]}
    pq.write_table(pa.table(columns), tmp_path / "a", row_group_size=1)
    source = _source("parquet", tmp_path / "a", kept=("tags", "deep", "none"))
    found = [block.columns.to_pydict() for block in source.blocks()]
    assert [one["tags"] for one in found] == [[["x", "y"]], [None]]
    assert [one["deep"] for one in found] == [[{"n": 1}], [None]]
