"""`nmoe exposure`, `diff`, `losses`: what a run has read, how plans differ, and what the documents
did to the losses."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nmoe_core.cli.flags import add_run_flags, number, path_or_url, project_file, run_of
from nmoe_core.cli.output import add_verb, counted, print_rows, print_table

if TYPE_CHECKING:
    from loader.plan.records import LoaderPlan
    from loader.rows.documents import DocumentTable
    from nmoe_core.audit.readings.names import Groups


def register(verbs: Any) -> None:
    text = "count how often a run has read each document, up to a step"
    verb = add_verb(verbs, "exposure", expose, text, _show_exposure)
    _add_plan(verb)
    verb.add_argument("--step", type=number(0), metavar="N", help="before step N (default: all)")
    verb.add_argument(
        "-o", "--out", type=Path, metavar="PARQUET", help="write a table with a row per document"
    )
    add_run_flags(verb)
    text = "compare what two plans read: documents, tokens, steps, and the steps that they share"
    verb = add_verb(verbs, "diff", compare, text, _show_difference)
    for name in ("a", "b"):
        verb.add_argument(
            name,
            type=path_or_url,
            metavar=name.upper(),
            help="plan, run.toml, or certificate of a remix, for the plan before it",
        )
    text = "join the losses that a trainer logged to documents: curves, worst documents, spikes"
    verb = add_verb(verbs, "losses", join, text, _show_losses)
    text = "directory that the trainer gave to loader.LossLog"
    verb.add_argument("log", type=Path, metavar="LOGDIR", help=text)
    _add_plan(verb)
    text = "show the documents of the spike at STEP, or of the highest spike"
    verb.add_argument("--spike", type=_spike, metavar="STEP|auto", help=text)
    text = "list the N documents with the highest losses (default 10)"
    verb.add_argument("--worst", type=number(0), default=10, metavar="N", help=text)
    text = "write losses.png and documents.parquet to this directory"
    verb.add_argument("-o", "--out", type=Path, metavar="DIR", help=text)
    add_run_flags(verb)


def _add_plan(verb: argparse.ArgumentParser) -> None:
    text = "a plan, instead of the run's"
    verb.add_argument("--plan", type=path_or_url, metavar="PLAN", help=text)
    text = "file with the state_dict() of the loader, if the run continued another run's counts"
    verb.add_argument("--state", type=Path, metavar="JSON", help=text)
    text = "group documents by source (default) or by a column of `nmoe sql`"
    verb.add_argument("--by", default="source", metavar="COLUMN", help=text)


def _spike(text: str) -> int:
    """The step, or -1 for `auto`."""
    if text == "auto":
        return -1
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a step nor auto")
    return int(text)


@contextmanager
def _opened(
    arguments: argparse.Namespace,
) -> Iterator[tuple[LoaderPlan, int, DocumentTable, Groups]]:
    """The plan, the step of the state, its documents and their groups."""
    from nmoe_core.audit.plans.remix import position_of
    from nmoe_core.audit.readings.exposure import documents_of
    from nmoe_core.audit.readings.names import by_source

    if arguments.config is None and (arguments.plan is None or arguments.by != "source"):
        arguments.config = project_file()
    run = None if arguments.config is None else run_of(arguments)
    of_run = Path() if run is None else run.tree.plan
    plan, step = position_of(arguments.plan or of_run, arguments.state)
    with documents_of(plan) as table:
        groups = by_source(table)
        if run is not None and arguments.by != "source":
            from nmoe_core.tasks.selection.grouped import by_column

            groups = by_column(run, table, arguments.by)
        yield plan, step, table, groups


def expose(arguments: argparse.Namespace) -> dict[str, Any]:
    from nmoe_core.audit.readings.exposure import exposure

    with _opened(arguments) as (plan, reached, table, groups):
        step = arguments.step
        if step is None and arguments.state is not None:
            step = reached
        return exposure(table, plan, step, groups, arguments.out)


def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    from nmoe_core.audit.readings.difference import difference, plan_at

    return difference(plan_at(arguments.a), plan_at(arguments.b))


def join(arguments: argparse.Namespace) -> dict[str, Any]:
    from nmoe_core.audit.readings.curves import LossTables
    from nmoe_core.audit.readings.losses import read_ledger

    with _opened(arguments) as (plan, _, table, groups):
        tables = LossTables(table, read_ledger(arguments.log, plan, table), groups)
        facts = tables.facts(arguments.worst)
        if arguments.spike is not None:
            step = None if arguments.spike < 0 else arguments.spike
            facts["spike"] = tables.spike(step, arguments.worst)
        if arguments.out is not None:
            facts["files_written"] = [str(path) for path in tables.write(arguments.out)]
        return facts


def _show_exposure(facts: dict[str, Any]) -> None:
    rows = [*facts["groups"], {facts["by"]: "total", **facts["total"]}]
    print_rows(rows)
    print(f"\nbefore step {facts['step']:,} of plan {facts['plan_hash'][:12]}")
    for row in facts["read_before_the_plan"]:
        sequences = counted(row["sequences"], "sequence")
        print(f"of these, another run read before the plan: {sequences} of {row['source']}")
    if "file" in facts:
        print(facts["file"])


def _show_difference(facts: dict[str, Any]) -> None:
    columns = ("plan_id", "plan_hash", "steps", "batch_size", "seq_len")
    print_table(["", *columns], [[n, *(facts[n][key] for key in columns)] for n in "ab"])
    print()
    print_rows(facts["sources"])
    shared = facts["shared"]
    print()
    if facts["cut"]:
        print(f"no row is equal: the plans cut rows differently ({', '.join(facts['cut'])})")
        return
    if shared["steps"] is None:
        print(f"{counted(shared['sequences'], 'sequence')} equal; steps have different sizes")
    elif facts["first_step"] is None:
        print(f"all {counted(shared['steps'], 'step')} that both have are equal")
    else:
        differ = counted(facts["steps_that_differ"], "step")
        first = f"the first is step {facts['first_step']:,}"
        print(f"{counted(shared['steps'], 'step')} equal, then {differ} that differ; {first}")
    print(f"SHA-256 of the equal sequences: {shared['sha256_a']} (a)")
    print(f"{'':31} {shared['sha256_b']} (b)")


def _show_losses(facts: dict[str, Any]) -> None:
    print_rows(facts["groups"])
    first, last = facts["steps"]
    sequences = counted(facts["sequences"], "sequence")
    print(f"\n{sequences} of steps {first:,} to {last:,}, {counted(facts['ranks'], 'rank')}")
    for key, text in (
        ("repeated", "measured again, of which the last counts"),
        ("dropped", "not used: steps after which the run went on under another plan"),
        ("not_finite", "losses NaN or infinite: in no mean, their documents are listed first"),
        ("torn_bytes", "bytes at the ends of files ignored: a block was not completely written"),
    ):
        if facts[key]:
            print(f"{facts[key]:,} {text}")
    if facts["worst"]:
        print("\nhighest losses above the mean of their steps")
        print_rows(facts["worst"])
    if "spike" in facts:
        _show_spike(facts["spike"])
    for path in facts.get("files_written", ()):
        print(path)


def _show_spike(spike: dict[str, Any] | None) -> None:
    if spike is None:
        print("\nno spike: no step is far above the steps before it")
        return
    first, last = spike["steps"]
    where = f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"
    print(f"\n{where}: loss {spike['loss']:.4f}, before {spike['usual']:.4f}")
    print_rows(spike["groups"])
    print(f"\n{counted(spike['num_documents'], 'document')}, those with the highest losses first")
    print_rows(spike["documents"])
