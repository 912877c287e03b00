"""A saved loader position: small, equal on all ranks, bound to its plan and sealed.

The position is one number, the global sequence index. A state also holds the plan's identity, so
that a refusal can name what differs, and counts per source. It loads at another batch size, whose
sequences are the same. Counts per source alone are a state too (`loader.plan.continuation`), and
states of versions 1 and 2 load where they agree with the plan (`loader.old_states`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from loader.errors import StateError
from loader.files.sealed import check_seal, sealed
from loader.old_states import malformed, refuse_other_counts, refuse_other_stream
from loader.plan.continuation import (
    continuation,
    offset_rows,
    plan_counts,
    read_offsets,
    refuse_other_reading,
    windows_read,
    without_consumed,
)
from loader.plan.records import Consumed, LoaderPlan
from loader.rows.stream import Stream

STATE_VERSION = 3
_GO_ON = 'or go on from its counts under this plan: load {"datasets": state["datasets"]}'


def make_state(
    plan: LoaderPlan, split: str, n: int, metrics: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """The state at global sequence `n`; JSON values only."""
    state: dict[str, Any] = {
        "version": STATE_VERSION,
        "split": split,
        "global_sequence_index": n,
        "plan_hash": plan.plan_hash,
        "plan": plan.identity(),
        "sources": {name: dict(counts) for name, counts in metrics.items()},
    }
    if split == "train":
        state["datasets"] = offset_rows(plan, metrics)
    return sealed(state)


def resume(state: object, plan: LoaderPlan, split: str, stream: Stream) -> tuple[LoaderPlan, int]:
    """The plan to go on with and the global sequence index in it.

    That is `plan` itself unless the state counts what another run read; then it is the plan that
    goes on from there, whose index starts at 0.

    Raises:
        StateError: Not a state, or edited (E-STATE-FORMAT); of another split (E-STATE-SPLIT) or of
            another plan (E-STATE-PLAN), by what differs; counts that name a source twice
            (E-STATE-SPEC), are of other data (E-STATE-DATA) or leave nothing to read (E-STATE-END).
    """
    if isinstance(state, Mapping) and "version" not in state and "datasets" in state:
        if split != "train":
            raise StateError("counts of train", expected=repr(split), code="E-STATE-SPLIT")
        return _resume_counts(state["datasets"], plan, stream)
    state, n = _position(state)
    if isinstance(state.get("plan"), Mapping):
        plan = _with_consumed(plan, state, stream.capacities)
    if state["version"] != 1:
        _refuse_other_plan(state, plan, split)
        if state["version"] == 2:
            refuse_other_counts(state, n, plan, split, stream)
    elif split == "train":
        refuse_other_stream(state, n, plan, stream)
    return plan, n


def _resume_counts(value: object, plan: LoaderPlan, stream: Stream) -> tuple[LoaderPlan, int]:
    if plan.consumed:
        raise StateError(
            "the plan goes on from another run's counts already",
            where=plan.plan_id,
            do="load the counts into the plan that it was made of",
            code="E-STATE-PLAN",
        )
    offsets = read_offsets(value)
    own = plan_counts(plan, offsets)
    refuse_other_reading(plan, own)
    counts = [windows_read(plan, own[s.name]) if s.name in own else 0 for s in plan.sources]
    n = sum(counts)
    is_place = (
        len(own) == len(offsets) == len(plan.sources)
        and n <= stream.num_sequences
        and n % plan.batch_size == 0
        and stream.schedule.counts_before(n).tolist() == counts
    )
    if is_place:  # a place in this very stream needs no other plan
        return plan, n
    return continuation(plan, offsets, stream.capacities), 0


def _with_consumed(
    plan: LoaderPlan, state: Mapping[str, Any], capacities: Sequence[int]
) -> LoaderPlan:
    """The plan that goes on from a state's own `consumed`, where `plan` starts from nothing."""
    value = state["plan"].get("consumed")
    if not value or plan.consumed:
        return plan
    if state.get("version") == 2:
        raise StateError(
            "state of a run that went on from counts under an earlier version",
            found="shares of the whole run",
            expected="shares of what was left",
            do='go on from its counts: load {"datasets": state["datasets"]}',
            code="E-STATE-PLAN",
        )
    try:
        consumed = tuple(Consumed(**row) for row in value)
        if all(type(c.sequences) is int for c in consumed):
            return without_consumed(plan, consumed, capacities)
    except TypeError:
        pass
    raise malformed("plan.consumed", "the sources that were read before the plan")


