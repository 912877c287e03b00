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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path, PurePosixPath
from typing import Any

from loader import preflight
from loader.errors import FormatError, PlanError
from loader.format import Manifest, read_json_object
from loader.mixture import Stage, quotas, weights_fixed_point
from loader.settings import nearest

PLAN_FORMAT = "nmoe-loader-plan/1"
MAX_PLAN_BYTES = 64 * 2**20
_TYPES = {"str": str, "int": int}


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """What a caller chooses beside the sources; None takes the manifests' own value.

    batch_size: sequences a step over all ranks. window_stride: tokens between the starts of
    consecutive windows of a source, `seq_len` (each token predicted once) or `seq_len+1`.
    on_exhaust: end a stage when `all_exhausted` (every quota met) or `first_exhausted`; `wrap` is
    the former and lets a source with too few tokens start again.
    """

    seq_len: int
    batch_size: int
    seed: int = 42
    policy: str = "swrr"
    window_stride: str = "seq_len"
    on_exhaust: str = "all_exhausted"
    tokenizer: str | None = None
    vocab_size: int | None = None
    eos_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class SourceData:
    """The data of a source. `manifest` is a POSIX path relative to the plan's root; a directory
    there has no manifest and was let in by `allow_unmanifested`."""

    name: str
    manifest: str
    content_hash: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class PlanSource(SourceData):
    """A source in a stage: its weight in millionths, and how many sequences the stage takes."""

    weight: int
    quota_sequences: int


@dataclass(frozen=True, slots=True)
class PlanStage:
    """A stretch of the stream with one set of weights."""

    name: str
    mixture: str
    sources: tuple[PlanSource, ...]

    @property
    def num_sequences(self) -> int:
        """Sum of quotas; `first_exhausted` may end the stage sooner."""
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
    root: str = "."
    base: Path = field(default=Path(), compare=False)

    @property
    def stride(self) -> int:
        """Tokens between the starts of consecutive windows of a source."""
        return self.seq_len + (self.window_stride == "seq_len+1")

    @property
    def wraps(self) -> bool:
        """Whether a source with too few tokens starts again."""
        return self.on_exhaust == "wrap"

    @property
    def num_sequences(self) -> int:
        """Sequences in all stages together; `first_exhausted` may end them sooner."""
        return sum(stage.num_sequences for stage in self.stages)

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
        return value

    def to_json(self) -> str:
        """Text of the plan's file: the same for the same plan."""
        value = {"format": PLAN_FORMAT, "plan_hash": self.plan_hash} | _json_value(self)
        return json.dumps(value, ensure_ascii=False, indent=2, allow_nan=False) + "\n"


def build_plan(
    stages: Sequence[Stage],
    manifests: Mapping[str, Path],
    settings: PlanSettings,
    *,
    root: Path,
    plan_id: str,
    valid: Mapping[str, Path] | None = None,
    plan_dir: Path | None = None,
) -> LoaderPlan:
    """Make a plan and check that its data can serve it to the end. Writes nothing.

    Args:
        stages: From `loader.mixture.resolve_stages`. A source of weight zero is left out.
        manifests: Path of each source's train manifest, or of a directory without one.
        settings: Batch shape and policy.
        root: Directory that holds all of them; the plan's paths are relative to it.
        plan_id: Name of the plan for people; not part of its hash.
        valid: The same for the valid split, in the order in which it is to be read.
        plan_dir: Where the plan's file will lie; `root` when left out.

    Raises:
        PlanError: A source has no manifest (E-PLAN-SOURCE), too few tokens (E-PLAN-SHORT), a
            share of no sequence though the stage has one for each source (E-PLAN-ZERO), or
            another tokenizer (E-PLAN-TOKENIZER); a setting is out of range (E-PLAN-FORMAT).
        FormatError: A manifest is not valid.
    """
    given = preflight.Vocabulary(settings.tokenizer, settings.vocab_size, settings.eos_token_id)
    names = dict.fromkeys(s.name for stage in stages for s in stage.sources if s.weight)
    if not names:
        raise PlanError("no source with a weight", where=plan_id, code="E-PLAN-SOURCE")
    train = {name: _opened(name, manifests, given) for name in names}
    held_out = {name: preflight.read_data(path, given) for name, path in (valid or {}).items()}
    vocabulary = preflight.agreed_vocabulary([*train.items(), *held_out.items()], given)
    data = {name: _source_data(name, root, manifests[name], train[name]) for name in names}
    plan = LoaderPlan(
        plan_id=plan_id,
        **vocabulary._asdict(),
        seq_len=settings.seq_len,
        batch_size=settings.batch_size,
        seed=settings.seed,
        policy=settings.policy,
        window_stride=settings.window_stride,
        on_exhaust=settings.on_exhaust,
        stages=tuple(_plan_stage(stage, data, settings.seq_len) for stage in stages),
        valid=tuple(
            _source_data(name, root, path, held_out[name]) for name, path in (valid or {}).items()
        ),
        root=Path(os.path.relpath(root, plan_dir or root)).as_posix(),
        base=Path(os.path.abspath(root)),
    )
    preflight.check_plan(plan)
    return plan


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


