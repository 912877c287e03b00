"""`nmoe hydra slices|oracle-label|requests|answers|merge-labels|agree|review|corrections|audit|
status`: make and inspect labels."""

import argparse
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nmoe_core.base.errors import ConfigError
from nmoe_core.base.result import Result
from nmoe_core.cli.flags import (
    add_run_flags,
    flag_of,
    model_defaults,
    number,
    required,
    run_of,
    set_value,
)
from nmoe_core.cli.output import add_verb, in_line, print_json, print_rows, print_table
from nmoe_core.config.run import Run

if TYPE_CHECKING:
    from nmoe_core.labels.jobs import LabelJob

_ENGINE = ("checkpoint", "max_ctx", "batch_size")
Outputs = dict[str, Result]
Task = Callable[[argparse.Namespace], Outputs]


def register(parts: Any) -> None:
    listing = add_task(parts, "slices", slices, "list the documents of each source by split")
    listing.add_argument("--sources", nargs="+", metavar="NAME", help="only these sources")
    add_run_flags(listing, roots={"data_root": "data", "out": "slices"})

    text = "score documents with the oracle"
    label = add_task(parts, "oracle-label", oracle_label, text, _show_labelling)
    instead = label.add_mutually_exclusive_group()
    instead.add_argument(
        "--estimate",
        action="store_true",
        help="only estimate questions, tokens and cost; ask nothing",
    )
    text = "print the request about a document, by default the first to ask about; send nothing"
    instead.add_argument("--show", nargs="?", const="", metavar="DOC_ID", help=text)
    label.add_argument("--slices", nargs="+", metavar="train-00", help="only these slices")
    add_file_flags(label)
    label.add_argument(
        "--out", type=Path, metavar="DIR", help="directory for labels of an input file"
    )
    label.add_argument("--max-new", type=int, help="maximum tokens per answer")
    keys = [f"oracle.engine.{name}" for name in _ENGINE]
    add_run_flags(label, ["tokenizer", *keys], {"data_root": "data"}, oracle="oracle.kind")

    text = "write the requests to the oracle's server to a file, in OpenAI's batch form"
    requests = add_task(parts, "requests", write_requests, text)
    requests.add_argument("-o", "--output", type=Path, required=True, metavar="FILE")
    requests.add_argument("--slices", nargs="+", metavar="train-00", help="only these slices")
    add_run_flags(requests, roots={"data_root": "data"}, is_required=True)

    text = "add the results of such a file to the answers; nmoe run label then uses them"
    results = add_task(parts, "answers", add_answers, text)
    results.add_argument("results", type=Path, metavar="FILE", help="results, in OpenAI's form")
    add_run_flags(results, roots={"labels": "labels"}, is_required=True)

    merge = add_task(parts, "merge-labels", merge_labels, "join the labels of each split")
    add_run_flags(merge, roots={"labels": "labels"})

    text = "compare labels with those of a second oracle or a person"
    compared = add_verb(parts, "agree", agree, text, _show_agreement)
    compared.add_argument("first", type=Path, help="labels: a file, or a label shard")
    text = "other labels of the same documents; of more than two, Krippendorff's alpha"
    compared.add_argument("others", type=Path, nargs="+", help=text)

    text = "show labelled documents; --correct changes a label, --withdraw undoes it"
    reviewed = add_verb(parts, "review", review, text, _show_labels)
    reviewed.add_argument(
        "--split", choices=("train", "val", "test"), default="val", help="default: val"
    )
    kinds = ("sample", "failures", "disagreements", "corrected")
    reviewed.add_argument("--kind", choices=kinds, default="sample", help="default: sample")
    reviewed.add_argument("--documents", type=number(1), default=5, metavar="N", help="default: 5")
    reviewed.add_argument("--source", help="only this source")
    reviewed.add_argument("--correct", metavar="DOC_ID", help="correct the label of this document")
    reviewed.add_argument(
        "--scores", nargs="+", metavar="NAME=GRADE", help="with --correct: new grades"
    )
    text = "withdraw the correction of this document by --by"
    reviewed.add_argument("--withdraw", metavar="DOC_ID", help=text)
    of_both = "with --correct or --withdraw"
    reviewed.add_argument("--by", metavar="NAME", help=f"{of_both}: name of the person")
    reviewed.add_argument("--note", default="", help=f"{of_both}: the reason")
    add_run_flags(reviewed, roots={"labels": "labels"}, is_required=True)

    text = "list people's corrections of labels, and how far people agree"
    listed = add_verb(parts, "corrections", corrections, text, _show_corrections)
    text = "write the run's rubric with corrected documents of train as examples"
    listed.add_argument("-o", "--output", type=Path, metavar="FILE", help=text)
    text = "with --output: how many (default: 4)"
    listed.add_argument("--documents", type=number(1), metavar="N", help=text)
    add_run_flags(listed, roots={"labels": "labels"}, is_required=True)

    text = "check decisions: let the oracle score a sample of kept and dropped documents"
    asked = add_verb(parts, "audit", audit, text, _show_errors)
    asked.add_argument("--sources", nargs="+", metavar="NAME", help="only these sources")
    text = "documents per source and decision (default: 50)"
    asked.add_argument("--documents", type=number(1), default=50, metavar="N", help=text)
    add_run_flags(asked, roots={"calibration": "calibration"}, is_required=True)

    text = "show the state of each label shard: PENDING, RUNNING or DONE"
    status = add_verb(parts, "status", find_status, text, _show_status)
    status.set_defaults(is_task=True)
    add_run_flags(status, roots={"labels": "labels", "slices": "slices"})


