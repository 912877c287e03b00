"""A saved loader position: small, equal on all ranks, and bound to its plan.

The position is one number, the global sequence index. Beside it a state carries the identity of the
plan, so that a refusal can name what differs, and counts per source. A batch size that differs is
taken: the sequences are the same. States of version 1 (other loaders of this layout) are taken by
their index where what else they hold agrees with the plan; a state that is only counts per source
is taken by those, see `loader.offsets`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from loader.errors import StateError
from loader.offsets import (
    continuation,
    offset_rows,
    plan_counts,
    read_offsets,
    windows_read,
    without_consumed,
)
from loader.plan import Consumed, LoaderPlan

STATE_VERSION = 2


def make_state(
    plan: LoaderPlan, split: str, n: int, metrics: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """The state at global sequence `n`; JSON values only."""
    state = {
        "version": STATE_VERSION,
        "split": split,
        "global_sequence_index": n,
        "plan_hash": plan.plan_hash,
        "plan": plan.identity(),
        "sources": {name: dict(counts) for name, counts in metrics.items()},
    }
    return state | {"datasets": offset_rows(plan, metrics)} if split == "train" else state


class Counted(Protocol):
    """A stream whose position is known by counts: `loader.stream.Stream`."""

    num_sequences: int

    def counts_before(self, n: int) -> np.ndarray:
        """Sequences of each source among the first `n`."""
        ...


def resume(state: object, plan: LoaderPlan, split: str, stream: Counted) -> tuple[LoaderPlan, int]:
    """The plan to go on with and the global sequence index in it.

    That is `plan` itself unless the state counts what another run read; then it is the plan that
    goes on from there, whose index starts at 0.

    Raises:
        StateError: As `read_state`; counts that name a source twice (E-STATE-SPEC) or leave nothing
            to read (E-STATE-END).
    """
    if isinstance(state, Mapping) and "version" not in state and "datasets" in state:
        if split != "train":
            raise StateError("counts of train", expected=repr(split), code="E-STATE-SPLIT")
        return _resume_counts(state["datasets"], plan, stream)
    if isinstance(state, Mapping) and isinstance(state.get("plan"), Mapping):
        plan = _with_consumed(plan, state["plan"].get("consumed", []))
    n = read_state(state, plan, split)
    if isinstance(state, Mapping) and state["version"] == 1 and split == "train":
        _refuse_other_stream(state, n, plan, stream)
    return plan, n


def _resume_counts(value: object, plan: LoaderPlan, stream: Counted) -> tuple[LoaderPlan, int]:
    if plan.consumed:
        raise StateError(
            "the plan goes on from another run's counts already",
            where=plan.plan_id,
            do="load the counts into the plan that it was made of",
            code="E-STATE-PLAN",
        )
    offsets = read_offsets(value)
    own = plan_counts(plan, offsets)
    counts = [windows_read(plan, own[s.name]) if s.name in own else 0 for s in plan.sources]
    n = sum(counts)
    is_place = (
        len(own) == len(offsets) == len(plan.sources)
        and n <= stream.num_sequences
        and n % plan.batch_size == 0
        and stream.counts_before(n).tolist() == counts
    )
    if is_place:  # a place in this very stream needs no other plan
        return plan, n
    return continuation(plan, offsets), 0


def _with_consumed(plan: LoaderPlan, value: object) -> LoaderPlan:
    """The plan that goes on from a state's own `consumed`, where `plan` starts from nothing."""
    if not value or plan.consumed or not isinstance(value, list):
        return plan
    try:
        consumed = tuple(Consumed(**row) for row in value)
        if all(type(c.sequences) is int for c in consumed):
            return without_consumed(plan, consumed)
    except TypeError:
        pass
    raise _malformed("plan.consumed", "the sources that were read before the plan")


