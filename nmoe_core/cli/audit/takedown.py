"""`nmoe takedown`: find and remove documents on request, and prove that they are gone."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nmoe_core.base.errors import ConfigError, CurationError
from nmoe_core.cli.flags import add_run_flags, path_or_url, run_of
from nmoe_core.cli.output import add_verb, in_line, print_facts, print_rows, print_table, size

_MOST_ROWS = 40
_STEPS = ("apply", "verify", "mask")
_STEP_OF = {"by": "apply", "why": "apply", "raw": "verify", "allow_shared": "verify"}
_STEP_OF |= {"everywhere": "verify", "erase_labels": "apply"}
_STEP_OF |= {"output": "mask", "plan": None, "state": None}


def register(verbs: Any) -> None:
    text = "takedown requests: find and remove the listed documents, and prove it"
    verb = add_verb(verbs, "takedown", run, text)
    verb.add_argument(
        "list",
        type=Path,
        metavar="LIST",
        help="file of lines id:..., url:..., sha256:... or re:...",
    )
    step = verb.add_mutually_exclusive_group()
    step.add_argument(
        "--apply", action="store_true", help="record the documents, so that curation drops them"
    )
    step.add_argument(
        "--verify", action="store_true", help="prove that no 50-gram of the documents is left"
    )
    step.add_argument(
        "--mask", type=path_or_url, metavar="PLAN", help="mask the documents in the plan of a run"
    )
    verb.add_argument("-o", "--output", type=path_or_url, metavar="PLAN", help="the masked plan")
    verb.add_argument(
        "--state", type=Path, nargs="+", metavar="JSON", help="states of the run's loaders"
    )
    verb.add_argument("--plan", type=path_or_url, help="plan of a loader (default: the run's)")
    verb.add_argument(
        "--raw", action="store_true", help="with --verify: search the data shards too"
    )
    verb.add_argument(
        "--everywhere",
        type=Path,
        nargs="*",
        metavar="DIR",
        help="with --verify: search all files of the run, of Dagster, and of these directories",
    )
    verb.add_argument(
        "--allow-shared",
        action="store_true",
        help="do not fail on passages shared with other documents",
    )
    verb.add_argument(
        "--by", default="", metavar="NAME", help="name of the requester, for the record"
    )
    verb.add_argument("--why", default="", metavar="TEXT", help="the reason, for the record")
    verb.add_argument(
        "--erase-labels",
        action="store_true",
        help="with --apply: erase the texts in label records; heads are then trained again",
    )
    verb.add_argument("--json", action="store_true", help="print JSON")
    add_run_flags(verb, is_required=True)


def run(arguments: argparse.Namespace) -> int:
    """Report, record, mask or verify. The exit status is 1 if a text remains."""
    from nmoe_core.tasks.takedown import report

    given = arguments
    step = next((name for name in _STEPS if getattr(given, name)), None)
    for name, its in _STEP_OF.items():
        if getattr(given, name) not in (None, False, "") and its != step:
            where = f"with --{its}" if its else f"without --{step}"
            raise ConfigError(f"--{name.replace('_', '-')} has no effect here", expected=where)
    if given.mask and not given.output:
        raise ConfigError("a masked plan needs a name", do="give -o PLAN")
    of = run_of(given)
    path = given.list
    if given.mask is not None:
        masked = report.mask_plan(of, path, given.mask, given.output)
        return print_facts(masked, given.json, _show_mask)
    if given.apply:
        done = report.apply(of, path, given.by, given.why, erase_labels=given.erase_labels)
        return print_facts(done, given.json, _show_record)
    if not given.verify:
        return print_facts(
            report.report(of, path, given.plan, given.state or []), given.json, _show
        )
    found = report.verify(
        of, path, raw=given.raw, allow_shared=given.allow_shared, everywhere=given.everywhere
    )
    print_facts(found, given.json, _show_proof)
    if not found["holds"]:
        print(_left(found).line(), file=sys.stderr)
    return 0 if found["holds"] else 1


def _show(facts: dict[str, Any]) -> None:
    reads = {(row["tree"], row["doc_id"]): row for row in facts["readings"]}
    header = ("item", "tree", "source", "split", "shard", "id", "copy", "sequences", "steps")
    rows = []
    for one in facts["documents"][:_MOST_ROWS]:
        read = reads.get((one["tree"], one["doc_id"]))
        row = [one["item"], *(one[key] for key in header[1:5]), one["ingest_id"], one["is_copy"]]
        rows.append([*row, *(_range(read, name) for name in ("sequence", "step"))])
    print_table(header, rows)
    _more(facts["documents"])
    _show_unmatched(facts)
    print(f"already recorded: {facts['recorded']:,} of {len(facts['documents']):,} documents")
    if facts["plan_problem"]:
        print(f"plan: {facts['plan_problem']}")
    elif facts["plan"]:
        print(f"plan: {facts['plan']} reads {len(facts['readings']):,} of these documents")
    for state in facts["states"]:
        number = state["documents_read"]
        step = state["step"]
        print(f"state: {state['state']}, step {step:,}, has read {number:,} of them")
    if near := facts["near_copies"]:
        print("\nnear copies: not removed unless the list names them")
        print_rows(near[:_MOST_ROWS])
        _more(near)
    _show_rebuild(facts)
    _show_copies(facts)
    _show_labels(facts)
    if facts["readings"]:
        print(
            "if a run is in progress: --mask PLAN -o PLAN masks them; do not change the shards of "
            "its plan until it ends"
        )


def _show_rebuild(facts: dict[str, Any]) -> None:
    again = facts["rebuild"]
    print()
    print(f"curated shards to rebuild: {_names(again['curate'])}")
    if again["later"]:
        print(f"later shards, whose windows shift: {_names(again['later'])}")
    if again["plan"]:
        print("then: the curated manifest of each source, and the loader plan")
    if again["data"]:
        names = _names(list(again["data"]))
        print(f"data shards that hold the text: {names}")
        print(
            "  these shards keep the text until you remove the documents from the source, then run "
            "prep and the tasks after it again; nmoe versions lists earlier versions"
        )


def _show_copies(facts: dict[str, Any]) -> None:
    """Print the places that are not searched and may hold copies."""
    store = facts["published"]
    send = "nmoe publish"
    if store:
        send += f" {facts['run_plan']} {store}"
    places = ", ".join(facts["not_covered"])
    print(f"not covered: {places}; once the plan is rebuilt, run again: nmoe export, {send}")


def _show_labels(facts: dict[str, Any]) -> None:
    if files := facts["labels"]:
        number = f"{sum(files.values()):,} records are about these documents"
        trained = "; heads were trained on them" * any("merged/" in name for name in files)
        print(f"labels: {number}, in {_names([*files])}{trained}")


def _show_record(facts: dict[str, Any]) -> None:
    print_rows([row for row in facts["items"] if row["documents"] or row["copies"]][:_MOST_ROWS])
    _show_unmatched(facts)
    print(f"{facts['record']}: {facts['added']:,} added, {facts['recorded']:,} in all")
    if facts["erased"]:
        print(f"labels: texts erased in {_names(facts['erased'])}")
    _show_rebuild(facts)
    _show_copies(facts)
    print("next: nmoe run curate, then nmoe takedown LIST --verify")


def _show_mask(facts: dict[str, Any]) -> None:
    print(f"{facts['plan']}: {facts['masked']:,} documents are masked; states of both plans load")


def _show_proof(facts: dict[str, Any]) -> None:
    for key in ("remaining", "shared", "found", "unreadable"):
        if facts[key]:
            print(f"{key}:")
            print_rows(facts[key][:_MOST_ROWS])
            _more(facts[key])
    _show_unmatched(facts)
    where = "curated and data shards" if facts["raw"] else "curated shards"
    places = f"{where} and the files searched" if facts["searched"] else where
    print(
        f"{facts['grams']:,} grams of {facts['texts']:,} texts, searched in "
        f"{facts['documents']:,} documents of {where}, {facts['tokens']:,} tokens"
    )
    for row in facts["searched"]:
        number = f"{row['files']:,} files, {size(row['bytes'])}"
        print(f"searched by letters and tokens: {row['place']}, {number}")
    if facts["too_short"]:
        number = f"{len(facts['too_short']):,} texts"
        print(f"not searched for by letters: {number}, which are too short or recorded without")
    _show_labels(facts)
    _show_copies(facts)
    said = f"no 50-gram of these texts is left in {places}"
    if facts["shared"]:
        number = f"{len(facts['shared']):,} others share passages, as --allow-shared permits"
        said = f"no document with one of these texts is left in {places}; {number}"
    print(f"{said if facts['holds'] else 'not proved'}: {facts['proof']}")


def _left(facts: dict[str, Any]) -> CurationError:
    """The error for texts that remain, with each reason and its remedy."""
    counts = {
        "documents of the list that are not recorded": len(facts["unrecorded"]),
        "documents that remain": len(facts["remaining"]),
        "documents that share a passage": 0 if facts["allow_shared"] else len(facts["shared"]),
        "files that no manifest names": len(facts["unnamed"]),
        "files of other places": len(facts["found"]),
    }
    remedies = dict.fromkeys(f"{row['place']}: {row['remedy']}" for row in facts["found"])
    dos = [
        "apply the list",
        "curate again, and remove them from the source",
        "list them too, or give --allow-shared",
        "remove them",
    ]
    dos.append("; ".join(remedies))
    found = [(f"{number} {what}", do) for (what, number), do in zip(counts.items(), dos) if number]
    return CurationError(
        "the texts are not fully removed",
        where=facts["proof"],
        found=", ".join(what for what, _ in found),
        do="; ".join(do for _, do in found),
        code="E-TAKEDOWN-LEFT",
    )


def _show_unmatched(facts: dict[str, Any]) -> None:
    if names := facts["unmatched"]:
        print(f"no document matches: {_names(names)}")


def _range(read: dict[str, Any] | None, name: str) -> str:
    if read is None:
        return ""
    first = read[f"first_{name}"]
    last = read[f"last_{name}"]
    return f"{first}" if first == last else f"{first} to {last}"


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(map(in_line, names[:_MOST_ROWS])) or "none"
    return f"{shown} and {len(names) - _MOST_ROWS:,} more" if len(names) > _MOST_ROWS else shown


def _more(rows: Sequence[object]) -> None:
    if len(rows) > _MOST_ROWS:
        print(f"and {len(rows) - _MOST_ROWS:,} more: --json lists all")
