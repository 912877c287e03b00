"""The loader plan: everything that decides which token is read when, as one JSON file.

A plan names sources by manifest and content digest, with fixed-point weights and whole-sequence
quotas per stage. Its hash covers all that determines the stream and no path, so a tree can move. A
plan that could not be read to its end is refused when it is built or loaded, not during training.
Format: docs/formats.md.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from loader.errors import FormatError, PlanError
from loader.files.format import read_json_object
from loader.plan import check as preflight
from loader.plan.records import list_of, malformed, typed

PLAN_FORMAT = "nmoe-loader-plan/1"
MAX_PLAN_BYTES = 64 * 2**20
T = TypeVar("T")
# Written only where they are chosen, so that plans made before they existed keep their hash.
_OPTIONAL: dict[str, Any] = {
    "packing": "concat",
    "shuffle": False,
    "max_epochs": 0,
    "consumed": (),
    "spec": "",
    "lr_scale": 1.0,
    "start_step": 0,
}


@dataclass(frozen=True, slots=True)
class SourceData:
    """The data of a source. `manifest` is a POSIX path relative to the plan's root; a directory
    there has no manifest and was let in by `allow_unmanifested`. `spec` says where the data came
    from, such as `hf:bigcode/the-stack-v2`; blank means the name."""

    name: str
    manifest: str
    content_hash: str
    num_tokens: int
    spec: str = field(default="", kw_only=True)


@dataclass(frozen=True, slots=True)
class PlanSource(SourceData):
    """A source in a stage: how many sequences the stage takes, and its weight as a part of
    `loader.order.policies.weight_unit`."""

    weight: int
    quota_sequences: int


@dataclass(frozen=True, slots=True)
class Consumed:
    """What was read of a source before the plan began, as another run's state says.

    source: Its name, or its spec where the plan has no such source. sequences: windows to pass
    over. rows, tokens: what the state counted. content_hash, order: the data and the reading order
    (`loader.plan.continuation.reading_order`) of the counts; blank where the state does not say.
    """

    source: str
    sequences: int
    rows: int
    tokens: int
    content_hash: str
    order: str


@dataclass(frozen=True, slots=True)
class PlanStage:
    """A stretch of the stream with one set of weights. `start_step` is set where a phase begins,
    `lr_scale` is the phase's factor on the learning rate."""

    name: str
    mixture: str
    sources: tuple[PlanSource, ...]
    start_step: int = 0
    lr_scale: float = 1.0

    @property
    def num_sequences(self) -> int:
        """Sum of quotas; `first_exhausted` may end the run sooner."""
        return sum(source.quota_sequences for source in self.sources)


