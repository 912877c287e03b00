"""The keys of the run configuration, as flags and `--set key=value` name them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError

from nmoe_core.base.errors import ConfigError
from nmoe_core.base.strict import nested_model
from nmoe_core.config.run import RunConfig
from nmoe_core.config.tables import IS_LOCAL


@dataclass(frozen=True, slots=True)
class Key:
    """One key: its type, its value where nothing sets it, and its help text."""

    name: str
    annotation: Any
    default: Any
    help: str
    is_path: bool

    @property
    def is_list(self) -> bool:
        """Whether it holds several values."""
        return get_origin(self.annotation) is tuple

    @property
    def choices(self) -> tuple[Any, ...]:
        """The values that it may have, where they are few."""
        return get_args(self.annotation) if get_origin(self.annotation) is Literal else ()

    def typed(self, text: str) -> Any:
        """The value that a text stands for; commas separate the values of a list.

        Raises:
            ConfigError: It stands for no value of this key.
        """
        if self.is_path:  # whether it can be one, the run says with its own error
            return text
        of_one = TypeAdapter(get_args(self.annotation)[0] if self.is_list else self.annotation)
        try:
            if self.is_list:
                return tuple(map(of_one.validate_strings, text.split(",")))
            return of_one.validate_strings(text)
        except ValidationError as error:
            what = f"{self.name}: {error.errors()[0]['msg']}"
        raise ConfigError(what, where="command line", found=repr(text))


@functools.cache
def run_keys() -> dict[str, Key]:
    """Every key of the run configuration by its dotted name."""
    return {key.name: key for key in _keys(RunConfig, "")}


def setting(text: str) -> tuple[str, Any]:
    """The key and the value of `key=value`.

    Raises:
        ConfigError: It has no `=`, or the key cannot have this value. A key that is unknown is
            refused by the run.
    """
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError("not key=value", where="--set", found=repr(text))
    keys = run_keys()
    if name in keys:
        return name, keys[name].typed(value)
    table = keys.get(name.rpartition(".")[0])  # an entry of a table with free names
    if table is None or get_origin(table.annotation) is not dict:
        return name, value
    return name, Key(name, get_args(table.annotation)[1], None, "", False).typed(value)


def _keys(model: type[BaseModel], prefix: str) -> Iterator[Key]:
    for name, field in model.model_fields.items():
        inner = nested_model(field.annotation)
        if inner is not None:
            yield from _keys(inner, f"{prefix}{name}.")
            continue
        parts = get_args(field.annotation)
        marks = [mark for part in parts for mark in getattr(part, "__metadata__", ())]
        is_path = IS_LOCAL in (*marks, *field.metadata)
        default = field.get_default(call_default_factory=True)
        yield Key(prefix + name, field.annotation, default, field.description or "", is_path)
