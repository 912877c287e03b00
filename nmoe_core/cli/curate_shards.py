"""`nmoe curate shards`: topics, curated shards and curated manifests of a run, as its assets do.

Shards whose inputs did not change are left alone. A topic model is fitted where there is none; one
that is there stays, since a new one moves every document.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from nmoe_core.cli.flags import add_run_flags, run_of
from nmoe_core.cli.output import print_json, print_table

if TYPE_CHECKING:
    from collections.abc import Mapping

_FIGURES = {
    "documents": "documents",
    "tokens": "tokens",
    "window_topics_before": "before",
    "window_topics_shuffle": "shuffle",
    "window_topics_after": "after",
    "percent_of_ceiling_after": "% of ceiling",
    "cut_documents": "cut",
    "orders_taken": "orders",
}


def register(parts: Any) -> None:
    """Add the part."""
    shards = parts.add_parser(
        "shards", help="curate the graded shards of a run", description=__doc__
    )
    shards.add_argument("--source", nargs="+", metavar="NAME", help="only these sources")
    shards.add_argument("--refit", action="store_true", help="fit the topic model again")
    shards.add_argument("--json", action="store_true")
    add_run_flags(shards, is_required=True)
    shards.set_defaults(run=run_shards)


def run_shards(arguments: argparse.Namespace) -> int:
    """Curate sources; the status is 1 where a check that blocks failed."""
    from nmoe_core.tasks.commands import curate_sources

    run = run_of(arguments)
    model, made, is_blocked = curate_sources(run, arguments.source, refit=arguments.refit)
    if arguments.json:
        print_json({"topic_model": model.facts, "sources": made})
    else:
        _print(made)
    return int(is_blocked)


def _print(made: Mapping[str, Mapping[str, Any]]) -> None:
    rows = [[name, *[facts.get(key) for key in _FIGURES]] for name, facts in made.items()]
    print_table(["source", *_FIGURES.values()], rows)
    for name, facts in made.items():
        print(f"\n{name}: {facts['shards_written']} shards written")
        for check, (passed, found) in facts["checks"].items():
            print(f"  {'ok    ' if passed else 'FAILED'} {check}: {found}")