@dataclass(frozen=True, slots=True)
class LoaderPlan:
    """A checked plan. `root`, as the JSON holds it, is relative to the plan's file; `base` is the
    same directory on this machine, and no part of the plan's identity."""

    plan_id: str
    tokenizer: str
    vocab_size: int
    eos_token_id: int
    seq_len: int
    batch_size: int
    seed: int
    policy: str
    window_stride: str
    on_exhaust: str
    stages: tuple[PlanStage, ...]
    valid: tuple[SourceData, ...] = ()
    packing: str = "concat"
    shuffle: bool = False
    max_epochs: int = 0
    consumed: tuple[Consumed, ...] = ()
    root: str = "."
    base: Path = field(default=Path(), compare=False)

    @property
    def stride(self) -> int:
        """Tokens between the starts of consecutive windows of a source."""
        return self.seq_len + (self.window_stride == "seq_len+1")

    @property
    def wraps(self) -> bool:
        """Whether a source with too few tokens starts again."""
        return self.epoch_limit != 1

    @property
    def epoch_limit(self) -> int:
        """How often a source may be read; 0 is without end."""
        endless = self.on_exhaust == "wrap" or self.policy == "epoch_weighted"
        return self.max_epochs or (0 if endless else 1)

    @property
    def shuffles(self) -> bool:
        """Whether each epoch of a source has its own random order of windows."""
        return self.shuffle or self.policy == "epoch_weighted"

    @property
    def wraps_tokens(self) -> bool:
        """Whether a source starts again in the middle of a window: its files are one endless text,
        token positions modulo its tokens. Else whole windows come again."""
        return self.wraps and self.packing == "concat" and not self.shuffles

    @property
    def num_sequences(self) -> int:
        """Sequences in all stages together; `first_exhausted` may end them sooner."""
        return sum(stage.num_sequences for stage in self.stages)

    def limits(self, capacities: Sequence[int]) -> list[int]:
        """Windows of each source until its data end, `capacities` in one pass over it."""
        return [max(1, self.max_epochs) * capacity for capacity in capacities]

    @property
    def sources(self) -> tuple[SourceData, ...]:
        """Train sources, each once, in the order in which the stages first name them."""
        first: dict[str, SourceData] = {}
        for stage in self.stages:
            for source in stage.sources:
                first.setdefault(source.name, source)
        return tuple(first.values())

    @property
    def plan_hash(self) -> str:
        """SHA-256 of the canonical JSON of `identity()`."""
        text = json.dumps(self.identity(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def identity(self) -> dict[str, Any]:
        """Everything that determines the stream, as JSON values: no path, plan id or mixture."""
        value: dict[str, Any] = {"format": PLAN_FORMAT} | _json_value(self)
        for key in ("plan_id", "root"):
            del value[key]
        for stage in value["stages"]:
            del stage["mixture"]
        for source in [s for stage in value["stages"] for s in stage["sources"]] + value["valid"]:
            del source["manifest"]
            source.pop("spec", None)
        return value

    def to_json(self) -> str:
        """Text of the plan's file: the same for the same plan."""
        value = {"format": PLAN_FORMAT, "plan_hash": self.plan_hash} | _json_value(self)
        return json.dumps(value, ensure_ascii=False, indent=2, allow_nan=False) + "\n"


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
        raise malformed(path, f"format {found!r}", repr(PLAN_FORMAT))
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


def _json_value(plan: LoaderPlan) -> dict[str, Any]:
    value = asdict(plan)
    del value["base"]
    _drop_defaults(value)
    value["stages"] = [stage | {"sources": list(stage["sources"])} for stage in value["stages"]]
    value["valid"] = list(value["valid"])
    if "consumed" in value:
        value["consumed"] = list(value["consumed"])
    for record in value["stages"] + value["valid"]:
        _drop_defaults(record)
        for source in record.get("sources", ()):
            _drop_defaults(source)
    return value


def _drop_defaults(record: dict[str, Any]) -> None:
    for key, default in _OPTIONAL.items():
        if key in record and record[key] == default:
            del record[key]


def _parse(value: dict[str, Any], path: Path) -> LoaderPlan:
    scalars = dict(value)
    stages, valid = scalars.pop("stages", None), scalars.pop("valid", None)
    consumed = scalars.pop("consumed", [])
    skip = ("stages", "valid", "base", "consumed")
    scalars = typed(scalars, LoaderPlan, path, "plan", optional=_OPTIONAL, skip=skip)
    root = PurePosixPath(scalars["root"])
    if root.is_absolute():
        raise malformed(path, f"root {scalars['root']!r}", "a relative path")
    return LoaderPlan(
        **scalars,
        stages=tuple(
            _parse_stage(row, path, i) for i, row in enumerate(list_of(stages, path, "stages"))
        ),
        valid=_records(SourceData, valid, path, "valid"),
        consumed=_records(Consumed, consumed, path, "consumed"),
        base=Path(os.path.abspath(path.parent / root)),
    )


def _parse_stage(value: Any, path: Path, i: int) -> PlanStage:
    where = f"stages[{i}]"
    rest = dict(value) if isinstance(value, dict) else {}
    sources = _records(PlanSource, rest.pop("sources", None), path, f"{where}.sources")
    rest = typed(rest, PlanStage, path, where, optional=_OPTIONAL, skip=("sources",))
    return PlanStage(**rest, sources=sources)


def _records(kind: type[T], value: Any, path: Path, where: str) -> tuple[T, ...]:
    rows = enumerate(list_of(value, path, where))
    return tuple(
        kind(**typed(row, kind, path, f"{where}[{i}]", optional=_OPTIONAL)) for i, row in rows
    )
