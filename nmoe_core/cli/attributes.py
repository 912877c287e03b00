"""`nmoe attributes`, `select`, `sql`, `ablate`: record attributes of documents, preview and query
selections, and measure their effect on training."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nmoe_core.attributes.presets import PRESETS
from nmoe_core.base.errors import ConfigError
from nmoe_core.cli.flags import add_run_flags, flag_of, model_defaults, number, required, run_of
from nmoe_core.cli.output import add_verb, print_rows, print_table

if TYPE_CHECKING:
    from nmoe_core.tasks.selection.rule import ClauseFigures, Kept

_MOST_LANGUAGES = 20


def register(verbs: Any) -> None:
    text = "record attributes of the documents of a run"
    attributes = add_verb(verbs, "attributes", make, text, _show)
    attributes.add_argument("--only", nargs="+", metavar="NAME", help="only these attributes")
    attributes.add_argument("--source", nargs="+", metavar="NAME", help="only these sources")
    add_run_flags(attributes, is_required=True)
    text = "record pooled states of a model for documents, as Parquet"
    _add_states(verbs, "embedding", "embed", text)
    text = "record how well a model predicts documents: bits per byte, perplexity"
    _add_states(verbs, "perplexity", "perplexity", text)
    text = "preview which documents a rule over attributes keeps; writes nothing"
    selected = add_verb(verbs, "select", select, text, _show_selection)
    text = "a rule to try instead of curation.where; rules of single sources hold too"
    selected.add_argument("--where", metavar="SQL", help=text)
    text = "try the clauses of a published rule, together with --where if it is given"
    selected.add_argument("--preset", nargs="+", default=[], choices=[*PRESETS], help=text)
    selected.add_argument("--source", nargs="+", metavar="NAME", help="only these sources")
    selected.add_argument(
        "--sample",
        type=number(0),
        default=0,
        metavar="N",
        help="show N documents whose values are near the limits of a clause",
    )
    add_run_flags(selected, is_required=True)
    text = "run an SQL query over all documents of a run"
    sql = add_verb(verbs, "sql", ask, text, print_rows)
    sql.add_argument("query", metavar="SQL", help="an SQL query of the view `documents`")
    add_run_flags(sql, is_required=True)
    text = "measure a selection: train small decoders on kept, random and dropped text"
    ablated = add_verb(verbs, "ablate", run_ablation, text, _show_ablation)
    sizes = {
        "tokens": (100_000, "training tokens per arm"),
        "seeds": (3, "decoders per arm, at least 3"),
        "documents": (150, "documents per evaluation set"),
    }
    for name, (default, text) in sizes.items():
        least = number(3 if name == "seeds" else 1)
        ablated.add_argument(f"--{name}", type=least, default=default, metavar="N", help=text)
    text = "one more evaluation set: a JSON lines file of trusted texts"
    ablated.add_argument("--eval", type=Path, metavar="FILE", help=text)
    add_run_flags(ablated, is_required=True)


def _add_states(verbs: Any, name: str, verb: str, text: str) -> None:
    parser = add_verb(verbs, verb, describe, text, _show)
    parser.add_argument("--source", nargs="+", metavar="NAME", help="only these sources of the run")
    help_text = "describe the texts of this file instead of a run's documents"
    parser.add_argument("--input-jsonl", type=Path, metavar="FILE", help=help_text)
    parser.add_argument("--out", type=Path, metavar="PARQUET", help="output of --input-jsonl")
    parser.add_argument("--text-field", help="with --input-jsonl (default: text)")
    parser.add_argument("--id-field", help="with --input-jsonl (default: doc_id or id)")
    add_run_flags(parser, ["backbone.checkpoint"], is_required=True)
    parser.set_defaults(attribute=name)


def describe(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Record an attribute of the backbone for the documents of a run, or for a file of texts."""
    from nmoe_core.tasks.attributes import describe_file
    from nmoe_core.tasks.shards import attribute_sources

    name = arguments.attribute
    path = arguments.input_jsonl
    unused = ("out", "text_field", "id_field") if path is None else ("source",)
    if given := [flag for flag in unused if getattr(arguments, flag) is not None]:
        what = "without --input-jsonl" if path is None else "with --input-jsonl"
        raise ConfigError(f"{flag_of(given[0])} has no effect {what}", do="remove it")
    if path is None:
        run = run_of(arguments)
        used = run.config.attributes.use
        run = run if name in used else run.with_settings({"attributes.use": (*used, name)})
        return attribute_sources(run, [name], arguments.source)
    arguments.needs_run = False
    defaults = model_defaults(arguments, "backbone") if arguments.config is None else {}
    run = run_of(arguments, "checkpoint", defaults=defaults)
    fields = arguments.text_field or "text", arguments.id_field
    return [describe_file(run, name, path, required(arguments, "out"), fields)]


