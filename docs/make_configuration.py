"""The page configuration.md of the site: every key of a run's configuration, from the schema.

`make docs` puts it into the site; `python docs/make_configuration.py` prints it.
"""

from __future__ import annotations

import inspect
import json
import re
import textwrap
from collections.abc import Iterator
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel

from nmoe_core.base.strict import nested_model, nested_models
from nmoe_core.config.run import RunConfig
from nmoe_core.config.schema import OTHER, Key, keys_of, run_keys
from nmoe_core.config.tables import IS_LOCAL

HEAD = """# Configuration

Every key of a run's TOML: its default, its values in brackets, and its effect. A key without a
default is not set unless a file sets it. `--set prep.workers=8` sets `workers` of `[prep]` for one
command. [Formats](formats.md#run-toml) has the tables of sources, mixtures and flows.

## Top level

Keys of the loader, which may also be in a table `[data]`. Commands have defaults for
`seq_len`, `batch_size` and `tokenizer`. A trainer's loader needs the first two, and takes the
tokenizer from the manifests.

"""
# As docstrings begin.
_TABLE = re.compile(r"`(\[.+?\](?: of kind \w+)?)`: (.+?\.)(?:\s|$)", re.DOTALL)
_NAMES = {str: "string", int: "integer", float: "number", bool: "boolean", Any: ""}


def page() -> str:
    """The page's Markdown."""
    keys = list(run_keys().values())
    sections = {"": HEAD + _entries(key for key in keys if "." not in key.name)}
    for table, model in _tables(RunConfig):
        found = _TABLE.match(inspect.getdoc(model) or "")
        assert found, f"the docstring of {model.__name__} does not begin with its table"
        first = textwrap.fill(found[2][0].upper() + found[2][1:], 112)
        is_list = found[1].startswith("[[")
        own = keys_of(model, f"{table}.") if is_list else keys
        in_heading = f"{table}.kind" if is_list else None
        named = [key for key in own if key.name != in_heading]
        entries = _entries(key for key in named if key.name.rpartition(".")[0] == table)
        sections[found[1]] = f"\n## {found[1]}\n\n{first}\n" + f"\n{entries}" * bool(entries)
    return "".join(sections.values())


def _tables(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    for name, field in model.model_fields.items():
        inner = nested_model(field.annotation)
        if get_origin(field.annotation) is tuple:
            yield from ((prefix + name, kind) for kind in nested_models(field.annotation))
        elif inner and get_origin(field.annotation) is not dict:
            yield prefix + name, inner
            yield from _tables(inner, f"{prefix}{name}.")
            if (other := getattr(inner, "others", None)) is not None:
                yield f"{prefix}{name}.{OTHER}", other


def _entries(keys: Iterator[Key]) -> str:
    lines = []
    for key in keys:
        entry, values = key.name.rpartition(".")[2], _kind(key.annotation)
        values = "path" if key.is_path and values == "string" else values
        if isinstance(key.default, str | int | float | tuple | dict):
            entry += f" = {json.dumps(key.default)}"
        elif key.default is not None:
            values += ", must be set"
        entry = f"* `{entry}`" + f" ({values})" * bool(values) + f": {key.help}"
        lines.append(textwrap.fill(entry, 112, subsequent_indent="  ", break_on_hyphens=False))
    return "".join(f"{line}\n" for line in lines)


def _kind(annotation: Any) -> str:
    """The values of a type, in words."""
    parts = [part for part in get_args(annotation) if part not in (NoneType, Ellipsis)]
    origin = get_origin(annotation)
    if origin is Literal:
        return ", ".join(f"`{part}`" for part in parts)
    if origin is Annotated:
        return "path" if IS_LOCAL in parts else _kind(parts[0])
    if origin is tuple:
        kinds = ", ".join(dict.fromkeys(map(_kind, parts)))
        return f"list of {kinds or 'table'}{'s' * (kinds or 'table').isalpha()}"
    if origin is dict:
        return f"table, by name: {_kind(parts[1])}".removesuffix(", by name: ")
    return " or ".join(map(_kind, parts)) if parts else _NAMES.get(annotation, "")


if __name__ == "__main__":
    print(page(), end="")
