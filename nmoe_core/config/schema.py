"""The keys of the run configuration, for flags and for `--set key=value`."""

import ast
import contextlib
import functools
import inspect
import itertools
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from pydantic import BaseModel, TypeAdapter, ValidationError

from loader.files.nested import toml_table
from loader.plan.settings import KEYS, RunSettings
from nmoe_core.base.errors import ConfigError
from nmoe_core.base.strict import nested_model
from nmoe_core.config.renamed import current_name
from nmoe_core.config.run import LOADER_DEFAULTS, RunConfig
from nmoe_core.config.tables import IS_LOCAL

OTHER = "NAME"
"""Stands for the names of tables that the user chooses."""
_OF_OTHER = re.compile(r"^attributes\.[^.]+\.")


@dataclass(frozen=True, slots=True)
class Key:
    """One key: its type, its default and its help text."""

    name: str
    annotation: Any
    default: Any
    help: str
    is_path: bool

    @property
    def is_list(self) -> bool:
        """Whether the key takes a list."""
        kinds = (self.annotation, *get_args(self.annotation))
        return any(get_origin(kind) is tuple for kind in kinds)

    @property
    def is_of_tables(self) -> bool:
        """Whether the key takes a list of tables."""
        return self.is_list and nested_model(self.annotation) is not None

    @property
    def choices(self) -> tuple[Any, ...]:
        """The allowed values, if the type lists them."""
        return get_args(self.annotation) if get_origin(self.annotation) is Literal else ()

    def typed(self, text: str) -> Any:
        """Parse the text of a value; a list is written as in TOML, or separated by commas. Raises
        ConfigError if the text is not a value of this key."""
        if not self.is_list:
            return self.one(text)
        with contextlib.suppress(ValueError):
            if isinstance(values := toml_table(f"value = {text}")["value"], list):
                if self.is_of_tables:
                    return tuple(values)  # the run validates the tables
                return tuple(self.one(str(value)) for value in values)
        if self.is_of_tables:
            raise ConfigError(
                f"{self.name}: not a list of tables",
                where="command line",
                found=repr(text),
                expected="[{kind = ...}]",
            )
        return tuple(map(self.one, text.split(",")))

    def one(self, text: str) -> Any:
        """Parse one value, or one item of a list. Raises as `typed`."""
        if self.annotation is Any:
            with contextlib.suppress(ValueError):  # a number with 5,000 digits raises ValueError
                return toml_table(f"value = {text}")["value"]
        if self.annotation is Any or self.is_path or self.choices:
            return text  # the run validates the value with a better message
        kind = get_args(self.annotation)[0] if self.is_list else self.annotation
        try:
            return TypeAdapter(kind).validate_strings(text)
        except ValidationError as error:
            what = f"{self.name}: {error.errors()[0]['msg']}"
        raise ConfigError(what, where="command line", found=repr(text))


@functools.cache
def run_keys() -> dict[str, Key]:
    """All keys of the run configuration, by dotted name."""
    return {key.name: key for key in (*_loader_keys(), *keys_of(RunConfig))}


def setting(text: str) -> tuple[str, Any]:
    """Parse `key=value`. Raises ConfigError if `=` is missing or the key cannot
    have this value. Accepts unknown keys, which the run refuses later."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError("not key=value", where="--set", found=repr(text))
    keys = run_keys()
    name = current_name(name)
    if name in keys:
        return name, keys[name].typed(value)
    known = _OF_OTHER.sub(f"attributes.{OTHER}.", name)
    if known in keys:
        return name, keys[known].typed(value)
    table = keys.get(known.rpartition(".")[0])  # a table whose keys the user chooses
    free = [key.name for key in keys.values() if key.annotation == dict[str, Any]]
    # tables inside a table whose keys the user chooses
    if known.startswith(tuple(f"{above}." for above in free)):
        return name, Key(name, Any, None, "", False).typed(value)
    if table is None or get_origin(table.annotation) is not dict:
        return name, value
    return name, Key(name, get_args(table.annotation)[1], None, "", False).typed(value)


def _loader_keys() -> Iterator[Key]:
    types = get_type_hints(RunSettings)
    defaults = {field.name: field.default for field in fields(RunSettings)} | LOADER_DEFAULTS
    for name, rules in KEYS.items():
        annotation = Literal[rules.choices] if rules.choices else types[name]
        if Path in rules.types:
            annotation = str
        is_path = Path in rules.types and str not in rules.types  # other path keys may also be URLs
        annotation = Any if name == "phases" else annotation
        default = defaults[name]
        for new, old in rules.in_plans.items():
            default = new if default == old else default
        yield Key(name, annotation, default, _text_below(RunSettings, name), is_path)


def keys_of(model: type[BaseModel], prefix: str = "") -> Iterator[Key]:
    """The keys of a table and of its nested tables."""
    for name, field in model.model_fields.items():
        inner = nested_model(field.annotation)
        kind = get_origin(field.annotation)
        if inner is not None and kind not in (dict, tuple):
            yield from keys_of(inner, f"{prefix}{name}.")
            continue
        # Tables whose names the user chooses.
        annotation = dict[str, Any] if inner is not None and kind is dict else field.annotation
        parts = get_args(annotation)
        marks = [mark for part in parts for mark in getattr(part, "__metadata__", ())]
        is_path = IS_LOCAL in (*marks, *field.metadata)
        default = field.get_default(call_default_factory=True)
        yield Key(prefix + name, annotation, default, _text_below(model, name), is_path)
    if (other := getattr(model, "others", None)) is not None:
        yield from keys_of(other, f"{prefix}{OTHER}.")


def _text_below(model: type, name: str) -> str:
    """The text below a field in the source of its class.

    pydantic can read these texts too, but reads them for every model when its class is created:
    each worker would spend a tenth of a second on help that only the command line shows.
    """
    owner = next(kind for kind in model.__mro__ if name in vars(kind).get("__annotations__", ()))
    return _texts_of(owner.__module__).get((owner.__name__, name), "")


@functools.cache
def _texts_of(module: str) -> dict[tuple[str, str], str]:
    """The texts below the fields of a module's classes, by class and field name."""
    found = {}
    classes = ast.parse(inspect.getsource(sys.modules[module])).body
    for node in (node for node in classes if isinstance(node, ast.ClassDef)):
        for field, text in itertools.pairwise(node.body):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
            ):
                found[node.name, field.target.id] = inspect.cleandoc(str(text.value.value))
    return found
