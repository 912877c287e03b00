"""Reads fields of a checkpoint's `config.json` and refuses values that no model can have.

If a field that changes the computation is missing, has the wrong type, or selects an unsupported
variant, the error names it. No default is used, because a default that differs from the training
setting would give plausible but wrong numbers.
"""

from collections.abc import Mapping
from typing import Any

from nmoe_core.base.errors import CheckpointError

LARGEST = 2**53


def take(raw: Mapping[str, Any], kind: type, *names: str) -> Any:
    """The field under the first of `names` that exists; an int is accepted as a float."""
    name = next((name for name in names if raw.get(name) is not None), None)
    if name is None:
        raise missing(*names)
    value = raw[name]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and not abs(value) <= LARGEST:
        raise bad_field(name, value, f"a number of at most {LARGEST}")
    if kind is float and is_number:
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise bad_field(name, value, f"a value of type {kind.__name__}")
    return value


def token_ids(raw: Mapping[str, Any], name: str) -> list[int]:
    """The token ids in the field `name`, which holds null, one id, or a list."""
    value = raw.get(name)
    values = value if isinstance(value, list) and value else [value]
    return [] if value is None else [take({name: token}, int, name) for token in values]


def first_id(raw: Mapping[str, Any], name: str) -> int | None:
    """The token id in the field `name`, or None; if the field holds a list, its first id."""
    return next(iter(token_ids(raw, name)), None)


def missing(*names: str) -> CheckpointError:
    """The error for a field that a file must have under one of these names."""
    return CheckpointError(
        f"the field {' or '.join(names)} is missing",
        where="config.json",
        code="E-CHECKPOINT-CONFIG",
    )


def bad_field(field: str, found: object, expected: str) -> CheckpointError:
    """The error for a field with an invalid value."""
    return CheckpointError(
        "invalid value of a field",
        where=f"config.json {field}",
        found=repr(found)[:80],
        expected=expected,
        code="E-CHECKPOINT-CONFIG",
    )


def variant(field: str, found: object, expected: str) -> CheckpointError:
    """The error for an unsupported setting that would change results."""
    return CheckpointError(
        "the engine does not support this variant",
        where=f"config.json {field}",
        found=repr(found)[:80],
        expected=expected,
        code="E-CHECKPOINT-ARCH",
    )