def _opened(name: str, manifests: Mapping[str, Path], vocabulary: preflight.Vocabulary) -> Manifest:
    if name not in manifests:
        hint = nearest(name, manifests)
        raise PlanError(
            "source has no manifest",
            where=f"source {name!r}",
            expected=f"one of {', '.join(manifests) or '(there are none)'}",
            do=None if hint is None else f"did you mean {hint!r}?",
            code="E-PLAN-SOURCE",
        )
    return preflight.read_data(manifests[name], vocabulary)


def _source_data(name: str, root: Path, path: Path, manifest: Manifest) -> SourceData:
    relative = Path(os.path.relpath(path, root)).as_posix()
    if relative.startswith("../"):
        raise PlanError(
            "manifest lies outside the plan's root",
            where=f"source {name!r}",
            found=path,
            expected=f"a path inside {root}",
            code="E-PATH-ESCAPE",
        )
    return SourceData(name, relative, manifest.content_digest(), manifest.total_tokens)


def _plan_stage(stage: Stage, data: Mapping[str, SourceData], seq_len: int) -> PlanStage:
    sources = [source for source in stage.sources if source.weight]
    weights = [source.weight for source in sources]
    num_sequences = stage.num_tokens // max(1, seq_len)
    if num_sequences < 1:
        raise PlanError(
            f"stage {stage.name!r} is shorter than one sequence",
            found=f"{stage.num_tokens} tokens",
            expected=f"at least seq_len = {seq_len}",
            code="E-PLAN-ZERO",
        )
    shares = quotas(num_sequences, weights)
    # With fewer sequences than sources somebody must go without; else a source that is asked for
    # and gets nothing is a mistake in the mixture or the budget.
    if 0 in shares and num_sequences >= len(sources):
        raise PlanError(
            "source gets no sequence",
            where=f"stage {stage.name!r}, source {sources[shares.index(0)].name!r}",
            found=f"weight {weights[shares.index(0)]} of {sum(weights)}, {num_sequences} sequences",
            do="give the stage more tokens, or leave the source out of the mixture",
            code="E-PLAN-ZERO",
        )
    rows = zip(sources, weights_fixed_point(weights), shares)
    return PlanStage(
        stage.name,
        stage.mixture,
        tuple(
            PlanSource(**asdict(data[s.name]), weight=weight, quota_sequences=quota)
            for s, weight, quota in rows
        ),
    )


def _json_value(plan: LoaderPlan) -> dict[str, Any]:
    value = asdict(plan)
    del value["base"]
    value["stages"] = [stage | {"sources": list(stage["sources"])} for stage in value["stages"]]
    value["valid"] = list(value["valid"])
    return value


def _parse(value: dict[str, Any], path: Path) -> LoaderPlan:
    scalars = dict(value)
    stages, valid = scalars.pop("stages", None), scalars.pop("valid", None)
    scalars = _typed(scalars, LoaderPlan, path, "plan", skip=("stages", "valid", "base"))
    root = PurePosixPath(scalars["root"])
    if root.is_absolute():
        raise _malformed(path, f"root {scalars['root']!r}", "a relative path")
    return LoaderPlan(
        **scalars,
        stages=tuple(_parse_stage(s, path, i) for i, s in enumerate(_rows(stages, path, "stages"))),
        valid=tuple(
            SourceData(**_typed(s, SourceData, path, f"valid[{i}]"))
            for i, s in enumerate(_rows(valid, path, "valid"))
        ),
        base=Path(os.path.abspath(path.parent / root)),
    )


def _parse_stage(value: Any, path: Path, i: int) -> PlanStage:
    where = f"stages[{i}]"
    rest = dict(value) if isinstance(value, dict) else {}
    rows = _rows(rest.pop("sources", None), path, f"{where}.sources")
    sources = tuple(
        PlanSource(**_typed(s, PlanSource, path, f"{where}.sources[{j}]"))
        for j, s in enumerate(rows)
    )
    return PlanStage(**_typed(rest, PlanStage, path, where, skip=("sources",)), sources=sources)


def _rows(value: Any, path: Path, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise _malformed(path, f"{where} {type(value).__name__}", "a list")
    return value


def _typed(
    value: Any, record: type, path: Path, where: str, skip: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Check that `value` has exactly the record's fields (but `skip`), each of its type."""
    if not isinstance(value, dict):
        raise _malformed(path, f"{where} {type(value).__name__}", "an object")
    expected = {f.name: _TYPES[str(f.type)] for f in fields(record) if f.name not in skip}
    for key in value:
        if key not in expected:
            raise _malformed(path, f"{where}: unknown key {key!r}", f"{nearest(key, expected)!r}")
    for key, kind in expected.items():
        if type(value.get(key)) is not kind or not _is_clean(value[key]):
            raise _malformed(path, f"{where}.{key} = {value.get(key)!r}"[:120], kind.__name__)
    return value


def _is_clean(value: str | int) -> bool:
    """Whether a text can be part of a path: JSON may hold NUL and halves of surrogate pairs."""
    if isinstance(value, int):
        return True
    return "\0" not in value and not any("\ud800" <= c <= "\udfff" for c in value)


def _malformed(path: Path, found: str, expected: str) -> PlanError:
    return PlanError(
        "not a loader plan", where=path, found=found, expected=expected, code="E-PLAN-FORMAT"
    )
