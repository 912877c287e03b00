"""A run's settings in any form: a mapping, an object's attributes, a TOML or YAML file.

Of a mapping or a file each key must be one of the loader's, or a table, which is another task's or
the trainer's own; `data` is the loader's. An object has attributes for many purposes: only those
with the loader's names are read, and others are not looked at. None and "" count as not set. Which
keys there are: `loader.plan.settings.RunSettings`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from loader.errors import ConfigError
from loader.plan import tables
from loader.plan.settings import KEYS, RunSettings, checked, from_base

# A trainer's flat settings of its loss and its evaluation, which the loader does not read.
_TRAINER_KEYS, _TRAINER_PREFIX = ("loss_mask_eos",), "validation_"
# Other loaders' names of keys.
_ALIASES = {"pack_sequences": "packing"}
# A table is a slip of one of ours above the likeness of one slip in a short name.
_SLIP = 0.85


def read_config(path: str | Path) -> dict[str, Any]:
    """The loader's own keys of a run's TOML or YAML file; paths are made absolute.

    Relative paths start from the nearest directory above that holds `workspace.yaml`,
    `pyproject.toml` or `.git`, else from the directory of the file.

    Raises:
        ConfigError: The file is missing or not valid, or a key is unknown.
    """
    path = Path(path)
    is_yaml = path.suffix in (".yaml", ".yml")
    table = tables.read_yaml(path) if is_yaml else tables.read_toml(path)
    return from_base(of_mapping(table, path), tables.project_dir(path), path)


def settings_of_table(table: Mapping[str, Any], where: Path, base: Path) -> RunSettings:
    """Settings from the flat keys and the `data` table of a file that is read already.

    Args:
        table: What the file says, without tables of others.
        where: The file.
        base: Directory that relative paths start from.

    Raises:
        ConfigError: A key is unknown; a value is missing, of another type or out of range.
    """
    return checked(from_base(of_mapping(table, where), base, where), str(where))


def of_mapping(table: Mapping[str, Any], where: object) -> dict[str, Any]:
    """The loader's keys of a mapping and of its `data` table, whose keys come first; and `base`,
    which `read_config` sets.

    Raises:
        ConfigError: A key is unknown; names the nearest one.
    """
    inner = table.get("data")
    if not isinstance(inner, Mapping | None):
        raise ConfigError("not a table", where=f"{where}: data", found=type(inner).__name__)
    for key, value in table.items():
        if key in KEYS or key in ("data", "base") or is_trainers(key):
            continue
        if not _is_table(value) or _is_slip(key, table):
            raise _unknown(key, where, "; put keys of the trainer into a table of their own")
    return _chosen(table, ("base", *KEYS)) | _of_data(inner or {}, where)


def of_object(cfg: object, where: object) -> dict[str, Any]:
    """The same of an object's attributes; a `data` that is a mapping is read as a table is."""
    inner = getattr(cfg, "data", None)
    own = _of_data(inner, where) if isinstance(inner, Mapping) else _chosen(_attributes(inner))
    return _chosen(_attributes(cfg)) | own


def _of_data(table: Mapping[str, Any], where: object) -> dict[str, Any]:
    for key in table:
        if key not in KEYS:
            raise _unknown(key, f"{where}: data", "")
    return _chosen(table)


def _attributes(cfg: object) -> dict[str, Any]:
    return {key: getattr(cfg, key, None) for key in KEYS}


def _chosen(table: Mapping[str, Any], keys: Iterable[str] = KEYS) -> dict[str, Any]:
    return {key: table[key] for key in keys if table.get(key) is not None and table[key] != ""}


def is_trainers(key: str) -> bool:
    """Whether a flat key is a trainer's own, which no loader reads."""
    return key in _TRAINER_KEYS or str(key).startswith(_TRAINER_PREFIX)


def _is_table(value: Any) -> bool:
    """Whether a value is a table or a list of tables, as TOML has them."""
    if isinstance(value, list | tuple):
        return bool(value) and all(isinstance(row, Mapping) for row in value)
    return isinstance(value, Mapping)


def _is_slip(key: str, table: Mapping[str, Any]) -> bool:
    missing = [known for known in (*KEYS, "data") if known not in table]
    return bool(difflib.get_close_matches(str(key), missing, 1, _SLIP))


def _unknown(key: object, where: object, do: str) -> ConfigError:
    hint = _ALIASES.get(str(key)) or tables.nearest(str(key), (*KEYS, "data"))
    return ConfigError(
        "unknown key", where=where, found=repr(key), do=f"did you mean {hint!r}?{do}"
    )
