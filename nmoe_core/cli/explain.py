"""`nmoe explain`: a training step back to its documents, or a document forward to its steps."""

from __future__ import annotations

import argparse
from typing import Any

from nmoe_core.base.errors import ConfigError
from nmoe_core.cli.flags import add_run_flags, run_of
from nmoe_core.cli.output import print_json, print_table

_NOT_YET = "not yet"


def register(verbs: Any) -> None:
    """Add the verb."""
    verb = verbs.add_parser(
        "explain", help="from a step to its source documents, or from a document to its steps"
    )
    what = verb.add_mutually_exclusive_group(required=True)
    what.add_argument("document", nargs="?", metavar="DOC_ID", help="document id, or ingest id")
    what.add_argument("--step", type=int, metavar="N", help="step of the loader plan")
    verb.add_argument("--row", type=int, metavar="R", help="only row R of the step")
    add_run_flags(verb, is_required=True)
    verb.add_argument("--json", action="store_true")
    verb.set_defaults(run=explain)


def explain(arguments: argparse.Namespace) -> int:
    """Print one lineage."""
    from nmoe_core.lineage import explain_document, explain_step

    if arguments.row is not None and arguments.step is None:
        raise ConfigError("--row is of a step", found="--row without --step", do="add --step N")
    run = run_of(arguments)
    if arguments.step is None:
        facts = explain_document(run, arguments.document)
        show = _print_document
    else:
        facts = explain_step(run, arguments.step, arguments.row)
        show = _print_step
    if arguments.json:
        print_json(facts)
    else:
        show(facts)
    return 0


def _print_step(facts: dict[str, Any]) -> None:
    print(f"step {facts['step']} of plan {facts['plan_hash'][:12]}, lr_scale {facts['lr_scale']:g}")
    keys = ("row_start", "tokens", "decision", "aggregated", "label", "topic", "ingest_id")
    table = [
        [str(row["sequence"]), row["source"], *(document.get(key) for key in keys)]
        for row in facts["rows"]
        for document in row["documents"]
    ]
    print_table(["sequence", "source", "from", *keys[1:-1], "document"], table)


def _print_document(facts: dict[str, Any]) -> None:
    print(f"document    {facts['doc_id']}")
    print(f"ingest id   {facts['ingest_id']}")
    print(f"text        {facts['text']!r}")
    print(f"            {facts['tokens']:,} tokens, SHA-256 {facts['text_sha256']}")
    provenance = ", ".join(f"{k} {_joined(v)}" for k, v in facts["provenance"].items() if v)
    print(f"source      {facts['source']}, {facts['split']}, {facts['shard']}: {provenance}")
    if facts["split"] != "train":
        return
    print(f"label       {_label(facts)}")
    print(f"grade       {_grade(facts)}")
    print(f"curated     {_curated(facts['curated'])}")
    print(f"training    {_training(facts['readings'])}")


def _joined(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _label(facts: dict[str, Any]) -> str:
    split, label = facts["label_split"], facts["label"]
    if label is None:
        return f"{split} slice, {_NOT_YET}"
    scorer = f"{label['scorer_model']}/{label['scorer_version']}"
    if not label["ok"]:
        return f"{split} slice, {scorer}: no scores in its answer"
    return f"{split} slice, {scorer}: {label['aggregated']:.3f} ({_scores(label['scores'])})"


def _grade(facts: dict[str, Any]) -> str:
    grade, taus = facts["grade"], facts["thresholds"]
    if grade is None:
        return _NOT_YET
    probe = "" if grade["q_probe"] is None else f"probe {grade['q_probe']:.3f}"
    if "failed" in grade:
        judge = f"failed: {grade['failed']}"
    elif grade["early_exit"]:
        judge = "left at the probe"
    else:
        judge = f"judge {grade['aggregated']:.3f} ({_scores(grade['scores'])})"
    now = "" if taus is None else "; " + ", ".join(f"{k} {v:.3f}" for k, v in taus.items())
    return f"{grade['decision']}: {probe}, {judge}{now}"


def _curated(curated: dict[str, Any] | None) -> str:
    if curated is None:
        return _NOT_YET
    if not curated["is_included"]:
        return "left out"
    return f"{curated['doc_id']}, number {curated['number']} of its shard, topic {curated['topic']}"


def _training(readings: list[dict[str, Any]] | None) -> str:
    if readings is None:
        return _NOT_YET
    places = [
        f"step {r['step']}, row {r['row']}: {r['tokens']:,} tokens from {r['row_start']:,}"
        for r in readings
    ]
    return ("\n" + " " * 12).join(places) or "the plan does not read it"


def _scores(scores: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.1f}" for name, value in scores.items())
