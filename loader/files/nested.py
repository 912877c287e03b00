"""JSON and TOML whose lists and tables lie in one another, up to a depth that is counted here.

How deep the parsers of Python go differs by its release and by what calls them; and what they
return may be too deep for what reads it next.
"""

import json
import tomllib
from collections.abc import Callable
from typing import Any

MAX_DEPTH = 200  # a parser takes three of Python's 1,000 calls for a level, at most


def json_value(text: str | bytes, max_depth: int = MAX_DEPTH, **hooks: Any) -> Any:
    """The value of a JSON text; `hooks` are those of `json.loads`. Raises ValueError: it is not
    JSON, or nested too deep."""
    return _parsed(lambda: json.loads(text, **hooks), max_depth)


def toml_table(text: str) -> dict[str, Any]:
    """The table of a TOML text. Raises ValueError: it is not TOML, or nested too deep."""
    return _parsed(lambda: tomllib.loads(text), MAX_DEPTH)


def check_depth(value: Any, max_depth: int = MAX_DEPTH) -> None:
    """Raises ValueError: there are more levels of lists and dicts. No value may hold itself."""
    level = [value]
    for _ in range(max_depth + 1):
        level = [one for one in level if isinstance(one, dict | list)]
        if not level:
            return
        inner = (one.values() if isinstance(one, dict) else one for one in level)
        level = [item for items in inner for item in items]
    raise ValueError(f"nested deeper than {max_depth} levels")


def _parsed(parse: Callable[[], Any], max_depth: int) -> Any:
    try:
        value = parse()
    except RecursionError:  # before the depth could be counted
        raise ValueError(f"nested deeper than {max_depth} levels") from None
    check_depth(value, max_depth)
    return value
