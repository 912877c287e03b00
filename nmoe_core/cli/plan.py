"""`nmoe plan`: every output that a run would make, why, and what that would change."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nmoe_core.cli.flags import add_run_flags, number, run_of
from nmoe_core.cli.output import add_verb, duration, print_table, size

if TYPE_CHECKING:
    from nmoe_core.tasks.graph.walk import State
    from nmoe_core.tasks.preview import RegradePlan, RunPlan, SplitState

SHOWN_CHARS = 16  # of the hash of a plan
_SHOWN_FLIPS = 5


def register(verbs: Any) -> None:
    """Add the verb."""
    plan = add_verb(verbs, "plan", find_plan, "what a run would do, before it does it", _show_plan)
    add_run_flags(plan, is_required=True)
    plan.add_argument(
        "--sample",
        type=number(0),
        default=32,
        metavar="N",
        help="documents graded for flips and time if only models can tell (default 32; 0: none)",
    )


def find_plan(arguments: argparse.Namespace) -> RunPlan:
    """The plan of the run that the command line describes."""
    from nmoe_core.prep.mixture import run_sources
    from nmoe_core.tasks.preview import plan_run

    run = run_of(arguments)
    return plan_run(run, run_sources(run), sample_documents=arguments.sample)


def _show_plan(plan: RunPlan) -> None:
    if not plan.outputs:
        print(f"all is current: {plan.num_current} outputs, nothing would be made")
        return
    print_outputs(plan.outputs)
    print(f"\n{plan.num_current} other outputs are current")
    _print_splits(plan.splits)
    if plan.regrade is None:
        print("\nno document is scored: the run has no grader")
    else:
        _print_regrade(plan.regrade, plan.flips)
    _print_tokens(plan.tokens)
    print(f"\nfiles to write again: {size(plan.size_bytes)} as they are now")
    print(f"to make just this: nmoe run --plan {plan.digest[:SHOWN_CHARS]}")


def print_outputs(outputs: Iterable[State]) -> None:
    """A table of outputs that are not current: partitions of one reason are one row."""
    groups: dict[tuple[str, str, str, str], int] = {}
    for state in outputs:
        key = state.task, state.key, _VERBS[state.status], state.reason
        groups[key] = groups.get(key, 0) + 1
    rows = [[task, key, count, what, why] for (task, key, what, why), count in groups.items()]
    print_table(["task", "output", "partitions", "would be", "why"], rows)


_VERBS = {
    "stale": "made again",
    "missing": "made",
    "open": "made again if its inputs change",
    "current": "left",
}


def _print_splits(splits: Sequence[SplitState]) -> None:
    """What prep would make, as a sample of each source estimates it."""
    rows = []
    for part in splits:
        estimate = part.estimate
        if estimate is None:
            continue
        problem = "" if estimate.problem is None else str(estimate.problem)
        disk_mb = None if estimate.disk_bytes is None else estimate.disk_bytes / 1e6
        made = f"{part.made} of {part.num_shards}"
        figures = [made, estimate.tokens, estimate.seconds, disk_mb]
        rows.append([part.source, part.split, *figures, problem])
    if rows:
        print()
        columns = ["source", "split", "shards there", "tokens", "seconds", "MB", "problem"]
        print_table(columns, rows)


def _print_regrade(regrade: RegradePlan, flips: Sequence[tuple[str, str, str]]) -> None:
    if regrade.problem:
        print(f"\nscores cannot be given yet: {regrade.problem}")
        return
    if not regrade.shards:
        return
    low, high = regrade.may_flip
    sampled = f" ({regrade.sampled_flips} of {regrade.sampled} sampled do)" * (regrade.sampled > 0)
    flip = f"{low:,} decisions flip" if low == high else f"{low:,} to {high:,} decisions may flip"
    time = "not known" if regrade.seconds is None else duration(regrade.seconds)
    print(f"\n{regrade.documents:,} documents to grade: {flip}{sampled}; time {time}")
    for doc_id, now, then in flips[:_SHOWN_FLIPS]:
        print(f"  {now} -> {then}  {doc_id}")
    if len(flips) > _SHOWN_FLIPS:
        print(f"  and {high - _SHOWN_FLIPS:,} more")


def _print_tokens(tokens: Mapping[str, tuple[int, int | None]]) -> None:
    rows = [[source, now, then] for source, (now, then) in tokens.items()]
    if rows and any(now != then for _, now, then in rows):
        print()
        print_table(["source", "curated tokens now", "then (- if not known yet)"], rows)
