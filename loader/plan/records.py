"""A loader plan: all values that determine the stream of tokens, as records and as JSON.

A plan names sources by manifest and content digest, with integer weights and quotas in sequences
per stage. The plan's hash covers everything that determines the stream. It covers no path, so data
can be moved. Format: docs/formats.md.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from loader.files.block_files import StoreData
from loader.plan.settings import KEYS, StreamSettings, Vocabulary

PLAN_FORMATS = ("nmoe-loader-plan/1", "nmoe-loader-plan/2")
_STREAM = tuple(f.name for f in fields(StreamSettings))
_IF_CHOSEN = tuple(name for name in _STREAM if KEYS[name].if_chosen)
# The order of the keys in a plan's file.
_ORDER = (
    *("format", "plan_id", *Vocabulary._fields),
    *(name for name in _STREAM if name not in _IF_CHOSEN),
    *("stages", "valid", *_IF_CHOSEN, "consumed", "masked", "twins", "root"),
)
# Defaults, which a plan's file omits, so that plans from before these fields existed keep their
# hash.
DEFAULTS: dict[str, Any] = {
    **{f.name: f.default for f in fields(StreamSettings) if f.name in _IF_CHOSEN},
    "consumed": (),
    "masked": (),
    "twins": (),
    "replaced": False,
    "spec": "",
    "lr_scale": 1.0,
    "start_step": 0,
    "unread_sequences": 0,
    "owed_millionths": 0,
}


@dataclass(frozen=True, slots=True)
class SourceData:
    """The data of a source. `manifest` is a POSIX path relative to the plan's root, or a directory
    without a manifest, if `allow_unmanifested` was set. `spec` is the origin of the data, such as
    `hf:bigcode/the-stack-v2`; if it is empty, the name is used. `max_epochs` is the source's own
    maximum number of passes, instead of the plan's; 0 if it has none."""

    name: str
    manifest: str
    content_hash: str
    num_tokens: int
    spec: str = field(default="", kw_only=True)
    max_epochs: int = field(default=0, kw_only=True)

    def planned(self, weight: int, quota: int, owed: int = 0) -> PlanSource:
        """This source in a stage; see `PlanSource`."""
        data = {f.name: getattr(self, f.name) for f in fields(SourceData)}
        return PlanSource(**data, weight=weight, quota_sequences=quota, owed_millionths=owed)


T = TypeVar("T", bound=SourceData)


@dataclass(frozen=True, slots=True)
class PlanSource(SourceData):
    """A source in a stage: its number of sequences in the stage, and its weight in parts of
    `loader.order.policies.weight_unit`. If a remix (`loader.remix`) ended the stage,
    `unread_sequences` of the quota are not read, and the next stage starts with a debt of
    `owed_millionths` of a sequence to the source."""

    weight: int
    quota_sequences: int
    unread_sequences: int = 0
    owed_millionths: int = 0

    @property
    def num_sequences(self) -> int:
        """Number of sequences that the stage reads of the source."""
        return self.quota_sequences - self.unread_sequences


@dataclass(frozen=True, slots=True)
class TwinData(SourceData):
    """For a twin plan: the data of a source in the first plan's tokenizer, and how the first plan
    cuts these data into windows."""

    seq_len: int
    stride: int


@dataclass(frozen=True, slots=True)
class Consumed:
    """The part of a source that another run read before this plan, from the state of that run.

    source: Its name, or its spec if the plan does not have the source. sequences: windows to skip.
    rows, tokens: counts of the state. content_hash, order: the data and the reading order
    (`loader.plan.continuation.reading_order`) of the counts; empty if the state does not have them.
    """

    source: str
    sequences: int
    rows: int
    tokens: int
    content_hash: str
    order: str


@dataclass(frozen=True, slots=True, order=True)
class MaskedTokens:
    """Tokens `[start, end)` of a shard file of a source that are never targets. `file` is the name
    in the manifest. The tokens stay in the inputs as context, unless `replaced` is set: then the
    inputs have EOS instead. A mask changes neither order nor windows."""

    source: str
    file: str
    start: int
    end: int
    replaced: bool = False


