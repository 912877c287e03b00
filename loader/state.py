"""A saved loader position: small, equal on all ranks, tied to its plan, with a checksum.

The position is one number, the global sequence index. A state also has the plan's identity, so that
an error can name the difference, and counts per source. A state can be loaded at another batch
size, since the sequences are the same, and under a plan that reads the same windows up to this
position, such as a remixed plan. Counts per source without a position can be loaded too
(`loader.plan.continuation`). States of versions 1 and 2 have no checksum: their other values must
match the global sequence index.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from loader.errors import PlanError, StateError
from loader.files.checksummed_json import check_seal, sealed
from loader.plan.check import check_plan
from loader.plan.continuation import malformed, offset_rows, resume_counts, without_consumed
from loader.plan.file import PlanFile
from loader.plan.records import PLAN_FORMATS, Consumed, LoaderPlan
from loader.plan.schedule import PlanSchedule
from loader.rows.stream import Stream

STATE_VERSION = 3
_REMIX = (
    ", change it by `nmoe remix PLAN --state STATE --weights A=1 --steps N -o NEW` (loader.remix)"
)
_COUNT = ', or load {"datasets": state["datasets"]} to continue from its counts'
# What a remix can change.
_REMIXED = ("plan.stages", "plan_hash")
# The values of a plan that may differ if the windows before the position are the same.
_MAY_DIFFER = ("stages", "batch_size", "masked", "on_exhaust", "max_epochs")
_ENDLESS = 2**40


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
    """The plan to continue with, and the global sequence index at which to continue.

    This is `plan`, unless the state has only counts of another run; then it is a new plan that
    continues from them, at index 0. Raises StateError if the state is malformed or edited
    (E-STATE-FORMAT), belongs to another split (E-STATE-SPLIT) or plan (E-STATE-PLAN, with the
    difference), or if its counts name a source twice (E-STATE-SPEC), belong to other data
    (E-STATE-DATA) or leave no data to read (E-STATE-END).
    """
    if isinstance(state, Mapping) and "version" not in state and "datasets" in state:
        if split != "train":
            raise StateError(
                "the state has only counts of training sequences, no position in this split",
                found="'train'",
                expected=repr(split),
                code="E-STATE-SPLIT",
            )
        return resume_counts(plan, state["datasets"], stream.schedule, stream.capacities)
    state, n = _position(state)
    plan = _in_format(plan, state)
    if state["version"] == 1:
        if split == "train":
            _refuse_other_stream(state, n, plan, stream)
        return plan, n
    if state["version"] == STATE_VERSION and isinstance(state.get("plan"), Mapping):
        plan = _with_consumed(plan, state["plan"].get("consumed"), stream.capacities)
    _refuse_other_plan(state, plan, split, stream)
    if state["version"] == 2:
        _refuse_other_counts(state, n, stream)
    return plan, n


def _position(state: object) -> tuple[Mapping[str, Any], int]:
    """Check the version and the checksum of a state; returns it with its global sequence index."""
    if not isinstance(state, Mapping):
        raise malformed(type(state).__name__, "a mapping")
    version = state.get("version")
    n = state.get("global_sequence_index")
    if type(version) is not int or not 1 <= version <= STATE_VERSION:
        raise malformed(f"version {version!r}", f"1 to {STATE_VERSION}")
    if version == STATE_VERSION:
        error = StateError
        do = "load the unchanged state"
        try:
            check_seal(state, "state", required=True, code="E-STATE-FORMAT", error=error, do=do)
        except StateError:
            raise
        except (TypeError, ValueError) as error:
            raise malformed(str(error), "JSON values") from None
    if type(n) is not int or n < 0:
        raise malformed(f"global_sequence_index = {n!r}", "an int of at least 0")
    return state, n


def _with_consumed(plan: LoaderPlan, value: Any, capacities: Sequence[int]) -> LoaderPlan:
    """The plan that continues from the `consumed` of a state, unless `plan` already continues a
    run."""
    if not value or plan.consumed:
        return plan
    try:
        consumed = tuple(Consumed(**row) for row in value)
        if all(type(c.sequences) is int for c in consumed):
            return without_consumed(plan, consumed, capacities)
    except TypeError:
        pass
    raise malformed("plan.consumed", "the sources that were read before the plan")


def _in_format(plan: LoaderPlan, state: Mapping[str, Any]) -> LoaderPlan:
    """The plan in the first format if the state's plan has it: a run keeps its format, even if its
    plan is built again from its settings."""
    first = replace(plan, format=PLAN_FORMATS[0])
    given = state.get("plan")
    has_first = isinstance(given, Mapping) and given.get("format") == first.format
    return first if has_first or state.get("plan_hash") == first.plan_hash else plan


def _refuse_other_plan(
    state: Mapping[str, Any], plan: LoaderPlan, split: str, stream: Stream
) -> None:
    if state.get("split") != split:
        raise StateError(
            "the state belongs to another split",
            found=repr(state.get("split")),
            expected=repr(split),
            code="E-STATE-SPLIT",
        )
    if state.get("plan_hash") == plan.plan_hash:
        return
    difference = None
    if isinstance(state.get("plan"), Mapping):
        difference = _first_difference("plan", state["plan"], plan.identity())
        if difference and _has_same_past(state, plan, split, stream):
            return
    where, found, expected = difference or ("plan_hash", state.get("plan_hash"), plan.plan_hash)
    do = "resume with the plan of the state"
    if split == "train" and not where.endswith((".content_hash", "_tokens")):
        do += _REMIX * where.startswith(_REMIXED) + _COUNT
    if found is expected:
        raise _other_plan(where, None, None, do)
    raise _other_plan(where, f"{found!r}"[:120], f"{expected!r}"[:120], do)


def _other_plan(where: str, found: object, expected: object, do: str) -> StateError:
    return StateError(
        f"the state belongs to another plan: {where} differs",
        found=found,
        expected=expected,
        do=do,
        code="E-STATE-PLAN",
    )


def _has_same_past(state: Mapping[str, Any], plan: LoaderPlan, split: str, stream: Stream) -> bool:
    """Whether the state's plan reads the same windows as `plan` up to the state's position, for
    example because `plan` only has more steps, or another mixture after this position."""
    old = state["plan"]
    new = plan.identity()
    fixed = {*old, *new}.difference(_MAY_DIFFER)
    if any(old.get(key) != new.get(key) for key in fixed):
        return False
    if split == "valid":
        return True
    known = dict(zip(stream.source_names, stream.capacities))
    try:
        before = plan_of(old)
        # A source that only the old plan has was not read, or the comparison fails.
        capacities = [known.get(source.name, _ENDLESS) for source in before.sources]
        schedule = PlanSchedule(before, split, capacities)
    except (AttributeError, KeyError, TypeError, PlanError):
        return False
    n = state["global_sequence_index"]
    if n > min(schedule.num_sequences, stream.num_sequences):
        return False
    digests = [
        order.past_digest([f"{s.name} {s.content_hash}" for s in own.sources], n)
        for order, own in ((schedule, before), (stream.schedule, plan))
    ]
    return digests[0] == digests[1]


def plan_of(identity: Mapping[str, Any]) -> LoaderPlan:
    """The plan with this identity (`LoaderPlan.identity`), without paths. Raises PlanError if it is
    not the identity of a plan (E-PLAN-...), and AttributeError, KeyError or TypeError if it lacks
    fields."""
    value = copy.deepcopy({**identity, "plan_id": "state", "root": "."})
    for stage in value["stages"]:
        stage["mixture"] = ""
    of_stages = [source for stage in value["stages"] for source in stage["sources"]]
    for source in [*of_stages, *value["valid"], *value.get("twins", ())]:
        source["manifest"] = ""
    plan = PlanFile(value, "state").plan()
    check_plan(plan, "state")
    return plan


def _first_difference(where: str, found: Any, expected: Any) -> tuple[str, Any, Any] | None:
    """Name of the first value that differs, and both values. Rows of a list are compared by name if
    they have names."""
    if isinstance(found, Mapping) and isinstance(expected, Mapping):
        keys = list(dict.fromkeys([*expected, *found]))
        pairs = [(f"{where}.{key}", found.get(key), expected.get(key)) for key in keys]
    elif isinstance(found, list) and isinstance(expected, list):
        old = _names(found)
        new = _names(expected)
        if set(old) != set(new):
            parts = {
                "added": [name for name in new if name not in old],
                "removed": [name for name in old if name not in new],
            }
            said = [f"{what}: {', '.join(names[:8])}" for what, names in parts.items() if names]
            return f"{where} ({'; '.join(said)})", None, None
        if len(found) != len(expected):
            return where, f"{len(found)} rows", f"{len(expected)} rows"
        pairs = [(f"{where}[{name}]", f, e) for name, f, e in zip(new, found, expected)]
    else:
        return None if found == expected else (where, found, expected)
    differences = (_first_difference(*pair) for pair in pairs)
    return next((difference for difference in differences if difference), None)


def _names(rows: list[Any]) -> list[str]:
    """The name of each row, or the row's number if it has no name."""
    return [str(r.get("name", i) if isinstance(r, Mapping) else i) for i, r in enumerate(rows)]


