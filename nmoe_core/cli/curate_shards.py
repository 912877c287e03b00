"""`nmoe curate shards`: topics, curated shards and curated manifests of a run, as its assets do.

Shards whose inputs did not change are left alone. A topic model is fitted where there is none; one
that is there stays, since a new one moves every document.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from nmoe_core.base.errors import ConfigError
from nmoe_core.cli.output import print_json, print_table
from nmoe_core.config.run import Run

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
    shards.add_argument("--config", required=True, metavar="TOML", help="run configuration")
    shards.add_argument("--source", nargs="+", metavar="NAME", help="only these sources")
    shards.add_argument("--refit", action="store_true", help="fit the topic model again")
    shards.add_argument("--json", action="store_true")
    shards.set_defaults(run=run_shards)


def run_shards(arguments: argparse.Namespace) -> int:
    """Curate sources; the status is 1 where a check that blocks failed."""
    from nmoe_core.prep.mixture import run_sources
    from nmoe_core.tasks import checks, curate
    from nmoe_core.tasks.shards import outputs_of

    run = Run(arguments.config)
    known = [source.name for source in run_sources(run)]
    names = _chosen(arguments.source, known)
    model = curate.open_topics(run, known, refit=arguments.refit)
    made: dict[str, dict[str, Any]] = {}
    blocked = False
    for name in names:
        outputs_of(run, "topics", name)
        shards = outputs_of(run, "curate", name)
        facts = dict(curate.combine(run, name).facts)
        found = checks.check_curated(run, name)
        failed = [check for check, verdict in found.items() if not verdict.passed]
        blocked |= any(checks.level_of(run, check) == "block" for check in failed)
        made[name] = {
            **facts,
            "shards_written": sum(bool(shard.facts["changed"]) for shard in shards.values()),
            "checks": {check: [v.passed, v.found] for check, v in found.items()},
        }
    if arguments.json:
        print_json({"topic_model": model.facts, "sources": made})
    else:
        _print(made)
    return int(blocked)


def _chosen(asked: list[str] | None, known: list[str]) -> list[str]:
    unknown = sorted(set(asked or ()) - set(known))
    if unknown:
        raise ConfigError(
            "no such source", found=", ".join(unknown), expected=f"of {', '.join(known)}"
        )
    return [name for name in known if asked is None or name in asked]


def _print(made: Mapping[str, Mapping[str, Any]]) -> None:
    rows = [[name, *[facts.get(key) for key in _FIGURES]] for name, facts in made.items()]
    print_table(["source", *_FIGURES.values()], rows)
    for name, facts in made.items():
        print(f"\n{name}: {facts['shards_written']} shards written")
        for check, (passed, found) in facts["checks"].items():
            print(f"  {'ok    ' if passed else 'FAILED'} {check}: {found}")
