"""Work in proportion to bytes: no text from outside, however it is made, takes quadratic time."""

import re
from functools import partial

import pytest

from tests import growing, patterns
from tests.growth import growth

_USES, _MADE = patterns.uses()
_SMALL = 2**10
_LARGE = 2**13
_LEAST_S = 1e-3
_LINEAR = 3 * _LARGE / _SMALL  # quadratic growth would be 64
_AT_LARGE_SIZES = {"loader.tables.read_yaml"}  # of 200 levels, and slow
# Expressions that are made while they run, and what they are made of.
_IN_RUNS = {
    "nmoe_core/config/quality.py": "a pattern of the configuration, which is only compiled",
    "nmoe_core/labels/oracles/http.py": "a model's name of the configuration, and digits",
    "nmoe_core/labels/oracles/markers.py": "literals, and forms of a bounded length",
    "nmoe_core/quality/families.py": "the pattern of the configuration, over ids and column values",
    "nmoe_core/tasks/selection/outcome.py": "the name of a column",
    "nmoe_core/text/equivalence.py": "one class",
    "nmoe_core/text/transforms/lines/rules.py": "phrases, within a line; see the readers below",
    "nmoe_core/text/reference.py": "one run of blanks; see the readers below",
    "nmoe_core/text/tokenizer.py": "literals",
    "nmoe_core/text/tokenizer_files.py": "literals",
}


def test_every_expression_is_known_before_it_runs_except_those_of_literals() -> None:
    assert {place.partition(":")[0] for place in _MADE} == set(_IN_RUNS)
    assert len(_USES) > 70


def _slow(use: patterns.Use) -> list[tuple[str, str, str]]:
    """Beginnings, units and ends of the texts whose time grows by more than the text."""
    work = partial(patterns.run, use)
    slow = []
    for head, unit in patterns.units(use.pattern):
        for tail in ("", "\ufffe"):
            small, large = (head + unit * (n // len(unit)) + tail for n in (_SMALL, _LARGE))
            if growth(work, small, large, _LEAST_S) > _LINEAR:
                slow.append((head, unit, tail))
    return slow


@pytest.mark.parametrize("use", _USES, ids=lambda use: f"{use.place[:60]} {use.method}")
def test_time_of_every_expression_is_linear(use: patterns.Use) -> None:
    assert not _slow(use)


def test_a_quadratic_expression_would_be_found() -> None:
    assert _slow(patterns.Use("here", re.compile("a+@"), "search"))


def _slow_families(reader: str, factor: int) -> list[str]:
    read = growing.READERS[reader]
    read("a: b c")
    slow = []
    for name, make in growing.FAMILIES.items():
        small, large = (make(factor * size) for size in (_SMALL, _LARGE))
        if growth(read, small, large, _LEAST_S) > _LINEAR:
            slow.append(name)
    return slow


@pytest.mark.parametrize("reader", [n for n in growing.READERS if n not in _AT_LARGE_SIZES])
def test_time_of_every_reader_is_linear(reader: str) -> None:
    assert not _slow_families(reader, 1)


@pytest.mark.slow
@pytest.mark.parametrize("reader", sorted(_AT_LARGE_SIZES))
def test_time_of_readers_with_a_limit_is_linear_above_it(reader: str) -> None:
    assert not _slow_families(reader, 4)