def _refuse_other_counts(state: Mapping[str, Any], n: int, stream: Stream) -> None:
    """Refuse a state of version 2 whose counts per source disagree with its global sequence
    index."""
    if n > stream.num_sequences:
        return  # then `seek` refuses this position
    rows = state.get("sources")
    for name, count in zip(stream.source_names, stream.schedule.counts_before(n).tolist()):
        row = rows.get(name) if isinstance(rows, Mapping) else None
        found = row.get("sequences") if isinstance(row, Mapping) else None
        if found != count:
            raise StateError(
                "the state's counts do not match its position",
                where=f"sources[{name}].sequences",
                found=found,
                expected=f"{count} at global_sequence_index = {n}",
                do="load the unchanged state",
                code="E-STATE-FORMAT",
            )


def _refuse_other_stream(
    state: Mapping[str, Any], n: int, plan: LoaderPlan, stream: Stream
) -> None:
    """Raise StateError if a state of version 1 has values of another stream than the plan's.

    Other loaders wrote version 1. They used smooth weighted round-robin and windows every seq_len +
    1 tokens, and counted the sequences of each source in the current stage.
    """
    for part, key, own in (
        ("accumulators", "policy", "swrr"),
        ("cursors", "window_stride", "seq_len+1"),
    ):
        planned = getattr(plan, key)
        if any(_values(state.get(part))) and planned != own:
            raise _other_plan(key, repr(own), repr(planned), f"set {key} = {own!r}")
    emitted = state.get("emitted_sequences") or {}
    stage = state.get("stage_index", 0)
    if not isinstance(emitted, Mapping) or type(stage) is not int or stage < 0:
        raise malformed(f"stage_index {stage!r}, emitted_sequences {emitted!r}"[:120], "counts")
    first = sum(earlier.num_sequences for earlier in plan.stages[:stage])
    if not emitted or not first <= n <= stream.num_sequences:
        return  # no counts, or `seek` refuses this position
    counts = stream.schedule.counts_before(n) - stream.schedule.counts_before(first)
    own_counts = dict(zip(stream.source_names, counts.tolist()))
    for name, count in emitted.items():
        if count != own_counts.get(name, 0):
            where = f"emitted_sequences[{name}]"
            do = "build the plan with the mixture and budgets of the saved state"
            raise _other_plan(where, count, own_counts.get(name, 0), do)


def _values(part: Any) -> list[Any]:
    """The numbers in a part of a state, at any depth."""
    if not isinstance(part, Mapping | list):
        return [part]
    found = []
    for row in part.values() if isinstance(part, Mapping) else part:
        found += _values(row)
    return found
