"""The file of an attribute: one row per document, one digest of values and types."""

import datetime
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.refusals import refused

pa = pytest.importorskip("pyarrow")
files = pytest.importorskip("nmoe_core.shards.attribute_file")

COUNT = 12


def _documents(count: int = COUNT) -> Any:
    doc_ids = [f"web//web/train/shard_0000/a.npy#s={i}:e={i + 1}" for i in range(count)]
    return files.Documents(doc_ids, [f"{i:064x}" for i in range(count)])


def _table() -> Any:
    when = datetime.datetime(2026, 1, 2)
    columns = {
        "i": pa.array([None, *range(COUNT - 1)], pa.int16()),
        "s": ["", None, "é"] * 4,
        "b": [True, False, None] * 4,
        "l": [["a", None], None, []] * 4,
        "r": [{"x": 1, "y": ["z"]}, None, {"x": None, "y": None}] * 4,
        "m": pa.array([[("k", 1)], None, []] * 4, pa.map_(pa.string(), pa.int32())),
        "f": pa.array([[1, 2], None, [3, 4]] * 4, pa.list_(pa.int8(), 2)),
        "d": pa.array([Decimal("1.50"), None, Decimal("-1.00")] * 4, pa.decimal128(9, 2)),
        "t": [when, None, when] * 4,
        "n": pa.nulls(COUNT),
    }
    return pa.table(columns)


def _write(path: Path, table: Any, rows: int = 2**16) -> str:
    batches = table.to_batches(max_chunksize=rows)
    return files.write_attribute(path, "x", {"code": "x/1"}, _documents(), table.schema, batches)


def test_a_file_reads_back_as_it_was_written_with_the_digest_of_its_rows(tmp_path: Path) -> None:
    path, table = tmp_path / "x.parquet", _table()
    digest = _write(path, table)
    footer, found = files.read_footer(path), files.read_attribute(path)
    assert (footer.name, footer.fingerprints, footer.num_rows) == ("x", {"code": "x/1"}, COUNT)
    assert footer.digest == digest == files.rows_digest(found)
    assert found.select(table.schema.names).equals(table)
    assert found.column("doc_id").to_pylist() == _documents().doc_ids
    assert [h.hex() for h in found.column("text_sha256").to_pylist()] == _documents().text_sha256


@given(rows=st.integers(1, COUNT), group=st.integers(1, COUNT))
@settings(max_examples=20, deadline=None)
def test_bytes_and_digest_do_not_depend_on_the_pieces_that_rows_come_in(
    tmp_path_factory: pytest.TempPathFactory, rows: int, group: int
) -> None:
    directory = tmp_path_factory.mktemp("files")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "ROWS", group)
        one = _write(directory / "one", _table())
        assert _write(directory / "many", _table(), rows) == one
    assert (directory / "one").read_bytes() == (directory / "many").read_bytes()


def _first_null(column: list[Any]) -> list[Any]:
    return [None, *column[1:]]


@pytest.mark.parametrize("name", ["i", "s", "b", "l", "r", "m", "f", "d", "t"])
@pytest.mark.parametrize("change", [_first_null, lambda c: [c[2], *c[1:]], lambda c: c[::-1]])
def test_another_value_gives_another_digest(
    tmp_path: Path, name: str, change: Callable[[list[Any]], list[Any]]
) -> None:
    table = _table()
    place, kind = table.schema.get_field_index(name), table.schema.field(name).type
    values = table.column(name).to_pylist()
    other = pa.array(change(values), kind)
    is_equal = other.to_pylist() == values
    changed = table.set_column(place, name, other)
    assert (_write(tmp_path / "a", table) == _write(tmp_path / "b", changed)) is is_equal


def test_another_name_or_type_gives_another_digest(tmp_path: Path) -> None:
    table = pa.table({"a": pa.array(range(COUNT), pa.int32())})
    wider, renamed = table.cast(pa.schema([("a", pa.int64())])), table.rename_columns(["b"])
    digests = [_write(tmp_path / str(i), one) for i, one in enumerate((table, wider, renamed))]
    assert len(set(digests)) == 3


@pytest.mark.parametrize("count", [0, COUNT - 1, COUNT + 1])
def test_rows_that_are_not_those_of_the_documents_are_refused_and_leave_no_file(
    tmp_path: Path, count: int
) -> None:
    table = pa.table({"a": pa.array(range(count), pa.int32())})
    with refused("E-ATTRIBUTE-ROWS", naming=[str(COUNT)]):
        _write(tmp_path / "a.parquet", table)
    assert list(tmp_path.iterdir()) == []


def test_files_that_are_missing_damaged_or_of_others_are_one_error(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    path = tmp_path / "x.parquet"
    with refused("E-ATTRIBUTE-MISSING", naming=[str(path)]):
        files.read_footer(path)
    pq.write_table(pa.table({"doc_id": ["a"]}), path)
    with refused("E-ATTRIBUTE-FORMAT", naming=[str(path)]):
        files.read_footer(path)
    _write(path, _table())
    path.write_bytes(path.read_bytes()[:-20])
    with refused("E-ATTRIBUTE-FORMAT", naming=[str(path)]):
        files.read_attribute(path)