def _position(state: object) -> tuple[Mapping[str, Any], int]:
    """A state that is one, and is as it was saved, and its global sequence index."""
    if not isinstance(state, Mapping):
        raise malformed(type(state).__name__, "a mapping")
    version = state.get("version")
    if type(version) is not int or not 1 <= version <= STATE_VERSION:
        raise malformed(f"version {version!r}", f"1 to {STATE_VERSION}")
    if version == STATE_VERSION:
        try:
            do = "load the state as it was saved"
            check_seal(
                state, "state", required=True, code="E-STATE-FORMAT", error=StateError, do=do
            )
        except (TypeError, ValueError) as error:
            if isinstance(error, StateError):
                raise
            raise malformed(str(error), "JSON values") from None
    n = state.get("global_sequence_index")
    if type(n) is not int or n < 0:
        raise malformed(f"global_sequence_index = {n!r}", "an int of at least 0")
    return state, n


def _refuse_other_plan(state: Mapping[str, Any], plan: LoaderPlan, split: str) -> None:
    if state.get("split") != split:
        raise StateError(
            "state of another split",
            found=repr(state.get("split")),
            expected=repr(split),
            code="E-STATE-SPLIT",
        )
    if state.get("plan_hash") == plan.plan_hash:
        return
    difference = None
    if isinstance(state.get("plan"), Mapping):
        difference = _first_difference("plan", state["plan"], plan.identity())
        if difference and _has_same_sequences(state, plan):
            return
    where, found, expected = difference or ("plan_hash", state.get("plan_hash"), plan.plan_hash)
    do = "resume with the plan that the state was saved under"
    is_share = where.startswith("plan.stages") and not where.endswith((".content_hash", "_tokens"))
    if split == "train" and is_share:
        do = f"{do}, {_GO_ON}"
    raise StateError(
        f"state of another plan: {where} differs",
        found=None if found is expected else f"{found!r}"[:120],
        expected=None if found is expected else f"{expected!r}"[:120],
        do=do,
        code="E-STATE-PLAN",
    )


def _has_same_sequences(state: Mapping[str, Any], plan: LoaderPlan) -> bool:
    """Whether the state's plan is `plan` at another batch size, phases at the same sequences."""
    batch_size = state["plan"].get("batch_size")
    if type(batch_size) is not int or batch_size < 1:
        return False
    stages = []
    for stage in plan.stages:
        step, rest = divmod(stage.start_step * plan.batch_size, batch_size)
        if rest:
            return False
        base = stage.name.removesuffix(f"@{stage.start_step}")
        name = stage.name if base == stage.name else f"{base}@{step}"
        stages.append(replace(stage, name=name, start_step=step))
    other = replace(plan, batch_size=batch_size, stages=tuple(stages))
    return state.get("plan_hash") == other.plan_hash


def _first_difference(where: str, found: Any, expected: Any) -> tuple[str, Any, Any] | None:
    """Name of the first value that differs, and both values; rows that have a name go by it."""
    if isinstance(found, Mapping) and isinstance(expected, Mapping):
        keys = list(dict.fromkeys([*expected, *found]))
        pairs = [(f"{where}.{key}", found.get(key), expected.get(key)) for key in keys]
    elif isinstance(found, list) and isinstance(expected, list):
        names = [[str(_name(row, i)) for i, row in enumerate(rows)] for rows in (found, expected)]
        if set(names[0]) != set(names[1]):
            return f"{where} ({_changes(*names)})", None, None
        if len(found) != len(expected):
            return where, f"{len(found)} rows", f"{len(expected)} rows"
        pairs = [(f"{where}[{_name(e, i)}]", f, e) for i, (f, e) in enumerate(zip(found, expected))]
    else:
        return None if found == expected else (where, found, expected)
    differences = (_first_difference(*pair) for pair in pairs)
    return next((difference for difference in differences if difference), None)


def _changes(found: Sequence[str], expected: Sequence[str]) -> str:
    """What a plan's list of names has and a state's has not, and the other way round."""
    new = [name for name in expected if name not in found]
    gone = [name for name in found if name not in expected]
    parts = [("added", new), ("removed", gone)]
    return "; ".join(f"{what}: {', '.join(names[:8])}" for what, names in parts if names)


def _name(row: Any, i: int) -> object:
    return row.get("name", i) if isinstance(row, Mapping) else i