def ask(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    from nmoe_core.tasks.selection.query import query

    answer = query(run_of(arguments), arguments.query)
    return [dict(zip(answer.columns, row)) for row in answer.rows]


def make(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    from nmoe_core.tasks.shards import attribute_sources

    return attribute_sources(run_of(arguments), arguments.only, arguments.source)


def select(arguments: argparse.Namespace) -> list[Kept]:
    from nmoe_core.tasks.selection.rule import preview_selection
    from nmoe_core.tasks.shards import chosen_sources

    run = run_of(arguments)
    names = chosen_sources(run, arguments.source)
    tried = [f"preset('{name}')" for name in arguments.preset]
    if arguments.where is not None:
        tried.append(f"(\n{arguments.where}\n)" if tried else arguments.where)
    rule = " and ".join(tried) if tried else None
    return [preview_selection(run, name, rule, arguments.sample) for name in names]


def _show_selection(kept: list[Kept]) -> None:
    header = ("source", "documents", "kept", "%", "tokens", "kept tokens", "%")
    rows = [
        [
            one.source,
            one.documents,
            one.kept,
            _percent(one.kept, one.documents),
            one.tokens,
            one.kept_tokens,
            _percent(one.kept_tokens, one.tokens),
        ]
        for one in kept
    ]
    if any(one.read_tokens is not None for one in kept):
        header = (*header, "tokens with repeats")
        rows = [[*row, one.read_tokens] for row, one in zip(rows, kept)]
    print_table(header, rows)
    languages = {name for one in kept for name in one.by_language}
    if languages:
        both = {
            name: [sum(one.by_language.get(name, (0, 0))[i] for one in kept) for i in (0, 1)]
            for name in languages
        }
        ordered = sorted(both.items(), key=lambda item: -item[1][0])[:_MOST_LANGUAGES]
        print()
        rows = [[name, *counts, _percent(counts[1], counts[0])] for name, counts in ordered]
        print_table(("language", "documents", "kept", "%"), rows)
    print("\ndocuments dropped by each clause: first = no earlier clause drops them,")
    print(
        "alone = the clause drops them, whatever the others do; only = no other clause drops them"
    )
    by_clause: dict[str, list[ClauseFigures]] = {}
    for figures in (clause for one in kept for clause in one.clauses):
        by_clause.setdefault(figures.clause, []).append(figures)
    rows = []
    for clause, same in by_clause.items():
        counts = [sum(getattr(f, key) for f in same) for key in ("first", "alone", "last")]
        rows.append([clause, *counts])
    print_table(("clause", "first", "alone", "only"), rows)
    for row in (row for one in kept for row in one.edge):
        values = {k: v for k, v in row.items() if k not in ("doc_id", "clause", "text")}
        print(f"\n{row['doc_id']}\n  dropped by {row['clause']}: {values}\n  {row['text']!r}")
    if changed := [{"source": one.source, **row} for one in kept for row in one.changed_text]:
        print("\ntext that transforms replaced:")
        print_rows(changed)
    for one in (change for source in kept for change in source.changes):
        print(f"\n{one.transform}/{one.rule} in {one.source}, {one.ingest_id}:")
        print(f"  {one.removed!r} -> {one.replacement!r}")


def _percent(part: int, whole: int) -> float:
    return round(100 * part / max(whole, 1), 1)


def _show(rows: list[dict[str, Any]]) -> None:
    header = ("attribute", "source", "documents", "computed", "shards", "written", "MB", "seconds")
    header = [key for key in header if rows and key in rows[0]]
    print_table(header, [[row[key] for key in header] for row in rows])
    short = [row for row in rows if row.get("short_strings")]
    for row in short[:1]:
        count = f"{row['short_strings']} of {row['evaluation_strings']} strings"
        print(f"\n{count} of evaluation sets have fewer than 8 words and were not searched for")


def run_ablation(arguments: argparse.Namespace) -> dict[str, Any]:
    from nmoe_core.tasks.ablate.result import Settings, ablate

    sizes = arguments.tokens, arguments.seeds, arguments.documents
    return ablate(run_of(arguments), Settings(*sizes, arguments.eval))


def _show_ablation(found: dict[str, Any]) -> None:
    rows = []
    for name, one in found["evaluation"].items():
        bits = one["bits_per_byte"]
        for arm in bits:
            saved = one.get(f"{arm}_saves", {})
            cells = [_shown(saved.get(key)) for key in ("share", "ci95")]
            rows.append([name, one["documents"], arm, bits[arm], *cells])
    header = ["evaluated on", "documents", "trained on", "bits per byte"]
    print_table([*header, "saves", "95 % interval"], rows)
    print()
    for line in found["says"]:
        print(line)


def _shown(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.2%}"
    return f"[{value[0]:.2%}, {value[1]:.2%}]"
