"""Counts of read data per source, in the format of token-balance, and plans that continue from
these counts.

`{"datasets": [{"spec", "row_offset", "token_offset"}, ...]}` counts rows and tokens per source.
`content_hash` and `order` are additions of this project: with them the loader can refuse counts
that belong to other data or to another order. Counts become part of a new plan: each source
continues after the windows that were read, and the weights apply only to the remaining steps.
Stages and phases still start at the same global steps. Counts of sources that the plan does not
have are kept unchanged.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

from loader.errors import StateError
from loader.plan.mixture import quotas
from loader.plan.records import Consumed, LoaderPlan, SourceData
from loader.plan.schedule import PlanSchedule

# The keys of a row of `datasets` with their defaults; None if the key is required.
_ROW = {"spec": None, "row_offset": None, "token_offset": 0, "content_hash": "", "order": ""}


def malformed(found: str, expected: str) -> StateError:
    return StateError("not a loader state", found=found, expected=expected, code="E-STATE-FORMAT")


def reading_order(plan: LoaderPlan) -> str:
    """A description of the order in which the windows of a source are read. Empty for unshuffled
    windows without overlap, for which a count of tokens is a position at any `seq_len`."""
    how = "shuffled in blocks" if plan.shuffle_blocks else "shuffled"
    seed = f", {how} with seed {plan.seed}" if plan.shuffles else ""
    if not seed and (plan.packing, plan.window_stride) == ("concat", "seq_len"):
        return ""
    twins = "".join(f", twin {t.content_hash} by {t.seq_len} and {t.stride}" for t in plan.twins)
    return f"{plan.packing}, seq_len {plan.seq_len}, stride {plan.window_stride}{seed}{twins}"


def offset_rows(plan: LoaderPlan, counts: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The `datasets` of a state: the plan's initial counts plus `counts`, sources of the plan
    first."""
    began = {consumed.source: consumed for consumed in plan.consumed}
    order = reading_order(plan)
    offsets = []
    for source in plan.sources:
        before = began.pop(source.name, None)
        own = counts[source.name]
        rows = int(own["sequences"])
        tokens = int(own["tokens"])
        if before is not None:
            rows = rows + before.rows
            tokens = tokens + before.tokens
        offsets.append((source.spec or source.name, rows, tokens, source.content_hash, order))
    for c in began.values():
        offsets.append((c.source, c.rows, c.tokens, c.content_hash, c.order))
    return [{k: v for k, v in zip(_ROW, offset) if v != ""} for offset in offsets]


def resume_counts(
    plan: LoaderPlan, value: object, schedule: PlanSchedule, capacities: Sequence[int]
) -> tuple[LoaderPlan, int]:
    """The plan that continues from counts (the `datasets` of a state), and the sequence index to
    continue from. If the counts match a position in the plan's stream, this is `plan`; otherwise it
    is a new plan, which starts at 0. Raises StateError if the rows are malformed or name a spec
    twice (E-STATE-FORMAT), a spec is ambiguous or two specs name the same source (E-STATE-SPEC),
    the data or the order of a source differs (E-STATE-DATA), `plan` already continues from counts
    (E-STATE-PLAN), or no data are left to read (E-STATE-END)."""
    if plan.consumed:
        raise StateError(
            "the plan already continues from another run's counts",
            where=plan.plan_id,
            do="load the counts under the plan that this plan was made from",
            code="E-STATE-PLAN",
        )
    consumed = _read_consumed(plan, value)
    order = reading_order(plan)
    own = _of_plan(plan, consumed)
    for source in plan.sources:
        if source.name in own:
            refuse_other_reading(source, own[source.name], order)
    counts = [own[s.name].sequences if s.name in own else 0 for s in plan.sources]
    n = sum(counts)
    is_place = (
        len(own) == len(consumed) == len(plan.sources)
        and n <= schedule.num_sequences
        and n % plan.batch_size == 0
        and schedule.counts_before(n).tolist() == counts
    )
    if is_place:
        return plan, n
    known = []
    for name, digest in ((source.name, source.content_hash) for source in plan.sources):
        if name in own and (own[name].rows or own[name].tokens):
            # If windows are shuffled or overlap, only complete windows can be counted.
            rows = own[name].sequences if order else own[name].rows
            read = replace(own[name], source=name, rows=rows, content_hash=digest, order=order)
            known.append(read)
    unknown = [c for c in consumed if c not in own.values()]
    return without_consumed(plan, (*known, *unknown), capacities), 0