@dataclass(frozen=True, slots=True)
class PlanStage:
    """A part of the stream with one set of weights. `start_step` is set if a phase or a remix
    starts the stage; `lr_scale` is the factor of the learning rate."""

    name: str
    mixture: str
    sources: tuple[PlanSource, ...]
    start_step: int = 0
    lr_scale: float = 1.0

    @property
    def num_sequences(self) -> int:
        """Sequences of all sources together; `first_exhausted` may end the run earlier."""
        return sum(source.num_sequences for source in self.sources)

    @property
    def is_cut(self) -> bool:
        """Whether a remix ended the stage early."""
        return any(source.unread_sequences for source in self.sources)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderPlan(StreamSettings):
    """A checked plan. `root`, as in the JSON, is relative to the plan's file; `base` is the local
    path of this directory, and `store` is the store from which tokens are read in blocks. These
    three are not part of the plan's identity."""

    plan_id: str
    tokenizer: str
    vocab_size: int
    eos_token_id: int
    stages: tuple[PlanStage, ...]
    valid: tuple[SourceData, ...] = ()
    consumed: tuple[Consumed, ...] = ()
    masked: tuple[MaskedTokens, ...] = ()
    twins: tuple[TwinData, ...] = ()
    format: str = PLAN_FORMATS[0]
    root: str = "."
    base: Path = field(default=Path(), compare=False)
    store: StoreData | None = field(default=None, compare=False)

    @property
    def stride(self) -> int:
        """Tokens between the starts of consecutive windows of a source."""
        return self.seq_len + (self.window_stride == "seq_len+1")

    @property
    def window_tokens(self) -> int:
        """Tokens of a window for policies and shuffles; in a twin plan, tokens of a window of the
        first plan."""
        return self.twins[0].seq_len if self.twins else self.seq_len

    @property
    def wraps(self) -> bool:
        """Whether a source with too few tokens may be read again from its start."""
        return any(self.epoch_limit(source.max_epochs) != 1 for source in self.sources)

    @property
    def shuffles(self) -> bool:
        """Whether each epoch of a source has its own random order of windows."""
        return self.shuffle or self.shuffle_blocks or self.policy == "epoch_weighted"

    @property
    def wraps_tokens(self) -> bool:
        """Whether a source starts again in the middle of a window: token positions count modulo the
        source's tokens. Otherwise complete windows are read again."""
        return self.wraps and self.packing == "concat" and not self.shuffles

    @property
    def is_current(self) -> bool:
        """Whether the plan has the last format: the rows of a step are rotated by a hash of the
        step, and valid is read to the last token."""
        return self.format != PLAN_FORMATS[0]

    @property
    def pads_valid(self) -> bool:
        """Whether the last window of a valid source is padded, so that each target is read."""
        rests = ((source.num_tokens - 1) % self.seq_len for source in self.valid)
        return self.is_current and not self.packs and any(rests)

    @property
    def num_sequences(self) -> int:
        """Sequences of all stages together; `first_exhausted` may end the run earlier."""
        return sum(stage.num_sequences for stage in self.stages)

    def taken(self) -> Counter[str]:
        """Sequences of each source in all stages together."""
        taken: Counter[str] = Counter()
        for stage in self.stages:
            taken.update({source.name: source.num_sequences for source in stage.sources})
        return taken

    def limits(self, capacities: Sequence[int]) -> list[int]:
        """Maximum number of windows of each source; `capacities` are the windows of one pass."""
        passes = [max(1, source.max_epochs or self.max_epochs) for source in self.sources]
        return [limit * capacity for limit, capacity in zip(passes, capacities)]

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
        value: dict[str, Any] = _json_value(self)
        for key in ("plan_id", "root"):
            del value[key]
        for stage in value["stages"]:
            del stage["mixture"]
        sources = [s for stage in value["stages"] for s in stage["sources"]]
        for source in [*sources, *value["valid"], *value.get("twins", ())]:
            del source["manifest"]
            source.pop("spec", None)
        return value

    def placed_in(self, directory: Path) -> LoaderPlan:
        """The plan with paths relative to a plan file in `directory`."""
        return replace(self, root=Path(os.path.relpath(self.base, directory)).as_posix())

    def moved_to(self, base: Path) -> LoaderPlan:
        """The plan with paths from another directory, which must contain all its data."""

        def moved(source: T) -> T:
            path = os.path.relpath(self.base / source.manifest, base)
            return replace(source, manifest=Path(path).as_posix())

        stages = (replace(s, sources=tuple(map(moved, s.sources))) for s in self.stages)
        valid = tuple(map(moved, self.valid))
        twins = tuple(map(moved, self.twins))
        return replace(self, stages=tuple(stages), valid=valid, twins=twins, base=base)

    def with_specs(self, specs: Mapping[str, str]) -> LoaderPlan:
        """The plan with `spec` (the origin of the data) set for the given sources."""
        stages = (
            replace(stage, sources=tuple(replace(s, spec=specs[s.name]) for s in stage.sources))
            for stage in self.stages
        )
        return replace(self, stages=tuple(stages))

    def to_json(self) -> str:
        """Text of the plan's file; equal plans have equal texts."""
        value = {"format": self.format, "plan_hash": self.plan_hash} | _json_value(self)
        return json.dumps(value, ensure_ascii=False, indent=2, allow_nan=False) + "\n"


def _json_value(plan: LoaderPlan) -> dict[str, Any]:
    value = asdict(plan)
    return _chosen({key: value[key] for key in _ORDER})


def _chosen(value: Any) -> Any:
    """A JSON value without keys that have their default value."""
    if isinstance(value, list | tuple):
        return [_chosen(item) for item in value]
    if not isinstance(value, dict):
        return value
    given = {k: v for k, v in value.items() if k not in DEFAULTS or v != DEFAULTS[k]}
    return {key: _chosen(item) for key, item in given.items()}
