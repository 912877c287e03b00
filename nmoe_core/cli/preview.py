"""`nmoe plan`, `explain`, `curate shards`: preview a run, trace documents, or curate shards."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nmoe_core.base.errors import ConfigError
from nmoe_core.base.settings import last_grader
from nmoe_core.cli.flags import add_run_flags, number, project_file, run_of
from nmoe_core.cli.output import add_verb, counted, duration, in_line, print_json, print_table, size
from nmoe_core.cli.stores import explain_plan

if TYPE_CHECKING:
    from nmoe_core.tasks.graph.states import State
    from nmoe_core.tasks.preview import RegradePlan, RunPlan, SplitState

SHOWN_CHARS = 16  # leading characters of a plan's hash that are shown
_SHOWN_FLIPS = 5
_SHOWN_CHANGES = 10
_SHOWN_REMOVED_CHARS = 60
_SHOWN_BEFORE_CHARS = 200
_NOT_YET = "not yet"
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


def register(verbs: Any) -> None:
    register_plan(verbs)
    text = "trace a step to its source documents, or a document to its steps"
    lineage = add_verb(verbs, "explain", explain, text, _show_lineage)
    what = lineage.add_mutually_exclusive_group(required=True)
    what.add_argument("document", nargs="?", metavar="DOC_ID", help="document id or ingest id")
    what.add_argument("--step", type=int, metavar="N", help="step of the loader plan")
    lineage.add_argument("--row", type=int, metavar="R", help="show only row R of the step")
    text = "path or URL of a loader plan, instead of --config; only with --step"
    lineage.add_argument("--plan", metavar="PLAN", help=text)
    lineage.add_argument(
        "--cache-dir",
        type=Path,
        metavar="DIR",
        help="directory for copies of files, if the plan is a URL",
    )
    add_run_flags(lineage)


def register_curation(parts: Any) -> None:
    """Add `nmoe curate shards`."""
    shards = add_verb(parts, "shards", curate_shards, "curate the graded shards of a run")
    shards.description = (
        "Make topics, curated shards and curated manifests, as the assets do. Current shards and "
        "an existing topic model are kept; a new model would change the order of all documents."
    )
    shards.add_argument("--source", nargs="+", metavar="NAME", help="only these sources")
    shards.add_argument("--refit", action="store_true", help="fit a new topic model")
    shards.add_argument("--json", action="store_true", help="print JSON")
    add_run_flags(shards, is_required=True)


def register_plan(verbs: Any) -> None:
    """Add `nmoe plan`."""
    plan = add_verb(verbs, "plan", find_plan, "preview what a run would do", _show_plan)
    add_run_flags(plan, is_required=True)
    plan.add_argument(
        "--sample",
        type=number(0),
        default=32,
        metavar="N",
        help="documents to grade now, to estimate flipped decisions and time (default 32)",
    )


def find_plan(arguments: argparse.Namespace) -> RunPlan:
    """Plan the run that the command line describes."""
    from nmoe_core.prep.mixture import run_sources
    from nmoe_core.tasks.preview import plan_run

    run = run_of(arguments)
    return plan_run(run, run_sources(run), sample_documents=arguments.sample)


def _show_plan(plan: RunPlan) -> None:
    if not plan.outputs:
        print(f"all outputs are current: nmoe run would make none of the {plan.num_current}")
        return
    print_outputs(plan.outputs)
    print(f"\n{plan.num_current} other outputs are current")
    _print_splits(plan.splits)
    if plan.regrade is None:
        print("\nthe run has no grader, so documents are not scored")
    else:
        _print_regrade(plan.regrade, plan.flips)
    _print_tokens(plan)
    _print_epochs(plan.epochs)
    print(f"\nfiles to be replaced: {size(plan.size_bytes)}")
    print(f"to run exactly this plan: nmoe run --plan {plan.digest[:SHOWN_CHARS]}")


def print_outputs(outputs: Iterable[State]) -> None:
    """Print outputs that are not current; partitions with the same reason share a row."""
    from nmoe_core.tasks.preview import TOLD, told

    print_table(TOLD, told(outputs))


def _print_splits(splits: Sequence[SplitState]) -> None:
    """Print the splits that prep would make; their sizes are estimated from a sample of each
    source."""
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
        columns = ["source", "split", "shards made", "tokens", "seconds", "MB", "problem"]
        print_table(columns, rows)


def _print_regrade(regrade: RegradePlan, flips: Sequence[tuple[str, str, str]]) -> None:
    if regrade.problem:
        print(f"\ndocuments cannot be scored yet: {regrade.problem}")
        return
    if not regrade.shards:
        return
    low, high = regrade.may_flip
    sampled = f" ({regrade.sampled_flips} of {regrade.sampled} sampled)" * (regrade.sampled > 0)
    flip = f"{low:,} decisions flip" if low == high else f"{low:,} to {high:,} decisions may flip"
    time = "not known" if regrade.seconds is None else duration(regrade.seconds)
    print(f"\n{regrade.documents:,} documents to grade: {flip}{sampled}; time {time}")
    for doc_id, now, then in flips[:_SHOWN_FLIPS]:
        print(f"  {now} -> {then}  {doc_id}")
    if len(flips) > _SHOWN_FLIPS:
        print(f"  and {high - _SHOWN_FLIPS:,} more")


def _print_tokens(plan: RunPlan) -> None:
    rows = [[source, now, then] for source, (now, then) in plan.tokens.items()]
    if rows and any(now != then for _, now, then in rows):
        header = ["source", "curated tokens now", "after the run (empty: unknown)"]
        if plan.kept:
            header.append("before repeats")
            rows = [[*row, plan.kept[row[0]]] for row in rows]
        print()
        print_table(header, rows)


def _print_epochs(epochs: Mapping[str, tuple[float | None, int]]) -> None:
    rows = [[source, found, limit or None] for source, (found, limit) in epochs.items()]
    print()
    print_table(["source", "epochs of training (empty: unknown)", "at most"], rows)
    for source, found, limit in rows:
        if found and limit and found > limit:
            print(f"{source} has too few tokens: lower its weight or budget, or raise max_epochs")


def curate_shards(arguments: argparse.Namespace) -> int:
    """Curate sources; the exit status is 1 if a blocking check failed."""
    from nmoe_core.tasks.commands import curate_sources

    run = run_of(arguments)
    model, made, is_blocked = curate_sources(run, arguments.source, refit=arguments.refit)
    if arguments.json:
        print_json({"topic_model": model.facts, "sources": made})
    else:
        _print_curated(made)
    return int(is_blocked)


def _print_curated(made: dict[str, dict[str, Any]]) -> None:
    rows = [[name, *[facts.get(key) for key in _FIGURES]] for name, facts in made.items()]
    print_table(["source", *_FIGURES.values()], rows)
    for name, facts in made.items():
        print(f"\n{name}: {facts['shards_written']} shards written")
        for check, (passed, found) in facts["checks"].items():
            print(f"  {'ok    ' if passed else 'FAILED'} {check}: {found}")


def explain(arguments: argparse.Namespace) -> dict[str, Any]:
    from nmoe_core.audit.lineage import explain_document, explain_step

    if arguments.row is not None and arguments.step is None:
        raise ConfigError("--row needs --step", found="--row without --step", do="add --step N")
    if arguments.plan is None and arguments.config is None:
        arguments.config = project_file()
    if arguments.plan is not None and arguments.config is not None:
        do = "give --config, or --plan and --step"
        raise ConfigError("--plan and --config exclude each other", found="both", do=do)
    if arguments.plan is not None:
        return explain_plan(arguments)
    run = run_of(arguments)
    if arguments.step is None:
        facts = explain_document(run, arguments.document)
        if facts["split"] == "train" and run.tree.attributes.is_dir():
            from nmoe_core.tasks.selection.rule import explain_selection

            facts |= explain_selection(run, facts["doc_id"])
        return facts
    return explain_step(run, arguments.step, arguments.row)


def _show_lineage(facts: dict[str, Any]) -> None:
    (_print_step if "step" in facts else _print_document)(facts)


def _print_step(facts: dict[str, Any]) -> None:
    print(f"step {facts['step']} of plan {facts['plan_hash'][:12]}, lr_scale {facts['lr_scale']:g}")
    keys = ("row_start", "tokens", "decision", "aggregated", "label", "topic", "ingest_id")
    table = []
    for row in facts["rows"]:
        for document in row["documents"]:
            values = [document.get(key) for key in keys]
            table.append([str(row["sequence"]), row["source"], *values])
    print_table(["sequence", "source", "from", *keys[1:-1], "document"], table)


def _print_document(facts: dict[str, Any]) -> None:
    print(f"document    {facts['doc_id']}")
    print(f"ingest id   {in_line(facts['ingest_id'])}")
    print(f"text        {facts['text']!r}")
    print(f"            {facts['tokens']:,} tokens, SHA-256 {facts['text_sha256']}")
    lists = {k: v if isinstance(v, (list, tuple)) else [v] for k, v in facts["provenance"].items()}
    provenance = ", ".join(f"{k} {' '.join(map(str, v))}" for k, v in lists.items() if any(v))
    print(
        f"source      {facts['source']}, {facts['split']}, {facts['shard']}: {in_line(provenance)}"
    )
    for name in ("columns", "attributes"):
        if facts.get(name):
            print(f"{name:12}{in_line(', '.join(f'{k} {v}' for k, v in facts[name].items()))}")
    if changed := facts.get("changes"):
        _print_changes(changed)
    if facts["split"] != "train":
        return
    if facts["grade"] is None or facts["grade"]["aggregated"] is not None:
        print(f"label       {_label(facts)}")
    print(f"grade       {_grade(facts)}")
    if verdict := facts.get("selection"):
        print(f"selection   {_kept(verdict) if verdict['keep'] else 'left out: ' + verdict['why']}")
    print(f"curated     {_curated(facts['curated'])}")
    print(f"training    {_training(facts['readings'])}")


def _print_changes(changed: dict[str, Any]) -> None:
    changes = changed["changes"]
    spans = counted(len(changes), "span")
    print(f"changed     {spans}, {changed['chars_removed']:,} characters fewer than before")
    for change in changes[:_SHOWN_CHANGES]:
        size_chars = change["end"] - change["start"]
        removed = change["removed"] or ""
        was = repr(removed[:_SHOWN_REMOVED_CHARS]) + "..." * (len(removed) > _SHOWN_REMOVED_CHARS)
        was = f"{size_chars} characters" if change["removed"] is None else was
        rule = f"{change['transform']}/{change['rule']}"
        print(f"            {rule} at {change['start']}: {was} -> {change['replacement']!r}")
    if len(changes) > _SHOWN_CHANGES:
        print(f"            and {len(changes) - _SHOWN_CHANGES} more: --json lists all")
    if changed["text_before"] is not None:
        print(f"before      {changed['text_before'][:_SHOWN_BEFORE_CHARS]!r}")


def _label(facts: dict[str, Any]) -> str:
    split = facts["label_split"]
    label = facts["label"]
    if label is None:
        return f"{split} slice, {_NOT_YET}"
    scorer = f"{label['scorer_model']}/{label['scorer_version']}"
    if not label["ok"]:
        return f"{split} slice, {scorer}: no scores in the oracle's answer"
    return f"{split} slice, {scorer}: {label['aggregated']:.3f} ({_scores(label['scores'])})"


def _grade(facts: dict[str, Any]) -> str:
    grade = facts["grade"]
    taus = facts["thresholds"]
    if grade is None:
        return _NOT_YET
    if grade["aggregated"] is None:
        return f"{grade['decision']}: not scored, the run has no grader"
    names = [name for name in ("student", "probe") if grade.get(f"q_{name}") is not None]
    early = "".join(f"{name} {grade[f'q_{name}']:.3f}, " for name in names)
    by = last_grader(facts.get("graded_by"))
    if "failed" in grade:
        judge = f"failed: {grade['failed']}"
    elif grade["early_exit"]:
        judge = f"dropped by the {names[-1]}"
    else:
        judge = f"{by} {grade['aggregated']:.3f} ({_scores(grade['scores'])})"
    now = "" if taus is None else "; " + ", ".join(f"{k} {v:.3f}" for k, v in taus.items())
    return f"{grade['decision']}: {early}{judge}{now}"


def _kept(verdict: dict[str, Any]) -> str:
    if "repeat" not in verdict:
        return "kept"
    return f"kept, read {counted(verdict['times_read'], 'time')}: {in_line(verdict['repeat'])}"


def _curated(curated: dict[str, Any] | None) -> str:
    if curated is None:
        return _NOT_YET
    if not curated["is_included"]:
        return "left out"
    place = "{doc_id}, number {number} of its shard, topic {topic}"
    place += ", bucket {bucket}" * bool(curated["bucket"])
    lines = [place.format(**one) for one in (curated, *curated.get("again", ()))]
    return ("\n" + " " * 12).join(lines)


def _training(readings: list[dict[str, Any]] | None) -> str:
    if readings is None:
        return _NOT_YET
    places = [
        f"step {r['step']}, row {r['row']}: {r['tokens']:,} tokens from {r['row_start']:,}"
        for r in readings
    ]
    return ("\n" + " " * 12).join(places) or "not read by the plan"


def _scores(scores: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.1f}" for name, value in scores.items())