def without_consumed(
    plan: LoaderPlan, consumed: tuple[Consumed, ...], capacities: Sequence[int]
) -> LoaderPlan:
    """The plan of the remaining steps; later stages and phases still start at the same global
    steps.

    The sequences that were read, summed over sources, give the number of steps since the start; an
    incomplete step counts as complete. The stage that contains the next step keeps its remaining
    sequences, shared out by its weights. If the run reads its data to the end, the stage gets the
    remaining data instead. Raises StateError if no data are left to read (E-STATE-END)."""
    num_read = sum(c.sequences for c in consumed)
    done = -(-num_read // plan.batch_size) * plan.batch_size
    limits = dict(zip((s.name for s in plan.sources), plan.limits(capacities)))
    planned = plan.taken()
    last = plan.stages[-1].sources
    data_end_it = all(planned[source.name] == limits[source.name] for source in last)
    to_end = data_end_it and plan.policy != "epoch_weighted"
    taken = Counter({c.source: c.sequences for c in consumed})
    stages = []
    stop = 0
    for stage in plan.stages:
        stop += stage.num_sequences
        if to_end and stage is plan.stages[-1]:
            shares = [max(0, limits[s.name] - taken[s.name]) for s in stage.sources]
        elif stop - done >= stage.num_sequences:
            shares = [source.num_sequences for source in stage.sources]
        else:
            shares = quotas(max(0, stop - done), [source.weight for source in stage.sources])
        for source, share in zip(stage.sources, shares):
            taken[source.name] += share
        if any(shares):
            pairs = zip(stage.sources, shares)
            new = {"unread_sequences": 0, "owed_millionths": 0}
            sources = tuple(replace(source, quota_sequences=n, **new) for source, n in pairs)
            stages.append(replace(stage, sources=sources))
    if sum(stage.num_sequences for stage in stages) < plan.batch_size:
        raise StateError(
            "the state is at the plan's end",
            where=plan.plan_id,
            found=f"{num_read} sequences read",
            expected=f"a step less than {plan.num_sequences}",
            code="E-STATE-END",
        )
    return replace(plan, stages=tuple(stages), consumed=consumed)


def _of_plan(plan: LoaderPlan, consumed: Sequence[Consumed]) -> dict[str, Consumed]:
    """Counts of the sources of the plan, by name."""
    found: dict[str, Consumed] = {}
    for read in consumed:
        name = _source_of(plan.sources, read.source)
        if name in found:
            raise StateError(
                f"two specs name source {name!r}",
                found=f"{found[name].source!r} and {read.source!r}",
                code="E-STATE-SPEC",
            )
        if name is not None:
            found[name] = read
    return found


def _source_of(sources: Sequence[SourceData], spec: str) -> str | None:
    """Name of the source that a spec refers to, by its spec, its name, or the hub name or path in
    the spec."""
    origin = _origin(spec)
    named = {source.name for source in sources if spec in (source.spec, source.name)}
    if not named:
        last_part = PurePosixPath(origin).name
        for source in sources:
            own_origin = _origin(source.spec or source.name)
            if own_origin == origin or source.name in (origin, last_part):
                named.add(source.name)
    if len(named) > 1:
        raise StateError(
            "a spec matches several sources",
            found=repr(spec),
            expected=f"one of {', '.join(sorted(named))}",
            code="E-STATE-SPEC",
        )
    return next(iter(named), None)


def _origin(spec: str) -> str:
    """The hub name or path of `hf:REPO[:CONFIG][:SPLIT][:TEXT_KEY]` or `txt:PATH[:TEXT_KEY]`."""
    kind, colon, rest = spec.partition(":")
    return rest.split(":")[0] if colon and kind in ("hf", "txt") else spec


def refuse_other_reading(source: SourceData, read: Consumed, order: str) -> None:
    """Refuse counts of a source whose data or reading order has changed, since some windows would
    be read again and others skipped. Counts without a content_hash are accepted."""
    if not read.content_hash or not (read.rows or read.tokens):
        return
    where = f"source {source.name!r}"
    if read.content_hash != source.content_hash:
        raise StateError(
            "the counts belong to other data",
            where=where,
            found=f"content_hash {source.content_hash}",
            expected=read.content_hash,
            do="restore the data, or give the changed data another name to read it from 0",
            code="E-STATE-DATA",
        )
    if read.order != order:
        raise StateError(
            "the counts belong to another reading order",
            where=where,
            found=order or "no shuffle, no overlap",
            expected=read.order or "no shuffle, no overlap",
            do="keep packing, shuffle, seed, seq_len and window_stride of the earlier run",
            code="E-STATE-DATA",
        )


def _read_consumed(plan: LoaderPlan, value: object) -> list[Consumed]:
    """The rows of `datasets`, each with the number of the plan's windows that it covers. If rows
    have another length than the plan's sequences, their tokens count, rounded up to a window."""
    if not isinstance(value, list):
        raise malformed(f"datasets {type(value).__name__}", "a list")
    found: dict[str, Consumed] = {}
    for i, row in enumerate(value):
        where = f"datasets[{i}]"
        if not isinstance(row, Mapping):
            raise malformed(f"{where} {type(row).__name__}", "a mapping")
        given = {key: row.get(key, default) for key, default in _ROW.items()}
        for key, item in given.items():
            expected = "a text"
            is_good = isinstance(item, str)
            if key == "spec":
                expected = "hf:NAME, txt:PATH or a source's name"
                is_good = is_good and _origin(item)
            elif key.endswith("_offset"):
                expected = "an int of at least 0"
                is_good = type(item) is int and 0 <= item < 2**62
            if not is_good:
                raise malformed(f"{where}.{key} = {item!r}"[:120], expected)
        spec, rows, tokens, digest, order = given.values()
        if spec in found:
            raise malformed(f"spec {spec!r} twice", "unique specs")
        is_ours = bool(digest and reading_order(plan))
        is_whole = is_ours or tokens in (0, rows * plan.seq_len)
        windows = rows if is_whole else -(-tokens // plan.seq_len)
        found[spec] = Consumed(spec, windows, rows, tokens, digest, order)
    return list(found.values())
