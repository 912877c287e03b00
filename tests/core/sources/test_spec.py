"""Source tables: splits mean what they mean to `datasets`; a key of another kind is refused."""

import math
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nmoe_core.base.errors import ConfigError
from nmoe_core.base.strict import validate
from nmoe_core.sources.records import Rows
from nmoe_core.sources.spec import SourceSpec, parse_split

_BOUNDS = st.none() | st.integers(-1500, 1500)
_PERCENTS = st.none() | st.integers(-100, 100)


def _text(bound: int | None, unit: str) -> str:
    return "" if bound is None else f"{bound}{unit}"


def _library_rows(expression: str, num_rows: int) -> tuple[int, int]:
    datasets = pytest.importorskip("datasets")
    (absolute,) = datasets.ReadInstruction.from_spec(expression).to_absolute({"train": num_rows})
    start = absolute.from_ or 0
    return start, max(start, num_rows if absolute.to is None else absolute.to)


@given(_BOUNDS, _BOUNDS, st.integers(0, 1200))
def test_row_bounds_equal_those_of_the_library(
    start: int | None, stop: int | None, num_rows: int
) -> None:
    expression = f"train[{_text(start, '')}:{_text(stop, '')}]"
    assert parse_split(expression).rows(num_rows) == _library_rows(expression, num_rows)


@given(_PERCENTS, _PERCENTS, st.integers(0, 10**7))
def test_percentages_round_as_the_library_rounds_them(
    start: int | None, stop: int | None, num_rows: int
) -> None:
    expression = f"train[{_text(start, '%')}:{_text(stop, '%')}]"
    assert parse_split(expression).rows(num_rows) == _library_rows(expression, num_rows)


@given(st.integers(0, 100), st.integers(100, 10**9))
def test_neighbouring_percentages_neither_overlap_nor_leave_a_row_out(
    percent: int, num_rows: int
) -> None:
    head = parse_split(f"train[:{percent}%]").rows(num_rows)
    tail = parse_split(f"train[{percent}%:]").rows(num_rows)
    assert (head[0], head[1], tail[1]) == (0, tail[0], num_rows)


@pytest.mark.parametrize(
    ("says", "expressions"),
    [
        ("not a split", ["", "train[:1%", "train[1]", "train[::2]", "train[:1.5%]", "[1:2]"]),
        ("not a split", ["train [1:2]", "train[:1%]\n", "train[1__0:]", "train[:1_]"]),
        ("not a split", ["train(closest)", f"train[{10**18}:]"]),
        ("make one source per split", ["train+test", "train[:10]+train[20:]"]),
        ("the other a percentage", ["train[10:20%]"]),
        ("percentage is out of range", ["train[:101%]", "train[-101%:]"]),
    ],
)
def test_text_that_is_no_split_is_refused(says: str, expressions: list[str]) -> None:
    for expression in expressions:
        with pytest.raises(ConfigError, match=says):
            parse_split(expression)


@given(st.text(alphabet="train[]:%-_()0123456789 +a", max_size=24))
def test_any_text_is_a_split_or_one_clear_error(text: str) -> None:
    with suppress(ConfigError):
        start, stop = parse_split(text).rows(1000)
        assert 0 <= start <= stop <= 1000


_ROW = st.integers(0, 30)


@given(_ROW, st.none() | _ROW, st.none() | st.tuples(_ROW, _ROW).map(sorted).map(tuple), _ROW)
def test_the_rows_of_a_split_are_counted_as_they_are_read(
    start: int, stop: int | None, excluded: tuple[int, int] | None, num_rows: int
) -> None:
    rows = Rows(start, stop, excluded)
    assert rows.count(num_rows) == sum(row in rows for row in range(num_rows))
    block = range(num_rows, num_rows + 3)
    assert rows.overlaps(block.start, block.stop) == any(row in rows for row in block)
    assert not rows.overlaps(num_rows, num_rows)


HUB = {"id": "web", "hf_dataset": "org/name"}
JSONL = {"id": "web", "kind": "jsonl", "paths": ("a.jsonl",)}


@pytest.mark.parametrize(
    ("table", "key", "value", "message"),
    [
        (JSONL, "hf_valid_split", "train[:1%]", "of kind jsonl takes valid_split, not hf_valid_"),
        (JSONL, "hf_split", "train", "of kind jsonl takes split, not hf_split"),
        (JSONL, "hf_subset", "small", "of kind jsonl does not take hf_subset"),
        (JSONL | {"kind": "files"}, "hf_dataset", "a/b", "of kind files takes paths, not hf_"),
        (HUB, "valid_split", "train[:1%]", "of kind huggingface takes hf_valid_split, not valid_"),
        (HUB, "paths", ("a",), "takes hf_dataset and hf_data_files, not paths"),
        (HUB, "sample_mb", 1.0, "of kind huggingface does not take sample_mb"),
        (HUB, "sample_seed", 42, "of kind huggingface does not take sample_seed"),
        (HUB, "exclude", (), "of kind huggingface does not take exclude"),
    ],
)
def test_a_key_of_another_kind_is_refused(
    table: dict[str, Any], key: str, value: object, message: str
) -> None:
    with pytest.raises(ConfigError, match="source 'web'") as caught:
        validate(SourceSpec, table | {key: value}, "mixture")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("key", "values"),
    [("id", ["a-b", "a.b", "", "web\n"]), ("text_field", [""]), ("sample_mb", [1e10, math.inf])],
)
def test_a_value_out_of_range_is_refused(key: str, values: list[object]) -> None:
    for value in values:
        with pytest.raises(ConfigError, match=key):
            validate(SourceSpec, JSONL | {key: value}, "mixture")


def test_data_files_are_one_name_or_several() -> None:
    for names in ("a.parquet", ("a.parquet", "b.parquet")):
        assert validate(SourceSpec, HUB | {"hf_data_files": names}, "m").hf_data_files == names


def test_the_limit_of_a_record_does_not_make_finished_shards_another_reading() -> None:
    tables = (JSONL, JSONL | {"max_record_mb": 5}, JSONL | {"text_field": "body"})
    one, same, other = (validate(SourceSpec, t, "test").reading_digest("train") for t in tables)
    assert one == same != other
