"""Parses JSON and TOML with a limit on the depth of lists and tables.

Python's recursion limit is not enough: it depends on the release and on the caller, and a value
within it may still be too deep for later code.
"""

import json
import re
import tomllib
from typing import Any

MAX_DEPTH = 200  # a parser uses at most four of Python's 1,000 nested calls per level
# A string without a closing quote matches to the end of the text, where the parser refuses it: a
# new search from each quote would take quadratic time.
_TEXTS = re.compile(r'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_TOML_TEXTS = re.compile(
    r'"""(?:[^\\]|\\.)*?"{3,5}|' + r"'''.*?'{3,5}|" + _TEXTS.pattern + r"|'[^'\n]*+'|#[^\n]*+",
    re.DOTALL,
)
_KEYS = re.compile(r"[\w. \t-]+")
_TOO_DEEP = "nested deeper than {} levels"


def json_value(text: str | bytes, max_depth: int = MAX_DEPTH, **hooks: Any) -> Any:
    """The value of a JSON text; `hooks` are arguments of `json.loads`. Raises ValueError if the
    text is not JSON or nested too deep."""
    if isinstance(text, bytes):
        text = text.decode(json.detect_encoding(text), "surrogatepass")
    _check_brackets(text, _TEXTS, max_depth)
    return json.loads(text, **hooks)


def toml_table(text: str) -> dict[str, Any]:
    """The table of a TOML text. Raises ValueError if the text is not TOML or nested too deep."""
    _check_brackets(text, _TOML_TEXTS, MAX_DEPTH)
    if text.count(".") > MAX_DEPTH:  # `tomllib` takes quadratic time for a key of many dots
        for key in _KEYS.findall(_TOML_TEXTS.sub("", text)):
            if key.count(".") > MAX_DEPTH:
                raise ValueError(_TOO_DEEP.format(MAX_DEPTH))
    table = tomllib.loads(text)
    level: list[Any] = [table]
    for _ in range(MAX_DEPTH):  # dotted keys nest without brackets
        below = []
        for value in level:
            items = value.values() if isinstance(value, dict) else value
            below += [item for item in items if isinstance(item, dict | list)]
        level = below
    if level:
        raise ValueError(_TOO_DEEP.format(MAX_DEPTH))
    return table


def _check_brackets(text: str, texts: re.Pattern[str], max_depth: int) -> None:
    depth = 0
    if text.count("[") + text.count("{") > max_depth:
        for bracket in re.findall(r"[\[\]{}]", texts.sub("", text)):
            depth += 1 if bracket in "[{" else -1
            if depth > max_depth:
                raise ValueError(_TOO_DEEP.format(max_depth))
