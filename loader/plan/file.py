"""The file of a loader plan: one JSON object, read strictly and checked against its data.

A plan that could not be read to its end is refused when it is built or loaded, not during training.
"""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar, get_type_hints

from loader.errors import FormatError, PlanError
from loader.files.format import read_json_object
from loader.plan import check as preflight
from loader.plan.records import (
    DEFAULTS,
    PLAN_FORMAT,
    Consumed,
    LoaderPlan,
    PlanSource,
    PlanStage,
    SourceData,
)
from loader.plan.tables import nearest

MAX_PLAN_BYTES = 64 * 2**20
_SIMPLE = (str, int, bool, float)
T = TypeVar("T")


def load_plan(path: str | Path) -> LoaderPlan:
    """Read a plan and check it against the manifests it names.

    Raises:
        PlanError: Not a plan (E-PLAN-FORMAT), changed by hand (E-PLAN-HASH), its data changed
            (E-PLAN-DATA) or is too short (E-PLAN-SHORT).
        FormatError: A manifest is missing or not valid, or a path leaves the root.
    """
    path = Path(path)
    try:
        value = read_json_object(path, MAX_PLAN_BYTES)
    except FormatError as error:
        raise PlanError("not a loader plan", found=str(error), code="E-PLAN-FORMAT") from None
    if (found := value.pop("format", None)) != PLAN_FORMAT:
        raise _malformed(path, f"format {found!r}", repr(PLAN_FORMAT))
    recorded = value.pop("plan_hash", None)
    plan = _parse(value, path)
    preflight.check_plan(plan, path)
    if recorded != plan.plan_hash:
        raise PlanError(
            "plan_hash does not match the plan",
            where=path,
            found=recorded,
            expected=plan.plan_hash,
            do="build the plan again; it is not meant to be edited",
            code="E-PLAN-HASH",
        )
    for source in (*plan.sources, *plan.valid):
        preflight.open_data(plan, source)
    return plan


def _parse(value: dict[str, Any], path: Path) -> LoaderPlan:
    stages = _list_of(value.pop("stages", None), path, "stages")
    valid, consumed = value.pop("valid", None), value.pop("consumed", [])
    scalars = _typed(value, LoaderPlan, path, "plan")
    root = PurePosixPath(scalars["root"])
    if root.is_absolute():
        raise _malformed(path, f"root {scalars['root']!r}", "a relative path")
    return LoaderPlan(
        **scalars,
        stages=tuple(_parse_stage(row, path, i) for i, row in enumerate(stages)),
        valid=_records(SourceData, valid, path, "valid"),
        consumed=_records(Consumed, consumed, path, "consumed"),
        base=Path(os.path.abspath(path.parent / root)),
    )


def _parse_stage(value: Any, path: Path, i: int) -> PlanStage:
    where = f"stages[{i}]"
    rest = dict(value) if isinstance(value, dict) else {}
    sources = _records(PlanSource, rest.pop("sources", None), path, f"{where}.sources")
    return PlanStage(**_typed(rest, PlanStage, path, where), sources=sources)


def _records(kind: type[T], value: Any, path: Path, where: str) -> tuple[T, ...]:
    rows = enumerate(_list_of(value, path, where))
    return tuple(kind(**_typed(row, kind, path, f"{where}[{i}]")) for i, row in rows)


def _list_of(value: Any, path: Path, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise _malformed(path, f"{where} {type(value).__name__}", "a list")
    return value


def _typed(value: Any, record: type, path: Path, where: str) -> dict[str, Any]:
    """Check that `value` is an object of exactly the record's simple fields, each of its type."""
    if not isinstance(value, dict):
        raise _malformed(path, f"{where} {type(value).__name__}", "an object")
    hints = get_type_hints(record)
    kinds = {f.name: hints[f.name] for f in fields(record) if hints[f.name] in _SIMPLE}
    for key in value:
        if key not in kinds:
            raise _malformed(path, f"{where}: unknown key {key!r}", f"{nearest(key, kinds)!r}")
    for key, kind in kinds.items():
        if key in DEFAULTS and key not in value:
            continue
        if type(value.get(key)) is not kind or not _is_clean(value[key]):
            raise _malformed(path, f"{where}.{key} = {value.get(key)!r}"[:120], kind.__name__)
    return value


def _is_clean(value: str | float) -> bool:
    """Whether a text can be part of a path: JSON may hold NUL and halves of surrogate pairs."""
    if not isinstance(value, str):
        return True
    return "\0" not in value and not any("\ud800" <= c <= "\udfff" for c in value)


def _malformed(path: Path, found: str, expected: str) -> PlanError:
    return PlanError(
        "not a loader plan", where=path, found=found, expected=expected, code="E-PLAN-FORMAT"
    )