def add_task(
    parts: Any, name: str, task: Task, text: str, show: Callable[[Any], None] | None = None
) -> argparse.ArgumentParser:
    """Add a verb that prints one row per output, unless `show` prints the facts."""

    def facts_of(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
        return {output: made.facts for output, made in task(arguments).items()}

    verb = add_verb(parts, name, facts_of, text, show or show_outputs)
    verb.set_defaults(is_task=True)
    return verb


def add_file_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of an input file that replaces the run's documents."""
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--input-docids", type=Path, metavar="SLICE", help="file with one document id per row"
    )
    source.add_argument("--input-jsonl", type=Path, metavar="FILE", help="rows with a text")
    parser.add_argument("--text-field", help="with --input-jsonl (default: text)")
    parser.add_argument("--id-field", help="with --input-jsonl (default: doc_id or id)")


def show_outputs(facts: dict[str, dict[str, Any]]) -> None:
    header = list(dict.fromkeys(key for row in facts.values() for key in row))
    rows = [[name, *(row.get(key) for key in header)] for name, row in facts.items()]
    print_table(["output", *header], rows)


def slices(arguments: argparse.Namespace) -> Outputs:
    from nmoe_core.tasks.prep import make_all_slices

    return make_all_slices(run_of(arguments, "data_root", "out"), arguments.sources)


def oracle_label(arguments: argparse.Namespace) -> Outputs:
    """Label slices of a run or one file of documents, estimate the cost, or show a request."""
    from nmoe_core.labels.jobs import labelling_of
    from nmoe_core.tasks.commands import label_file, label_job
    from nmoe_core.tasks.hydra import label_slices
    from nmoe_core.tasks.shards import chosen_sources

    run = _labelling_run(arguments)
    file = named_file(arguments, "label", of_run=("slices",), of_file=("out",))
    is_unasked = arguments.estimate or arguments.show is not None
    if file is None:
        sources = chosen_sources(run)
        if is_unasked:
            jobs = labelling_of(run).slice_jobs(sources, arguments.slices)
            return _unasked(arguments, run, jobs)
        return label_slices(run, sources, arguments.slices)
    out = required(arguments, "out")
    if is_unasked:
        return _unasked(arguments, run, [label_job(run, file, out)])
    return {str(out): label_file(run, file, out)}


def _unasked(arguments: argparse.Namespace, run: Run, jobs: Iterable["LabelJob"]) -> Outputs:
    """The estimate of jobs, or with --show a request."""
    from nmoe_core.labels.batch import shown_request
    from nmoe_core.labels.jobs import labelling_of

    if arguments.show is not None:
        doc_id, request = shown_request(labelling_of(run), jobs, arguments.show)
        return {doc_id: Result("", request)}
    estimates = labelling_of(run).estimate(jobs)
    return {name: Result("", asdict(row)) for name, row in estimates.items()}


