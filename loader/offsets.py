"""What was read of each source, in the token-balance document's form, and plans that go on from it.

`{"datasets": [{"spec", "row_offset", "token_offset"}, ...]}` counts rows and tokens per source. The
counts become part of a plan, so its stream stays a pure function of the position: windows that were
read are passed over, the run is that much shorter, and `least_consumed` starts from the token
counters. Phases stay at their global step. A
source the counts do not know starts level with the others by a credit beside its true count; one
that only the counts know is kept as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any

from loader.errors import StateError
from loader.mixture import quotas
from loader.plan import Consumed, LoaderPlan, PlanStage, SourceData


@dataclass(frozen=True, slots=True)
class Offset:
    """One row of `datasets`. credit: tokens that count as read beside the true ones. is_active:
    whether the source was in the run that saved it."""

    spec: str
    rows: int
    tokens: int
    credit: int = 0
    is_active: bool = True


def read_offsets(value: object) -> list[Offset]:
    """Check the `datasets` of a state. A missing `token_offset` is 0.

    Raises:
        StateError: It is not a list of such rows, or a spec appears twice (E-STATE-FORMAT).
    """
    if not isinstance(value, list):
        raise _malformed(f"datasets {type(value).__name__}", "a list")
    offsets = [_read_offset(row, i) for i, row in enumerate(value)]
    specs = [offset.spec for offset in offsets]
    for spec in specs:
        if specs.count(spec) > 1:
            raise _malformed(f"spec {spec!r} twice", "each once")
    return offsets


def offset_rows(plan: LoaderPlan, counts: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The `datasets` of a state: what the plan began with and `counts` together, sources of the
    plan first."""
    began = {consumed.source: consumed for consumed in plan.consumed}
    rows: list[dict[str, Any]] = []
    for source in plan.sources:
        before = began.pop(source.name, None)
        row: dict[str, Any] = {
            "spec": source.spec or source.name,
            "row_offset": int(counts[source.name]["sequences"]) + (before.rows if before else 0),
            "token_offset": int(counts[source.name]["tokens"]) + (before.tokens if before else 0),
        }
        if before and before.credit:
            row["token_credit"] = before.credit
        rows.append(row)
    for before in began.values():
        row = {"spec": before.source, "row_offset": before.rows, "token_offset": before.tokens}
        rows.append(row | {"active": False})
    return rows


def plan_counts(plan: LoaderPlan, offsets: Sequence[Offset]) -> dict[str, Offset]:
    """The offsets of the plan's own sources by name.

    Raises:
        StateError: A spec could be of two sources, or two specs are of one (E-STATE-SPEC).
    """
    found: dict[str, Offset] = {}
    for offset in offsets:
        name = _source_of(plan.sources, offset.spec)
        if name is None:
            continue
        if name in found:
            raise StateError(
                f"two specs are of source {name!r}",
                found=f"{found[name].spec!r} and {offset.spec!r}",
                code="E-STATE-SPEC",
            )
        found[name] = offset
    return found


