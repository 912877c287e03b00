"""`nmoe attributes`: record what documents are, for selection."""

from __future__ import annotations

import argparse
from typing import Any

from nmoe_core.cli.flags import add_run_flags, run_of
from nmoe_core.cli.output import add_verb, print_table


def register(verbs: Any) -> None:
    text = "record attributes of the documents of a run"
    attributes = add_verb(verbs, "attributes", make, text, _show)
    attributes.add_argument("--only", nargs="+", metavar="NAME", help="only these attributes")
    attributes.add_argument("--source", nargs="+", metavar="NAME", help="only these sources")
    add_run_flags(attributes, is_required=True)


def make(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    from nmoe_core.tasks.shards import attribute_sources

    return attribute_sources(run_of(arguments), arguments.only, arguments.source)


def _show(rows: list[dict[str, Any]]) -> None:
    header = ("attribute", "source", "documents", "computed", "shards", "written", "MB", "seconds")
    print_table(header, [[row[key] for key in header] for row in rows])