def _show_labelling(facts: dict[str, dict[str, Any]]) -> None:
    is_request = any("body" in row or "ids" in row for row in facts.values())
    (print_json if is_request else show_outputs)(facts)


def write_requests(arguments: argparse.Namespace) -> Outputs:
    from nmoe_core.labels import batch
    from nmoe_core.labels.jobs import labelling_of
    from nmoe_core.tasks.shards import chosen_sources

    run = run_of(arguments, "data_root")
    labelling = labelling_of(run).without_key()
    jobs = labelling.slice_jobs(chosen_sources(run), arguments.slices)
    return {str(arguments.output): batch.write_requests(labelling, jobs, arguments.output)}


def add_answers(arguments: argparse.Namespace) -> Outputs:
    from nmoe_core.labels import batch
    from nmoe_core.labels.answers import Ledger
    from nmoe_core.labels.jobs import labelling_of

    run = run_of(arguments, "labels")
    labelling = labelling_of(run).without_key()
    made = batch.add_answers(labelling, Ledger(run.tree.answers), arguments.results)
    return {str(arguments.results): made}


def merge_labels(arguments: argparse.Namespace) -> Outputs:
    from nmoe_core.labels.slices import SPLITS
    from nmoe_core.tasks.hydra import merge_split

    run = run_of(arguments, "labels")
    # Runs that an earlier release labelled have no test split.
    splits = [s for s in SPLITS if s != "test" or (run.tree.labels / s).is_dir()]
    return {split: merge_split(run, split) for split in splits}


def agree(arguments: argparse.Namespace) -> dict[str, Any]:
    from nmoe_core.labels.compare import compare_labels, compare_raters

    if len(arguments.others) > 1:
        return compare_raters([arguments.first, *arguments.others])
    return compare_labels(arguments.first, arguments.others[0])


def _show_agreement(facts: dict[str, Any]) -> None:
    print_rows(facts["labels"])
    print()
    if "agreement" in facts:
        print_rows(facts["agreement"])
        return
    print_rows(facts["rows"])
    counts = [f"{facts['documents']:,} documents in both"]
    counts += [f"{facts[key]:,} {key.replace('_', ' ')}" for key in ("other_text", "only_in_one")]
    print(f"{', '.join(counts)}; kappa has quadratic weights; intervals cover 95 %")


