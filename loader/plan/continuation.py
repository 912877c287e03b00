"""Counts per source, in the token-balance document's form, and plans that continue after them.

`{"datasets": [{"spec", "row_offset", "token_offset"}, ...]}` counts rows and tokens per source.
`content_hash` and `order` beside them are ours, so that counts of other data or of another order
are refused. Counts become part of a new plan, so its stream stays a pure function of the position:
each source goes on after the windows that were read, and the steps that are left are shared among
its weights alone. Stages and phases stay at their global step. A source that only the counts know
is kept as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any

from loader.errors import StateError
from loader.plan.mixture import quotas
from loader.plan.records import Consumed, LoaderPlan, PlanStage, SourceData


@dataclass(frozen=True, slots=True)
class Offset:
    """One row of `datasets`; `content_hash` and `order` are blank where it does not say."""

    spec: str
    rows: int
    tokens: int
    content_hash: str = ""
    order: str = ""


def reading_order(plan: LoaderPlan) -> str:
    """In which order the windows of a source are read. Blank for its own order in windows that lie
    end to end: there a count of tokens is a position at any `seq_len`."""
    seed = f", shuffled with seed {plan.seed}" if plan.shuffles else ""
    if not seed and (plan.packing, plan.window_stride) == ("concat", "seq_len"):
        return ""
    return f"{plan.packing}, seq_len {plan.seq_len}, stride {plan.window_stride}{seed}"


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
    order, rows = reading_order(plan), []
    for source in plan.sources:
        before, own = began.pop(source.name, None), counts[source.name]
        offset = Offset(
            source.spec or source.name,
            int(own["sequences"]) + (before.rows if before else 0),
            int(own["tokens"]) + (before.tokens if before else 0),
            source.content_hash,
            order,
        )
        rows.append(_row(offset))
    gone = (Offset(c.source, c.rows, c.tokens, c.content_hash, c.order) for c in began.values())
    return rows + [_row(offset) for offset in gone]


def _row(offset: Offset) -> dict[str, Any]:
    row = {"spec": offset.spec, "row_offset": offset.rows, "token_offset": offset.tokens}
    known = {"content_hash": offset.content_hash, "order": offset.order}
    return row | {key: value for key, value in known.items() if value}


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


def refuse_other_reading(plan: LoaderPlan, own: Mapping[str, Offset]) -> None:
    """Refuse counts of a source whose data or reading order was another: the windows that they
    count would be read again, and others passed over. Counts that do not say are taken.

    Raises:
        StateError: Names the source (E-STATE-DATA).
    """
    order = reading_order(plan)
    for source in plan.sources:
        offset = own.get(source.name)
        if offset is None or not offset.content_hash or not (offset.rows or offset.tokens):
            continue
        where = f"source {source.name!r}"
        if offset.content_hash != source.content_hash:
            raise StateError(
                "the counts are of other data",
                where=where,
                found=f"content_hash {source.content_hash}",
                expected=offset.content_hash,
                do="restore the data, or give the changed data another name to read it from 0",
                code="E-STATE-DATA",
            )
        if offset.order != order:
            raise StateError(
                "the counts are of another reading order",
                where=where,
                found=order or "its own order",
                expected=offset.order or "its own order",
                do="keep packing, shuffle, seed, seq_len and window_stride of the run before",
                code="E-STATE-DATA",
            )


def windows_read(plan: LoaderPlan, offset: Offset) -> int:
    """Windows of a source that its counts cover. Rows of another length than the plan's sequences
    are taken by their tokens, up to the next whole window."""
    is_ours = bool(offset.content_hash and reading_order(plan))
    if is_ours or offset.tokens in (0, offset.rows * plan.seq_len):
        return offset.rows
    return -(-offset.tokens // plan.seq_len)


def continuation(
    plan: LoaderPlan, offsets: Sequence[Offset], capacities: Sequence[int]
) -> LoaderPlan:
    """The plan that goes on where the counts end.

    Args:
        plan: The plan of the whole run.
        offsets: What was read.
        capacities: Windows that each of the plan's sources holds.

    Raises:
        StateError: A spec is ambiguous (E-STATE-SPEC), or nothing is left to read (E-STATE-END).
    """
    own, order = plan_counts(plan, offsets), reading_order(plan)
    consumed = []
    for source in plan.sources:
        offset = own.get(source.name)
        if offset is None or not (offset.rows or offset.tokens):
            continue
        windows = windows_read(plan, offset)
        # In an order of its own a window is the only row that can be counted on.
        rows, digest = windows if order else offset.rows, source.content_hash
        consumed.append(Consumed(source.name, windows, rows, offset.tokens, digest, order))
    known = set(own.values())
    consumed += [
        Consumed(o.spec, windows_read(plan, o), o.rows, o.tokens, o.content_hash, o.order)
        for o in offsets
        if o not in known
    ]
    return without_consumed(plan, tuple(consumed), capacities)


def without_consumed(
    plan: LoaderPlan, consumed: tuple[Consumed, ...], capacities: Sequence[int]
) -> LoaderPlan:
    """The plan of the steps that are left, its later stages and phases where they were.

    What was read, of whichever source, took steps from the start; a begun step counts as done. The
    stage that holds the next step keeps what is left of its length, shared among its weights. A run
    that reads its data to their ends has all that is left of them instead.

    Raises:
        StateError: Nothing is left to read (E-STATE-END).
    """
    num_read = sum(c.sequences for c in consumed)
    done = -(-num_read // plan.batch_size) * plan.batch_size
    limits = dict(zip((s.name for s in plan.sources), plan.limits(capacities)))
    to_end = _reads_to_end(plan, limits)
    taken = {c.source: c.sequences for c in consumed}
    stages: list[PlanStage] = []
    stop = 0
    for stage in plan.stages:
        stop += stage.num_sequences
        names, weights = zip(*((source.name, source.weight) for source in stage.sources))
        if to_end and stage is plan.stages[-1]:
            shares = [max(0, limits[name] - taken.get(name, 0)) for name in names]
        elif stop - done >= stage.num_sequences:
            shares = [source.quota_sequences for source in stage.sources]
        else:
            shares = quotas(max(0, stop - done), weights)
        for name, share in zip(names, shares):
            taken[name] = taken.get(name, 0) + share
        if any(shares):
            stages.append(_with_quotas(stage, shares))
    if sum(stage.num_sequences for stage in stages) < plan.batch_size:
        raise StateError(
            "the state is at the plan's end",
            where=plan.plan_id,
            found=f"{num_read} sequences read",
            expected=f"a step less than {plan.num_sequences}",
            code="E-STATE-END",
        )
    return replace(plan, stages=tuple(stages), consumed=consumed)


def _reads_to_end(plan: LoaderPlan, limits: Mapping[str, int]) -> bool:
    """Whether the plan's data end the run, not a number of steps."""
    last = [source.name for source in plan.stages[-1].sources]
    totals = dict.fromkeys(limits, 0)
    for stage in plan.stages:
        for source in stage.sources:
            totals[source.name] += source.quota_sequences
    return plan.policy != "epoch_weighted" and all(totals[name] == limits[name] for name in last)


def _with_quotas(stage: PlanStage, shares: Sequence[int]) -> PlanStage:
    sources = zip(stage.sources, shares)
    return replace(stage, sources=tuple(replace(s, quota_sequences=n) for s, n in sources))


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
    for key in ("row_offset", "token_offset"):
        count = row.get(key, None if key == "row_offset" else 0)
        if type(count) is not int or not 0 <= count < 2**62:
            raise _malformed(f"{where}.{key} = {count!r}"[:120], "an int of at least 0")
        counts[key] = count
    texts = {}
    for key in ("content_hash", "order"):
        texts[key] = row.get(key, "")
        if not isinstance(texts[key], str):
            raise _malformed(f"{where}.{key} = {texts[key]!r}"[:120], "a text")
    return Offset(spec, counts["row_offset"], counts["token_offset"], **texts)


def _malformed(found: str, expected: str) -> StateError:
    return StateError("not a loader state", found=found, expected=expected, code="E-STATE-FORMAT")
