"""`nmoe plan`: what a run would still do, how long it takes, and what it changes."""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from nmoe_core.cli.flags import add_run_flags, number, run_of
from nmoe_core.cli.output import print_json, print_table

if TYPE_CHECKING:
    from nmoe_core.tasks.preview import RegradePlan, RunPlan


def register(verbs: Any) -> None:
    """Add the verb."""
    verb = verbs.add_parser("plan", help="what a run would do, before it does it")
    add_run_flags(verb, is_required=True)
    verb.add_argument(
        "--sample",
        type=number(0),
        default=32,
        metavar="N",
        help="documents graded for flips and time where scores are stale (default 32; 0: no model)",
    )
    verb.add_argument(
        "--read-sources", action="store_true", help="read every source to see whether it changed"
    )
    verb.add_argument("--json", action="store_true")
    verb.set_defaults(run=show_plan)


def show_plan(arguments: argparse.Namespace) -> int:
    """Print the plan of a run."""
    from nmoe_core.prep.mixture import run_sources
    from nmoe_core.tasks.preview import plan_run

    run = run_of(arguments)
    plan = plan_run(
        run,
        run_sources(run),
        sample_documents=arguments.sample,
        read_sources=arguments.read_sources,
    )
    if arguments.json:
        print_json(asdict(plan))
    else:
        _print(plan)
    return 0


def _print(plan: RunPlan) -> None:
    rows = []
    for part in plan.splits:
        estimate = part.estimate
        state = "changed" if part.is_changed else "" if part.made == part.num_shards else "to make"
        if estimate is not None and estimate.problem is not None:
            state = str(estimate.problem)
        seconds = estimate.seconds if estimate else None
        tokens = estimate.tokens if estimate else None
        disk = estimate.disk_bytes if estimate else None
        disk_mb = None if disk is None else disk / 1e6
        made = f"{part.made} of {part.num_shards}"
        rows.append([part.source, part.split, made, tokens, seconds, disk_mb, state])
    print_table(["source", "split", "shards", "tokens", "seconds", "MB", "state"], rows)
    print()
    _print_regrade(plan.regrade)
    curated = {name: shards for name, shards in plan.curated.items() if shards}
    if curated:
        print("\ncurated shards to write again, as things lie now:")
        for name, shards in curated.items():
            reasons = ", ".join(f"{why} ({n})" for why, n in Counter(shards.values()).items())
            print(f"  {name}: {len(shards)} shards: {reasons}")
    elif plan.regrade.shards:
        print("curated shards and the loader plan follow where scores change")


def _print_regrade(regrade: RegradePlan) -> None:
    if regrade.problem:
        print(f"grades: cannot be given yet: {regrade.problem}")
        return
    if not regrade.shards:
        print(f"grades: all {regrade.current_shards} shards are current")
        return
    groups: dict[tuple[str, str], list[int]] = {}
    for shard in regrade.shards:
        key = shard.source, ", ".join(shard.reasons)
        groups.setdefault(key, []).append(shard.documents)
    rows = [[source, len(docs), sum(docs), why] for (source, why), docs in groups.items()]
    print_table(["source", "stale shards", "documents", "why"], rows)
    low, high = regrade.may_flip
    sampled = f" ({regrade.sampled_flips} of {regrade.sampled} sampled do)" * (regrade.sampled > 0)
    print(f"\ndecisions that may flip: {low:,} to {high:,}{sampled}")
    time = "not measured (--sample 0)" if regrade.seconds is None else f"{regrade.seconds:,.0f} s"
    print(f"time to grade: {time}; {regrade.current_shards} shards are current")
