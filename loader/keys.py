"""The loader's keys in a run's settings: which there are, where they may stand, what is refused.

Of a mapping or a file each key must be one of the loader's, or a table, which is another stage's or
the trainer's own; `data` is the loader's. An object has attributes for many purposes: only those
with the loader's names are read, and others are not looked at.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from loader.errors import ConfigError
from loader.plan import settings

PATH_KEYS = (
    "root",
    "data_root",
    "data_path",
    "dataset_path",
    "mixture_toml",
    "flow_profiles_toml",
    "cache_dir",
)
CONFIG_KEYS = (
    *PATH_KEYS,
    "flow_mode",
    "active_params_b",
    "batch_size",
    "seq_len",
    "steps",
    "tokenizer",
    "vocab_size",
    "eos_token_id",
    "seed",
    "policy",
    "window_stride",
    "on_exhaust",
    "packing",
    "shuffle",
    "max_epochs",
    "allow_unmanifested",
    "tokenizer_path",
    "hf_dataset_name",
    "mix_temperature",
    "anneal_start_step",
    "datasets",
    "configs",
    "weights",
    "phases",
    "anneal_weights",
)
# What a trainer's flat settings say of its loss and of its evaluation; nothing here reads them.
_TRAINER_KEYS, _TRAINER_PREFIX = ("loss_mask_eos",), "validation_"
# Other loaders' names of what is a key here too.
_ALIASES = {"pack_sequences": "packing"}
# A table is a slip of one of ours above the likeness of one slip in a short name.
_SLIP = 0.85


def of_mapping(table: Mapping[str, Any], where: object) -> dict[str, Any]:
    """The loader's keys of a mapping and of its `data` table, whose keys come first; and `base`,
    which `loader.read_config` sets.

    Raises:
        ConfigError: A key is unknown; names the nearest one.
    """
    inner = table.get("data")
    if not isinstance(inner, Mapping | None):
        raise ConfigError("not a table", where=f"{where}: data", found=type(inner).__name__)
    for key, value in table.items():
        if key in (*CONFIG_KEYS, "data", "base") or _is_trainers(key):
            continue
        if not _is_table(value) or _is_slip(key, table):
            raise _unknown(key, where, "; put what is not the loader's into a table of its own")
    return _chosen(table, ("base", *CONFIG_KEYS)) | _of_data(inner or {}, where)


def of_object(cfg: object, where: object) -> dict[str, Any]:
    """The same of an object's attributes; a `data` that is a mapping is read as a table is."""
    inner = getattr(cfg, "data", None)
    own = _of_data(inner, where) if isinstance(inner, Mapping) else _chosen(_attributes(inner))
    return _chosen(_attributes(cfg)) | own


def _of_data(table: Mapping[str, Any], where: object) -> dict[str, Any]:
    for key in table:
        if key not in CONFIG_KEYS:
            raise _unknown(key, f"{where}: data", "")
    return _chosen(table)


def _attributes(cfg: object) -> dict[str, Any]:
    return {key: getattr(cfg, key, None) for key in CONFIG_KEYS}


def _chosen(table: Mapping[str, Any], keys: tuple[str, ...] = CONFIG_KEYS) -> dict[str, Any]:
    return {key: table[key] for key in keys if table.get(key) is not None and table[key] != ""}


def _is_trainers(key: str) -> bool:
    return key in _TRAINER_KEYS or str(key).startswith(_TRAINER_PREFIX)


def _is_table(value: Any) -> bool:
    """Whether a value is a table or a list of tables, as TOML has them."""
    if isinstance(value, list | tuple):
        return bool(value) and all(isinstance(row, Mapping) for row in value)
    return isinstance(value, Mapping)


def _is_slip(key: str, table: Mapping[str, Any]) -> bool:
    missing = [known for known in (*CONFIG_KEYS, "data") if known not in table]
    return bool(difflib.get_close_matches(str(key), missing, 1, _SLIP))


def _unknown(key: object, where: object, do: str) -> ConfigError:
    hint = _ALIASES.get(str(key)) or settings.nearest(str(key), (*CONFIG_KEYS, "data"))
    return ConfigError(
        "unknown key",
        where=where,
        found=repr(key),
        do=f"did you mean {hint!r}?{do}",
    )
