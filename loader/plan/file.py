"""The file of a loader plan: a JSON object, read strictly and checked against its data.

A plan with too little data is refused when it is built or loaded, not during training.
"""

from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar, get_type_hints

from loader.errors import FormatError, PlanError
from loader.files.addresses import as_path, is_url, normal
from loader.files.format import read_json_object
from loader.plan import check as preflight
from loader.plan.records import (
    DEFAULTS,
    PLAN_FORMATS,
    Consumed,
    LoaderPlan,
    MaskedTokens,
    PlanSource,
    PlanStage,
    SourceData,
    TwinData,
)
from loader.plan.tables import nearest

_MAX_BYTES = 64 * 2**20
_READ_APART = ("plan_hash", "stages", "valid", "consumed", "masked", "twins")
T = TypeVar("T")


def load_plan(path: str | Path) -> LoaderPlan:
    """Read a plan and check it against its manifests.

    Raises PlanError if the file is not a plan (E-PLAN-FORMAT) or was edited (E-PLAN-HASH), or the
    data changed (E-PLAN-DATA) or do not suffice (E-PLAN-SHORT); and FormatError if a manifest is
    missing or not valid, or a path leaves the root.
    """
    path = as_path(path)
    try:
        value = read_json_object(path, _MAX_BYTES)
    except FormatError as error:
        raise PlanError("not a loader plan", found=str(error), code="E-PLAN-FORMAT") from None
    return PlanFile(value, path, path.parent).checked()


@dataclass(frozen=True, slots=True)
class PlanFile:
    """The content of a plan's file.

    Attributes:
        value: The parsed JSON, of any type.
        where: The file, for messages.
        directory: The directory of the file; the plan's root is relative to it.
    """

    value: Any
    where: object
    directory: Path = Path()

    def checked(self) -> LoaderPlan:
        """The plan, checked as by `load_plan`."""
        plan = self.plan()
        preflight.check_plan(plan, self.where)
        if self.value.get("plan_hash") != plan.plan_hash:
            raise PlanError(
                "plan_hash does not match the plan",
                where=self.where,
                found=self.value.get("plan_hash"),
                expected=plan.plan_hash,
                do="build the plan again; do not edit it",
                code="E-PLAN-HASH",
            )
        for source in (*plan.sources, *plan.valid):
            preflight.open_data(plan, source)
        return plan

    def plan(self) -> LoaderPlan:
        """The plan; its hash, ranges and data are not checked. Raises PlanError if a field is
        missing, unknown or of another type (E-PLAN-FORMAT)."""
        value = self.value
        found = value.get("format") if isinstance(value, dict) else value
        if found not in PLAN_FORMATS:
            raise malformed(self.where, f"format {found!r}"[:80], " or ".join(PLAN_FORMATS))
        scalars = {key: item for key, item in value.items() if key not in _READ_APART}
        scalars = self._typed(scalars, LoaderPlan, "plan")
        root = PurePosixPath(scalars["root"])
        if root.is_absolute() or is_url(scalars["root"]):
            raise malformed(self.where, f"root {scalars['root']!r}", "a relative path")
        stages = []
        for i, row in enumerate(self._list_of(value.get("stages"), "stages")):
            place = f"stages[{i}]"
            rest = dict(row) if isinstance(row, dict) else {}
            sources = self._records(PlanSource, rest.pop("sources", None), f"{place}.sources")
            stages.append(PlanStage(**self._typed(rest, PlanStage, place), sources=sources))
        return LoaderPlan(
            **scalars,
            stages=tuple(stages),
            valid=self._records(SourceData, value.get("valid"), "valid"),
            consumed=self._records(Consumed, value.get("consumed", []), "consumed"),
            masked=self._records(MaskedTokens, value.get("masked", []), "masked"),
            twins=self._records(TwinData, value.get("twins", []), "twins"),
            base=normal(self.directory / root),
        )

    def _records(self, kind: type[T], value: Any, place: str) -> tuple[T, ...]:
        rows = enumerate(self._list_of(value, place))
        return tuple(kind(**self._typed(row, kind, f"{place}[{i}]")) for i, row in rows)

    def _list_of(self, value: Any, place: str) -> list[Any]:
        if not isinstance(value, list):
            raise malformed(self.where, f"{place} {type(value).__name__}", "a list")
        return value

    def _typed(self, value: Any, record: type, place: str) -> dict[str, Any]:
        """Check that `value` is an object with exactly the record's simple fields, each of its
        type."""
        if not isinstance(value, dict):
            raise malformed(self.where, f"{place} {type(value).__name__}", "an object")
        kinds = _kinds(record)
        for key in value:
            if key not in kinds:
                found = f"{place}: unknown key {key!r}"
                raise malformed(self.where, found, f"{nearest(key, kinds)!r}")
        for key, kind in kinds.items():
            if key in DEFAULTS and key not in value:
                continue
            if type(value.get(key)) is not kind or not _is_clean(value[key]):
                found = f"{place}.{key} = {value.get(key)!r}"[:120]
                raise malformed(self.where, found, kind.__name__)
        return value


@cache
def _kinds(record: type) -> dict[str, type]:
    """Types of a record's simple fields."""
    hints = get_type_hints(record)
    simple = (str, int, bool, float)
    return {f.name: hints[f.name] for f in fields(record) if hints[f.name] in simple}


def _is_clean(value: str | float) -> bool:
    """Whether a text can be part of a path: JSON can contain NUL and lone surrogates."""
    text = str(value)
    return "\0" not in text and not any("\ud800" <= c <= "\udfff" for c in text)


def malformed(where: object, found: str, expected: str | None = None) -> PlanError:
    """The error for a file that is not a plan."""
    code = "E-PLAN-FORMAT"
    return PlanError("not a loader plan", where=where, found=found, expected=expected, code=code)