def windows_read(plan: LoaderPlan, offset: Offset) -> int:
    """Windows of a source that its counts cover. Rows of another length than the plan's sequences
    are taken by their tokens, up to the next whole window."""
    if offset.tokens in (0, offset.rows * plan.seq_len):
        return offset.rows
    return -(-offset.tokens // plan.seq_len)


def continuation(plan: LoaderPlan, offsets: Sequence[Offset]) -> LoaderPlan:
    """The plan that goes on where the counts end.

    Raises:
        StateError: A spec is ambiguous (E-STATE-SPEC), or nothing is left to read (E-STATE-END).
    """
    own = plan_counts(plan, offsets)
    credits = _credits(plan, own)
    consumed = []
    for source in plan.sources:
        offset = own.get(source.name, Offset(source.name, 0, 0))
        windows = windows_read(plan, offset)
        credit = credits.get(source.name, 0)
        if windows or offset.rows or offset.tokens or credit:
            consumed.append(Consumed(source.name, windows, offset.rows, offset.tokens, credit))
    known = set(own.values())
    consumed += [Consumed(o.spec, 0, o.rows, o.tokens, 0) for o in offsets if o not in known]
    return without_consumed(plan, tuple(consumed))


def without_consumed(plan: LoaderPlan, consumed: tuple[Consumed, ...]) -> LoaderPlan:
    """The plan less what was consumed, its later stages and phases where they were.

    What was read is charged to the stages in order, up to a whole step, so stage and phase starts
    stay at their global sequence and those still to come keep their shares. The stage in which the
    counts end is completed as near to its quotas as they allow.

    Raises:
        StateError: Nothing is left to read (E-STATE-END).
    """
    num_read = sum(c.sequences for c in consumed)
    uncharged = -(-num_read // plan.batch_size) * plan.batch_size
    have = {c.source: c.sequences for c in consumed}
    stages: list[PlanStage] = []
    for stage in plan.stages:
        charged = min(uncharged, stage.num_sequences)
        uncharged -= charged
        if charged < stage.num_sequences:
            stages.append(_completed(stage, charged, have) if charged else stage)
        else:
            for source in stage.sources:
                taken = min(have.get(source.name, 0), source.quota_sequences)
                have[source.name] = have.get(source.name, 0) - taken
    if sum(stage.num_sequences for stage in stages) < plan.batch_size:
        raise StateError(
            "the state is at the plan's end",
            where=plan.plan_id,
            found=f"{num_read} sequences read",
            expected=f"a step less than {plan.num_sequences}",
            code="E-STATE-END",
        )
    return replace(plan, stages=tuple(stages), consumed=consumed)


def _completed(stage: PlanStage, charged: int, have: Mapping[str, int]) -> PlanStage:
    """What is left of a stage after `charged` of its sequences, `have` of each source among them.

    A source that had more than its quota gets no more, and the others that much less between them,
    in the proportion of what they lack.
    """
    had = [have.get(source.name, 0) for source in stage.sources]
    if sum(had) > charged:  # the rest was read in the place of others in the stages before
        had = quotas(charged, had)
    lacking = [max(0, s.quota_sequences - n) for s, n in zip(stage.sources, had)]
    left = stage.num_sequences - charged
    shares = quotas(left, lacking) if left < sum(lacking) else lacking
    sources = zip(stage.sources, shares)
    return replace(stage, sources=tuple(replace(s, quota_sequences=n) for s, n in sources))


def _credits(plan: LoaderPlan, own: Mapping[str, Offset]) -> dict[str, int]:
    """Tokens that count as read, so that sources new to the run start level with the lowest
    counter, tokens / weight, of those that were in it."""
    if plan.policy != "least_consumed":
        return {}
    weights = {source.name: source.weight for source in plan.stages[0].sources}
    active = {
        name: own[name].tokens + own[name].credit
        for name in weights
        if name in own and own[name].is_active
    }
    if not active:
        return {}
    lowest = min(active, key=lambda name: (active[name] * 2**200 // weights[name], name))
    credits = {}
    for name, weight in weights.items():
        if name in active:
            credits[name] = own[name].credit
        else:
            level = active[lowest] * weight // weights[lowest]
            credits[name] = max(0, level - (own[name].tokens if name in own else 0))
    return credits


def _source_of(sources: Sequence[SourceData], spec: str) -> str | None:
    """Name of the source that a spec means: by its spec, its name, or the hub name or path in the
    spec."""
    exact = {source.name for source in sources if spec in (source.spec, source.name)}
    origin = _origin(spec)
    named = exact or {
        source.name
        for source in sources
        if origin in (source.name, _origin(source.spec or source.name))
        or PurePosixPath(origin).name == source.name
    }
    if len(named) > 1:
        raise StateError(
            "a spec could be of several sources",
            found=repr(spec),
            expected=f"one of {', '.join(sorted(named))}",
            code="E-STATE-SPEC",
        )
    return next(iter(named), None)


def _origin(spec: str) -> str:
    """The hub name or path of `hf:REPO[:CONFIG][:SPLIT][:TEXT_KEY]` or `txt:PATH[:TEXT_KEY]`."""
    kind, colon, rest = spec.partition(":")
    return rest.split(":")[0] if colon and kind in ("hf", "txt") else spec


def _read_offset(row: object, i: int) -> Offset:
    where = f"datasets[{i}]"
    if not isinstance(row, Mapping):
        raise _malformed(f"{where} {type(row).__name__}", "a mapping")
    spec = row.get("spec")
    if not isinstance(spec, str) or not _origin(spec):
        raise _malformed(f"{where}.spec = {spec!r}", "hf:NAME, txt:PATH or a source's name")
    counts = {}
    for key in ("row_offset", "token_offset", "token_credit"):
        count = row.get(key, None if key == "row_offset" else 0)
        if type(count) is not int or not 0 <= count < 2**62:
            raise _malformed(f"{where}.{key} = {count!r}"[:120], "an int of at least 0")
        counts[key] = count
    return Offset(
        spec,
        counts["row_offset"],
        counts["token_offset"],
        counts["token_credit"],
        row.get("active", True) is not False,
    )


def _malformed(found: str, expected: str) -> StateError:
    return StateError("not a loader state", found=found, expected=expected, code="E-STATE-FORMAT")
