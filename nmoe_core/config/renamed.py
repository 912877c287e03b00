"""Earlier names of keys. This release still reads them, with a warning."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from nmoe_core.base.errors import ConfigError

RENAMED = {
    "automation.follow_every_s": "automation.poll_interval_s",
    "automation.watch_every_s": "automation.source_poll_interval_s",
    "backbone.experts": "backbone.moe_backend",
    "curation.loader": "curation.packing",
    "grading.compat": "grading.allow_foreign_calibration",
    "grading.max_batch": "grading.batch_size",
    "oracle.engine.experts": "oracle.engine.moe_backend",
    "oracle.engine.max_batch": "oracle.engine.batch_size",
    "oracle.retry_failed": "oracle.max_retries",
    "oracle.salvage": "oracle.extract_embedded",
}
"""Current names by earlier names; both are dotted keys of the same table."""
REMOVED = {
    "oracle.replace": "the answers of all oracles are kept, so no labels have to be replaced"
}
"""Keys of earlier releases without an effect, and the reason."""


def with_current_verb(words: Sequence[str]) -> list[str]:
    """The words of a command line; `hydra look` becomes `hydra review`, with a warning like that of
    `current_name`."""
    if list(words[:2]) != ["hydra", "look"]:
        return list(words)
    text = "nmoe hydra look is now nmoe hydra review; this release still accepts it"
    warnings.warn(text, FutureWarning, stacklevel=2)
    return ["hydra", "review", *words[2:]]


def current_name(key: str) -> str:
    """The current name of a dotted key; warns (FutureWarning) if `key` is an earlier name."""
    name = RENAMED.get(key, key)
    if name != key:
        text = f"{key} is now {name}; this release still reads it"
        warnings.warn(text, FutureWarning, stacklevel=2)
    return name


def with_current_names(table: Mapping[str, Any], where: object, prefix: str = "") -> dict[str, Any]:
    """A copy of nested tables in which every key has its current name; `prefix` is the table's
    dotted name plus a dot. Warns like `current_name`. Raises ConfigError if a table has both names
    of a key."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        if (why := REMOVED.get(f"{prefix}{key}")) is not None:
            warnings.warn(f"{prefix}{key} has no effect: {why}", FutureWarning, stacklevel=2)
            continue
        name = current_name(f"{prefix}{key}").removeprefix(prefix)
        if name != key and name in table:
            raise ConfigError(
                "a key is set under its current and its earlier name",
                where=where,
                found=f"{prefix}{key}; {key} is the earlier name of {name}",
                do="remove the earlier name",
                code="E-CONFIG-KEY",
            )
        is_table = isinstance(value, Mapping)
        found[name] = with_current_names(value, where, f"{prefix}{key}.") if is_table else value
    return found
