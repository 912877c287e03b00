"""States of earlier versions: taken by their index where what else they hold agrees with it.

They carry no seal, so the counts beside the index are what shows that a state was edited or is of
another stream. Version 2 counts the sequences of each source; version 1, of other loaders of this
layout, holds accumulators, cursors and the counts of the current stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loader.errors import StateError
from loader.plan.records import LoaderPlan
from loader.rows.stream import Stream


def refuse_other_counts(
    state: Mapping[str, Any], n: int, plan: LoaderPlan, split: str, stream: Stream
) -> None:
    """Refuse a state without a seal whose counts are not those of its index."""
    if n > stream.num_sequences:
        return  # a position that `seek` refuses
    sources = plan.sources if split == "train" else plan.valid
    rows = state.get("sources")
    for source, count in zip(sources, stream.schedule.counts_before(n).tolist()):
        row = rows.get(source.name) if isinstance(rows, Mapping) else None
        found = row.get("sequences") if isinstance(row, Mapping) else None
        if found != count:
            raise StateError(
                "the state's counts are not those of its position",
                where=f"sources[{source.name}].sequences",
                found=found,
                expected=f"{count} at global_sequence_index = {n}",
                do="load the state as it was saved",
                code="E-STATE-FORMAT",
            )


def refuse_other_stream(state: Mapping[str, Any], n: int, plan: LoaderPlan, stream: Stream) -> None:
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
        raise malformed(f"stage_index {stage!r}, emitted_sequences {emitted!r}"[:120], "counts")
    first = sum(earlier.num_sequences for earlier in plan.stages[:stage])
    if not emitted or not first <= n <= stream.num_sequences:
        return  # no counts, or a position that `seek` refuses
    counts = (stream.schedule.counts_before(n) - stream.schedule.counts_before(first)).tolist()
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


def malformed(found: str, expected: str) -> StateError:
    return StateError("not a loader state", found=found, expected=expected, code="E-STATE-FORMAT")
