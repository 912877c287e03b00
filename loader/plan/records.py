"""JSON objects as records: exactly a record's fields, each of its type."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import fields
from pathlib import Path
from typing import Any

from loader.errors import PlanError
from loader.plan.settings import nearest

_TYPES = {"str": str, "int": int, "bool": bool, "float": float}


def list_of(value: Any, path: Path, where: str) -> list[Any]:
    """`value`, which must be a list. Raises PlanError."""
    if not isinstance(value, list):
        raise malformed(path, f"{where} {type(value).__name__}", "a list")
    return value


def typed(
    value: Any,
    record: type,
    path: Path,
    where: str,
    *,
    optional: Container[str] = (),
    skip: Container[str] = (),
) -> dict[str, Any]:
    """Check that `value` has exactly the record's fields (but `skip`), each of its type.

    Args:
        value: A part of a plan's JSON.
        record: A dataclass with fields of type str, int, bool or float.
        path, where: File and place in it that an error names.
        optional: Fields that may be missing.
        skip: Fields that are read elsewhere.

    Raises:
        PlanError: It has not (E-PLAN-FORMAT).
    """
    if not isinstance(value, dict):
        raise malformed(path, f"{where} {type(value).__name__}", "an object")
    expected = {f.name: _TYPES[str(f.type)] for f in fields(record) if f.name not in skip}
    for key in value:
        if key not in expected:
            raise malformed(path, f"{where}: unknown key {key!r}", f"{nearest(key, expected)!r}")
    for key, kind in expected.items():
        if key in optional and key not in value:
            continue
        if type(value.get(key)) is not kind or not _is_clean(value[key]):
            raise malformed(path, f"{where}.{key} = {value.get(key)!r}"[:120], kind.__name__)
    return value


def _is_clean(value: str | float) -> bool:
    """Whether a text can be part of a path: JSON may hold NUL and halves of surrogate pairs."""
    if not isinstance(value, str):
        return True
    return "\0" not in value and not any("\ud800" <= c <= "\udfff" for c in value)


def malformed(path: Path, found: str, expected: str) -> PlanError:
    """A file that is not a plan."""
    return PlanError(
        "not a loader plan", where=path, found=found, expected=expected, code="E-PLAN-FORMAT"
    )