def review(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Show labelled documents; or correct a label, or withdraw a correction, and show it."""
    run = run_of(arguments)
    if arguments.correct is None and arguments.scores:
        raise ConfigError("--scores without --correct", do="name the document")
    if arguments.correct is None and arguments.withdraw is None:
        from nmoe_core.quality.grading.examples import look_at_labels

        for name in ("by", "note"):
            if getattr(arguments, name):
                what = f"{flag_of(name)} without --correct or --withdraw"
                raise ConfigError(what, do="name the document")
        chosen = arguments.split, arguments.kind, arguments.documents, arguments.source
        return look_at_labels(run, *chosen)
    from nmoe_core.labels.corrections import correct_label, withdraw_correction

    by = required(arguments, "by")
    if arguments.withdraw is not None:
        return [withdraw_correction(run.tree, arguments.withdraw, by, arguments.note)]
    given = [text.partition("=") for text in required(arguments, "scores")]
    scores = {name: int(grade) if grade.isdecimal() else grade for name, _, grade in given}
    return [correct_label(run, required(arguments, "correct"), scores, by, arguments.note)]


def corrections(arguments: argparse.Namespace) -> dict[str, Any]:
    """The entries of the file, and the agreement of the people by the run's rubric; with --output,
    the documents that the new rubric has as examples."""
    from nmoe_core.labels.corrections import correction_entries, people_agreement, read_corrections
    from nmoe_core.labels.scores import Scale

    run = run_of(arguments)
    if arguments.output is None and arguments.documents is not None:
        raise ConfigError("--documents without --output", do="name the file to write")
    if arguments.output is not None:
        from nmoe_core.quality.grading.anchors import write_anchored_rubric

        return write_anchored_rubric(run, arguments.output, arguments.documents or 4).facts
    standing = read_corrections(run.tree)
    counting = [entry for people in standing.values() for entry in people.values()]
    entries = []
    for entry in correction_entries(run.tree):
        told = {key: entry[key] for key in ("doc_id", "by", "at", "note", "rubric_hash")}
        grades = {name: (entry.get("scores") or {}).get(name) for name in run.rubric.dimensions}
        entries.append(told | {"counts": entry in counting, **grades})
    standing = {key: people for key, people in standing.items() if key[1] == run.rubric.hash}
    return {
        "entries": entries,
        "documents": sum(bool(people) for people in standing.values()),
        "by_several": sum(len(people) > 1 for people in standing.values()),
        "agreement": people_agreement(standing, Scale.of(run.rubric)),
    }


def _show_corrections(facts: dict[str, Any]) -> None:
    if "examples" in facts:
        print("examples: " + ", ".join(map(in_line, facts["examples"])))
        return
    print_rows(facts["entries"])
    print(f"{facts['documents']:,} texts are corrected, {facts['by_several']:,} by several people")
    if facts["by_several"]:
        print_rows(facts["agreement"])


def _show_labels(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        told = {key: value for key, value in row.items() if key != "text"}
        print("\n".join(f"{key}: {in_line(value)}" for key, value in told.items()), end="\n\n")
        print(textwrap.indent(row.get("text", ""), "| ", bool), end="\n\n")  # forges no label
    print(f"{len(rows)} documents")


def audit(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    from nmoe_core.quality.grading.audit import audit_grades
    from nmoe_core.tasks.shards import chosen_sources

    run = run_of(arguments)
    sources = chosen_sources(run, arguments.sources)
    return [asdict(row) for row in audit_grades(run, sources, arguments.documents)]


def _show_errors(rows: list[dict[str, Any]]) -> None:
    print_rows(rows)
    print(
        "worth_keeping: share of a row's documents that the oracle would keep; in rows of"
        " dropped documents, these are the false drops"
    )


def find_status(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    from nmoe_core.labels.label_files import label_status

    return [asdict(row) for row in label_status(run_of(arguments, "labels", "slices").tree)]


def _show_status(rows: list[dict[str, Any]]) -> None:
    print_rows(rows)
    states = [row["state"] for row in rows]
    counts = ", ".join(f"{states.count(s)} {s}" for s in ("DONE", "RUNNING", "PENDING"))
    print(f"{len(rows)} shards: {counts}")


def named_file(
    arguments: argparse.Namespace, what: str, of_run: Sequence[str], of_file: Sequence[str] = ()
) -> Any:
    """The input file that the command line names, or None for a run. Raises ConfigError if it names
    neither a file nor a run, or if a flag does not apply to the choice."""
    from nmoe_core.tasks.commands import InputFile

    texts = arguments.input_jsonl
    rows = arguments.input_docids
    path = texts or rows
    is_run = path is None
    if is_run and arguments.config is None:
        expected = "--input-docids, --input-jsonl or --config"
        raise ConfigError(f"no documents to {what}", expected=expected)
    wrong = [*(of_file if is_run else of_run)]
    wrong += ["text_field", "id_field"] if texts is None else []
    wrong += ["sample"] if rows is None else []
    for name in wrong:
        if getattr(arguments, name, None) is not None:
            kind = "the run's own documents" if is_run else "this kind of input file"
            raise ConfigError(f"{flag_of(name)} has no effect with {kind}", do="remove it")
    if path is None:
        return None
    sample = getattr(arguments, "sample", None)
    fields = arguments.text_field or "text", arguments.id_field
    return InputFile(path, texts is not None, *fields, sample)


def _labelling_run(arguments: argparse.Namespace) -> Run:
    """The run; without `--config`, the oracle defaults to the engine."""
    kind = set_value(arguments, "oracle.kind") or arguments.oracle
    if kind is None:
        kind = Run(arguments.config).config.oracle.kind if arguments.config else "engine"
    needed = ["out", "checkpoint"] if kind == "engine" else ["out"]
    needed += ["data_root"] if arguments.input_docids else []
    defaults: dict[str, Any] = {"oracle.kind": kind}
    if kind == "engine" and arguments.config is None:
        defaults |= model_defaults(arguments, "oracle.engine")
    more: dict[str, Any] = {}
    if arguments.max_new is not None and kind in ("engine", "http"):
        more[f"oracle.{kind}.max_new"] = arguments.max_new
    return run_of(arguments, *needed, defaults=defaults, more=more)
