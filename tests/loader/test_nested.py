"""How deep JSON and TOML may be nested is counted, and is the same for each Python and caller."""

import json
import sys

import pytest

from loader.errors import ConfigError
from loader.files.format import read_json_object
from loader.files.nested import MAX_DEPTH, json_value, toml_table
from loader.plan.tables import read_toml, read_yaml
from tests.refusals import refused


def _lists(depth: int, inner: str = "") -> str:
    return "[" * depth + inner + "]" * depth


def _tables(depth: int) -> str:
    return '{"a": ' * depth + "1" + "}" * depth


JSON = {
    "lists": _lists,
    "lists with a value": lambda depth: _lists(depth, '"a"'),
    "tables": _tables,
    "tables in lists": lambda depth: _lists(depth // 2, _tables(depth - depth // 2)),
    "the last of many": lambda depth: "[[], {}, [[2]], " + _lists(depth - 1) + "]",
}


@pytest.mark.parametrize("form", JSON)
def test_json_of_as_many_levels_is_read_and_one_of_more_is_refused(form: str) -> None:
    text = JSON[form](MAX_DEPTH)
    assert json.dumps(json_value(text)) == text
    for depth in (MAX_DEPTH + 1, 3_000, 100_000):
        with pytest.raises(ValueError, match=f"nested deeper than {MAX_DEPTH} levels"):
            json_value(JSON[form](depth))


def test_another_depth_may_be_allowed() -> None:
    assert json_value(_lists(800), 800) == json.loads(_lists(800))
    assert json_value("3", 0) == 3
    for depth in (0, 3):
        with pytest.raises(ValueError, match=f"nested deeper than {depth} levels"):
            json_value(_lists(depth + 1), depth)


@pytest.mark.parametrize("text", ["[" * 300, "]" + '\\"[' * 300, "'{'" * 300, "# [" * 300])
def test_brackets_in_texts_are_no_levels(text: str) -> None:
    value = {"a": text, "b": [text, 1]}
    assert json_value(json.dumps(value)) == json_value(json.dumps(value).encode()) == value
    assert json_value(json.dumps(value).encode("utf-16")) == value
    for quote in ('"', '"""', "'", "'''"):
        inner = text if "'" in quote else text.replace("\\", "\\\\").replace('"', '\\"')
        if quote == "'" and "'" in inner:
            continue
        assert toml_table(f"# it's {text}\na = [{quote}{inner}{quote}] # {text}") == {"a": [text]}


def test_no_parse_meets_the_limit_of_python() -> None:
    """There finalizers of others, run by the garbage collector, would fail too."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(10**6)
    try:
        for parse, text in ((json_value, _lists(10**6)), (toml_table, f"a = {_lists(10**5)}")):
            with pytest.raises(ValueError, match="nested deeper than 200 levels"):
                parse(text)
    finally:
        sys.setrecursionlimit(limit)


def test_the_file_of_a_deep_value_is_refused(tmp_path) -> None:
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps({"extra": json.loads(_lists(MAX_DEPTH - 1))}))
    assert read_json_object(path)["extra"]
    path.write_text(json.dumps({"extra": json.loads(_lists(MAX_DEPTH))}))
    with refused("E-MANIFEST-FORMAT", "nested deeper than 200 levels"):
        read_json_object(path)


TOML = {
    "lists": lambda depth: f"a = {_lists(depth - 1)}",
    "inline tables": lambda depth: "a = " + "{a = " * (depth - 1) + "1" + "}" * (depth - 1),
    "a dotted key": lambda depth: "a." * (depth - 1) + "a = 1",
    "a header": lambda depth: f"[{'a.' * (depth - 2)}a]\nb = 1",
}


@pytest.mark.parametrize("form", TOML)
def test_toml_of_as_many_levels_is_read_and_one_of_more_is_refused(form: str, tmp_path) -> None:
    assert toml_table(TOML[form](MAX_DEPTH))
    path = tmp_path / "deep.toml"
    for depth in (MAX_DEPTH + 1, 5_000):
        path.write_text(TOML[form](depth))
        with pytest.raises(ConfigError, match=r"not valid TOML.*nested deeper than 200 levels"):
            read_toml(path)


def test_a_key_of_many_dots_is_refused_before_it_is_parsed(monkeypatch) -> None:
    monkeypatch.setattr("tomllib.loads", lambda text: pytest.fail("it was parsed"))
    with pytest.raises(ValueError, match="nested deeper than 200 levels"):
        toml_table("'a'" + '. "b"' * 100_000 + " = 1")
    monkeypatch.undo()
    dots = {"a": [1.5] * 300, "b": "." * 300, "c": {"d": 0.5}}
    assert toml_table(f"a = {dots['a']} # {'.' * 300}\nb = '{'.' * 300}'\nc.d = 0.5") == dots


def test_a_deep_mapping_of_yaml_is_refused(tmp_path) -> None:
    path = tmp_path / "deep.yaml"
    path.write_text(f"a: {_lists(MAX_DEPTH - 1)}")
    assert read_yaml(path)["a"]
    path.write_text(f"a: {_lists(MAX_DEPTH)}")
    with pytest.raises(ConfigError, match=r"not valid YAML.*nested deeper than 200 levels"):
        read_yaml(path)
