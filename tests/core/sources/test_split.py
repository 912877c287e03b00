"""Split expressions mean what they mean to the `datasets` library, or are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nmoe_core.base.errors import ConfigError
from nmoe_core.sources.split import parse_split

datasets = pytest.importorskip("datasets")
_BOUNDS = st.none() | st.integers(-1500, 1500)
_PERCENTS = st.none() | st.integers(-100, 100)


def _text(bound: int | None, unit: str) -> str:
    return "" if bound is None else f"{bound}{unit}"


def _library_rows(expression: str, num_rows: int) -> tuple[int, int]:
    instruction = datasets.ReadInstruction.from_spec(expression)
    (absolute,) = instruction.to_absolute({"train": num_rows})
    start = absolute.from_ or 0
    return start, max(start, num_rows if absolute.to is None else absolute.to)


@given(_BOUNDS, _BOUNDS, st.integers(0, 1200))
def test_row_bounds_equal_those_of_the_library(
    start: int | None, stop: int | None, num_rows: int
) -> None:
    expression = f"train[{_text(start, '')}:{_text(stop, '')}]"
    assert parse_split(expression).rows(num_rows) == _library_rows(expression, num_rows)


@given(
    _PERCENTS,
    _PERCENTS,
    st.integers(0, 10**7),
    st.sampled_from(["", "(closest)", "(pct1_dropremainder)"]),
)
def test_percentages_round_as_the_library_rounds_them(
    start: int | None, stop: int | None, num_rows: int, rounding: str
) -> None:
    expression = f"train[{_text(start, '%')}:{_text(stop, '%')}]"
    if start is not None or stop is not None:
        expression += rounding
        if "drop" in rounding and num_rows < 100:
            with pytest.raises(ConfigError, match="at least 100 rows"):
                parse_split(expression).rows(num_rows)
            return
    assert parse_split(expression).rows(num_rows) == _library_rows(expression, num_rows)


@given(st.integers(0, 100), st.integers(100, 10**9))
def test_neighbouring_percentages_neither_overlap_nor_leave_a_row_out(
    percent: int, num_rows: int
) -> None:
    head = parse_split(f"train[:{percent}%]").rows(num_rows)
    tail = parse_split(f"train[{percent}%:]").rows(num_rows)
    assert (head[0], head[1], tail[1]) == (0, tail[0], num_rows)


@pytest.mark.parametrize(
    ("expression", "says"),
    [
        ("train[:1%", "not a split"),
        ("train[1]", "not a split"),
        ("train[::2]", "not a split"),
        ("train[:1.5%]", "not a split"),
        ("", "not a split"),
        ("[1:2]", "not a split"),
        ("train [1:2]", "not a split"),
        ("train[:1%]\n", "not a split"),
        ("train+test", "make a source of each split"),
        ("train[:10]+train[20:]", "make a source of each split"),
        ("train[10:20%]", "the other a percentage"),
        ("train[:101%]", "percentage is out of range"),
        ("train[-101%:]", "percentage is out of range"),
        ("train[1__0:]", "not a number of rows"),
        ("train[10:20](closest)", "a rounding needs percentages"),
        ("train(closest)", "a rounding needs percentages"),
        ("train[:1%](up)", "no such rounding"),
    ],
)
def test_text_that_is_no_split_is_refused(expression: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_split(expression)
    assert says in str(caught.value)


@given(st.text(alphabet="train[]:%-_()0123456789 +a", max_size=24))
def test_any_text_is_a_split_or_one_clear_error(text: str) -> None:
    try:
        start, stop = parse_split(text).rows(1000)
    except ConfigError:
        return
    assert 0 <= start <= stop <= 1000
