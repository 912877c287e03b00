"""`nmoe seen`: find the documents and steps in which a run has read a sentence."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from nmoe_core.base.errors import ConfigError
from nmoe_core.cli.flags import add_run_flags, number, run_of
from nmoe_core.cli.output import add_verb, counted, in_line, print_rows

if TYPE_CHECKING:
    from nmoe_core.audit.seen.answer import Answer, Hit, Reading


def register(verbs: Any) -> None:
    text = "search a sentence: did the run read it, in which documents and steps"
    seen = add_verb(verbs, "seen", look, text, _show)
    what = seen.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "sentence", nargs="?", metavar="TEXT", help="the sentence; it is normalised like documents"
    )
    what.add_argument(
        "--index", action="store_true", help="index the curated shards whose index is not current"
    )
    seen.add_argument("--source", nargs="+", metavar="NAME", help="index only these sources")
    seen.add_argument(
        "--limit", type=number(0), default=10, metavar="N", help="show at most N places"
    )
    text = "search only what a checkpoint of step N has read"
    seen.add_argument("--step", type=number(0), metavar="N", help=text)
    add_run_flags(seen, is_required=True)


def look(arguments: argparse.Namespace) -> list[dict[str, Any]] | Answer:
    run = run_of(arguments)
    if arguments.index:
        from nmoe_core.tasks.commands import index_sources

        return index_sources(run, arguments.source)
    if arguments.source is not None:
        what = "--source needs --index"
        do = "leave out --source: a sentence is searched in all sources"
        raise ConfigError(what, found=f"--source with {arguments.sentence!r}", do=do)
    from nmoe_core.audit.seen.answer import answer

    return answer(run, arguments.sentence, arguments.limit, arguments.step)


def _show(found: list[dict[str, Any]] | Answer) -> None:
    if isinstance(found, list):
        print_rows(found)
        return
    times = counted(found.occurrences, "time")
    documents = counted(found.documents, "document")
    places = f"{times} in {documents}"
    if not found.occurrences:
        print("not read: no curated document contains it")
    elif found.is_read is None:
        print(f"found {places}; not read yet: the run has no plan")
    elif found.is_read:
        print(f"read: {places}, first at step {found.first_step:,}, of {found.steps:,} steps")
    else:
        print(f"not read: found {places}, but the {found.steps:,} steps do not read them")
    for hit in found.hits:
        _show_hit(found.sentence, hit)
    if (more := found.occurrences - len(found.hits)) > 0:
        print(f"\n{more:,} more places: --limit {found.occurrences} shows all")


def _show_hit(sentence: str, hit: Hit) -> None:
    print(f"\n{hit.doc_id}\n  id        {in_line(hit.ingest_id)}")
    print(f"  place     {hit.tokens} tokens from token {hit.position:,}")
    print(f"  text      {' '.join(f'{hit.before}«{sentence}»{hit.after}'.split())}")
    if hit.readings is not None:
        lines = list(map(_reading, hit.readings)) or ["none of these steps reads it"]
        print("  training  " + ("\n" + " " * 12).join(lines))


def _reading(row: Reading) -> str:
    cut = "" if row.is_whole else f", cut: {row.tokens} of its tokens"
    return f"step {row.step:,}, row {row.row}, window {row.window:,}{cut}"