def read_state(state: object, plan: LoaderPlan, split: str) -> int:
    """The global sequence index of a state that belongs to `plan`.

    Raises:
        StateError: Not a state (E-STATE-FORMAT), of another split (E-STATE-SPLIT), or of another
            plan (E-STATE-PLAN); names what differs.
    """
    if not isinstance(state, Mapping):
        raise _malformed(type(state).__name__, "a mapping")
    version = state.get("version")
    if type(version) is not int or version not in (1, STATE_VERSION):
        raise _malformed(f"version {version!r}", "1 or 2")
    n = state.get("global_sequence_index")
    if type(n) is not int or n < 0:
        raise _malformed(f"global_sequence_index = {n!r}", "an int of at least 0")
    if version == STATE_VERSION:
        _refuse_other_plan(state, plan, split)
    return n


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
    raise StateError(
        f"state of another plan: {where} differs",
        found=f"{found!r}"[:120],
        expected=f"{expected!r}"[:120],
        do="resume with the plan that the state was saved under",
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


def _refuse_other_stream(
    state: Mapping[str, Any], n: int, plan: LoaderPlan, stream: Counted
) -> None:
    """Refuse a state of version 1 whose parts say that its stream was another than the plan's.

    Its loaders drew by smooth round-robin, took windows every seq_len + 1 tokens and counted the
    sequences of each source in the current stage.
    """
    for part, key, own in (
        ("accumulators", "policy", "swrr"),
        ("cursors", "window_stride", "seq_len+1"),
    ):
        if any(_values(state.get(part))) and getattr(plan, key) != own:
            raise _other_version_1(key, repr(own), repr(getattr(plan, key)), f"set {key} = {own!r}")
    emitted, stage = state.get("emitted_sequences") or {}, state.get("stage_index", 0)
    if not isinstance(emitted, Mapping) or type(stage) is not int or stage < 0:
        raise _malformed(f"stage_index {stage!r}, emitted_sequences {emitted!r}"[:120], "counts")
    first = sum(earlier.num_sequences for earlier in plan.stages[:stage])
    if not emitted or not first <= n <= stream.num_sequences:
        return  # no counts, or a position that `seek` refuses
    counts = (stream.counts_before(n) - stream.counts_before(first)).tolist()
    own_counts = dict(zip((source.name for source in plan.sources), counts))
    for name, count in emitted.items():
        if count != own_counts.get(name, 0):
            raise _other_version_1(
                f"emitted_sequences[{name}]",
                count,
                own_counts.get(name, 0),
                "make the plan of the mixture and budgets that the state was saved under",
            )


def _values(part: Any) -> list[Any]:
    """The numbers in a part of a state, however it nests them."""
    rows = part.values() if isinstance(part, Mapping) else part
    return [x for row in rows for x in _values(row)] if isinstance(part, Mapping | list) else [part]


def _other_version_1(where: str, found: object, expected: object, do: str) -> StateError:
    return StateError(
        f"state of another plan: {where} differs",
        found=found,
        expected=expected,
        do=do,
        code="E-STATE-PLAN",
    )


def _first_difference(where: str, found: Any, expected: Any) -> tuple[str, Any, Any] | None:
    """Name of the first value that differs, and both values; rows that have a name go by it."""
    if isinstance(found, Mapping) and isinstance(expected, Mapping):
        keys = list(dict.fromkeys([*expected, *found]))
        pairs = [(f"{where}.{key}", found.get(key), expected.get(key)) for key in keys]
    elif isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        pairs = [(f"{where}[{_name(e, i)}]", f, e) for i, (f, e) in enumerate(zip(found, expected))]
    else:
        return None if found == expected else (where, found, expected)
    differences = (_first_difference(*pair) for pair in pairs)
    return next((difference for difference in differences if difference), None)


def _name(row: Any, i: int) -> object:
    return row.get("name", i) if isinstance(row, Mapping) else i


def _malformed(found: str, expected: str) -> StateError:
    return StateError("not a loader state", found=found, expected=expected, code="E-STATE-FORMAT")
