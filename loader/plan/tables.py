"""Reads TOML tables with a limit on size, checks types, and refuses unknown keys.

Every error is a ConfigError that names the file, the key, the value and, for an unknown name, the
most similar known name.
"""

import difflib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from loader.errors import ConfigError
from loader.files.nested import MAX_DEPTH, toml_table
from loader.files.regular import open_file

_LARGEST = 2**62
_MAX_BYTES = 16 * 2**20
_MAX_YAML_VALUES = 100_000  # each value takes 0.7 kB during parsing
PROJECT_FILE = "nmoe.toml"  # the file with all settings of a project
_PROJECT_MARKS = (PROJECT_FILE, "workspace.yaml", "pyproject.toml", ".git")


def read_toml(path: str | Path) -> dict[str, Any]:
    """Parse a TOML file of at most 16 MiB. Raises ConfigError if it is missing (E-CONFIG-MISSING),
    or not valid TOML (E-CONFIG)."""
    content = _read(path)
    try:
        return toml_table(content.decode())
    except ValueError as error:  # ValueError is raised for a number with 5,000 digits
        raise ConfigError("not valid TOML", where=path, found=str(error)) from None


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Parse a YAML file of at most 16 MiB and 100,000 values, with the values of an alias counted
    at each use; needs the extra `yaml`. Raises ConfigError if PyYAML is not installed, the file is
    missing (E-CONFIG-MISSING), or it is not a YAML mapping (E-CONFIG)."""
    try:
        import yaml
    except ImportError:
        raise ConfigError(
            "PyYAML is not installed", where=path, do="pip install 'nmoe-loader[yaml]'"
        ) from None
    content = _read(path)
    sizes = dict[int, int]()

    class Counted(yaml.SafeLoader):
        """Counts values, since aliases of aliases may expand to more values than fit into
        memory."""

        num_values = depth = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            is_alias = self.check_event(yaml.AliasEvent)
            before = self.num_values
            if self.depth == MAX_DEPTH and self.check_event(yaml.CollectionStartEvent):
                raise yaml.YAMLError(f"nested deeper than {MAX_DEPTH} levels")
            self.depth += 1
            node = super().compose_node(parent, index)
            self.depth -= 1
            self.num_values += sizes.get(id(node), _MAX_YAML_VALUES) if is_alias else 1
            sizes[id(node)] = self.num_values - before
            if self.num_values > _MAX_YAML_VALUES:
                raise yaml.YAMLError(f"more than {_MAX_YAML_VALUES} values")
            return node

    try:
        value = yaml.load(content.decode(), Counted)
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError("not valid YAML", where=path, found=str(error)) from None
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ConfigError("not a table", where=path, found=type(value).__name__)
    return value


def _read(path: str | Path) -> bytes:
    try:
        with open_file(path) as file:
            content = file.read(_MAX_BYTES + 1)
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise ConfigError("no such file", where=path, code="E-CONFIG-MISSING") from None
    if len(content) > _MAX_BYTES:
        raise ConfigError("file is too large", where=path, expected="at most 16 MiB")
    return content


def project_dir(path: Path) -> Path:
    """The directory at which relative paths in a TOML file start: the nearest parent directory with
    `nmoe.toml`, `workspace.yaml`, `pyproject.toml` or `.git`, else the directory of the file."""
    own = path.absolute().parent
    for directory in (own, *own.parents):
        if any((directory / mark).exists() for mark in _PROJECT_MARKS):
            return directory
    return own


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most similar to `name`; None if `known` is empty."""
    matches = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.0)
    return matches[0] if matches else None


def unknown_name(kind: str, name: str, known: Collection[str], where: object) -> ConfigError:
    """The error for an unknown name, with the most similar known name and all known names."""
    hint = nearest(name, known)
    return ConfigError(
        f"unknown {kind}",
        where=where,
        found=repr(name),
        expected=f"one of {', '.join(sorted(known)) or '(there are none)'}",
        do=None if hint is None else f"did you mean {hint!r}?",
    )


def refuse_unknown(table: Mapping[str, Any], known: Collection[str], where: object) -> None:
    """Raise ConfigError for the first key of `table` that is not in `known`."""
    for key in table:
        if key not in known:
            raise unknown_name("key", key, known, where)


def number(
    value: Any, where: object, *, positive: bool = False, whole: bool = False
) -> int | float:
    """Check that a value is a number from 0 to 2^62, above 0 if `positive`, an int if `whole`.
    Raises ConfigError."""
    kinds = (int,) if whole else (int, float)
    good = isinstance(value, kinds) and not isinstance(value, bool) and value <= _LARGEST
    if not good or not value >= 0 or (positive and value == 0):
        noun = "whole number" if whole else "finite number"
        expected = f"a {noun} {'above' if positive else 'of at least'} 0"
        raise ConfigError(
            "value is out of range", where=where, found=repr(value), expected=expected
        )
    return value


def table(value: Any, where: object) -> dict[str, Any]:
    """Check that a value is a table. Raises ConfigError."""
    if not isinstance(value, dict):
        raise ConfigError("not a table", where=where, found=type(value).__name__)
    return value


def text(value: Any, where: object) -> str:
    """Check that a value is a string that is not empty. Raises ConfigError."""
    if not isinstance(value, str) or not value:
        raise ConfigError(
            "not a name", where=where, found=repr(value), expected="a string that is not empty"
        )
    return value
