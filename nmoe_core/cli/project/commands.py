"""`nmoe init`, `run`, `ui`, `report`: make a project and run its tasks through Dagster."""

from __future__ import annotations

import argparse
import glob
import importlib.resources
import os
import textwrap
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loader.files.regular import read_file
from nmoe_core.base.atomic import write_bytes
from nmoe_core.base.errors import ConfigError
from nmoe_core.cli.flags import PROJECT_FILE, add_run_flags, number, project_file, run_of
from nmoe_core.cli.heads import show_scoreboard
from nmoe_core.cli.output import add_verb, duration, print_json, print_rows, print_table, size
from nmoe_core.cli.preview import print_outputs
from nmoe_core.config.run import Run

if TYPE_CHECKING:
    from nmoe_core.cli.project.survey import Survey
    from nmoe_core.sources.discover import Inputs
    from nmoe_core.tasks.graph.states import State

_VERBS = "nmoe.verbs"  # entry point group of verbs that need Dagster


def register(verbs: Any) -> None:
    text = "survey documents and write an nmoe.toml for them"
    init = add_verb(verbs, "init", make_project, text, _show_project)
    text = "directory, file or URL of documents, or a hub dataset, owner/name (default: here)"
    init.add_argument("source", nargs="?", metavar="SOURCE", help=text)
    init.add_argument("--subset", metavar="NAME", help="subset of a hub dataset")
    what = init.add_mutually_exclusive_group()
    text = "add new sources to nmoe.toml and show them; change nothing else"
    what.add_argument("--update", action="store_true", help=text)
    text = "make a demo project from docstrings of the installed Python packages"
    what.add_argument("--demo", action="store_true", help=text)
    text = "only copy the bundled configurations to DIR"
    what.add_argument("--configs", type=Path, metavar="DIR", help=text)
    text = "bring the project's tasks up to date: all, or the named ones"
    run = add_verb(verbs, "run", run_tasks, text)
    text = "prep, label, train_heads, grade, curate, ...; run in this order (default: all)"
    run.add_argument("tasks", nargs="*", metavar="TASK", help=text)
    text = "run what `nmoe plan` showed under this hash; refuse if anything has changed since"
    run.add_argument("--plan", metavar="HASH", help=text)
    text = "rebuild the output with this key in `nmoe plan`, such as web/shards:0003; repeatable"
    run.add_argument("--rebuild", action="append", default=[], metavar="OUTPUT", help=text)
    run.add_argument("--json", action="store_true", help="print JSON after the last task")
    add_run_flags(run, is_required=True)
    ui = add_verb(verbs, "ui", serve, "open the project in Dagster's UI, with the daemon")
    ui.add_argument("--port", type=number(1), default=3000, help="(default 3000)")
    text = f"configuration of the run (default: {PROJECT_FILE} in this directory)"
    ui.add_argument("--config", metavar="TOML", help=text)
    report = add_verb(verbs, "report", find_report, "show the results of a run", _show_report)
    text = "write the report as a page to FILE, with a data card and Croissant metadata beside it"
    report.add_argument("--html", type=Path, metavar="FILE", help=text)
    text = "show N kept and N dropped documents, with reasons"
    report.add_argument("--sample", type=number(0), default=0, metavar="N", help=text)
    add_run_flags(report, is_required=True)


def make_project(arguments: argparse.Namespace) -> dict[str, Any]:
    """Write nmoe.toml into the working directory, or copy configurations; existing files are not
    replaced."""
    path = Path(PROJECT_FILE)
    if (arguments.demo or arguments.configs) and (arguments.source or arguments.subset):
        raise ConfigError("--demo and --configs take neither SOURCE nor --subset")
    if arguments.configs:
        return _copy_configs(arguments.configs.absolute())
    if arguments.update:
        return _update(arguments)
    if path.exists():
        do = "add sources with --update, or work in another directory"
        raise ConfigError("this file exists already", where=path.absolute(), do=do)
    return _write_demo(path) if arguments.demo else _write_own(path, arguments)


def _copy_configs(directory: Path) -> dict[str, Any]:
    """Copy the configurations of both packages. Raises ConfigError before copying if the directory
    has a file of the same name with other content."""
    payloads: dict[Path, bytes] = {}
    for package in ("loader", "nmoe_core"):
        folder = Path(str(importlib.resources.files(package))) / "configs"
        for name in glob.glob("**/*.*", root_dir=folder, recursive=True):
            payloads[directory / name] = read_file(folder / name)
    present = [path for path in payloads if path.exists()]
    differing = [path for path in present if read_file(path) != payloads[path]]
    if differing:
        raise ConfigError(
            "files with these names exist with other content; no files were copied",
            where=directory,
            found=", ".join(str(path.relative_to(directory)) for path in differing),
            do="name another directory, or remove these files",
        )
    for path in sorted(payloads.keys() - present):
        write_bytes(path, payloads[path])
    return {"configs": str(directory), "files": len(payloads)}


def _write_demo(path: Path) -> dict[str, Any]:
    from nmoe_core.cli.project.write_docstrings import write_docstrings

    write_docstrings(Path("build/demo/input/docstrings.jsonl"))
    demo = importlib.resources.files("nmoe_core") / "configs" / "demo.toml"
    write_bytes(path, demo.read_bytes())
    return {"path": str(path.absolute()), "sources": []}


def _write_own(path: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    from nmoe_core.cli.project.config_text import project_text
    from nmoe_core.cli.project.survey import require_text, survey_all
    from nmoe_core.sources.discover import discover

    workers = os.cpu_count() or 1
    here = Path.cwd()
    named = arguments.source or "."
    inputs = discover(named, here, arguments.subset)
    found = survey_all(inputs, here, workers)
    require_text(named, inputs, found)
    write_bytes(path, project_text(found, workers).encode())
    return _facts(Run(path), named, inputs, found)


def _update(arguments: argparse.Namespace) -> dict[str, Any]:
    from nmoe_core.cli.project.ledger import last_ledger
    from nmoe_core.cli.project.update import add_sources, new_inputs

    run = Run(project_file())
    named = arguments.source or last_ledger(run)["named"]
    inputs = new_inputs(run, named, arguments.subset)
    found = add_sources(run, inputs, os.cpu_count() or 1)
    return _facts(run, named, inputs, found) | {"is_update": True}


def _facts(run: Run, named: str, inputs: Inputs, found: Sequence[Survey]) -> dict[str, Any]:
    from nmoe_core.cli.project.ledger import commit_ledger

    facts = {"path": str(run.path.absolute()), "sources": [one.facts for one in found]}
    return facts | commit_ledger(run, named, inputs.files)


def _show_files(facts: dict[str, Any]) -> None:
    """Print the files that are not trained on, with reasons, and the totals."""
    rows = [
        [one["reason"], one["files"], size(one["size_bytes"]), ", ".join(one["such_as"])]
        for one in facts["not_taken"]
    ]
    if rows:
        print()
        print_table(["not used for training", "files", "size", "such as"], rows)
    parts = [
        f"{part.replace('_', ' ')} {facts[part]['files']:,} ({facts[part]['size_bytes']:,} bytes)"
        for part in ("seen", "taken", "held_out", "left_out")
    ]
    print(f"\nfiles: {parts[0]} = {' + '.join(parts[1:])}; full list: {facts['ledger']}")


def _show_project(facts: dict[str, Any]) -> None:
    from nmoe_core.cli.project.config_text import languages, unjudged

    if "configs" in facts:
        print(f"{facts['files']} configurations are in {facts['configs']}")
        return
    good = [one for one in facts["sources"] if one["problem"] is None]
    if good:
        rows = [
            [
                one["source"],
                one["files"],
                size(one["size_bytes"]),
                one["documents"],
                one["unreadable"],
                one["tokens"],
                one["text_field"],
                languages(one["languages"]),
                duration(one["seconds"]),
            ]
            for one in good
        ]
        header = (
            "source",
            "files",
            "size",
            "documents",
            "unreadable",
            "tokens",
            "text in",
            "languages",
            "tokenizing",
        )
        print_table(header, rows)
        print("tokens and tokenizing time are estimated from a sample;", end=" ")
        print("languages: the share of documents per language")
    for one in facts["sources"]:
        for reason, count in one["skipped"].items():
            print(f"{one['source']}: left out: {count:,} {reason}")
        if one["unreadable"]:
            print(f"{one['source']}: unreadable records: {one['unreadable']:,}", end="")
            print(f", such as {one['first_unreadable']}")
        elif one["problem"] is not None and not facts["seen"]["files"]:
            print(f"left out: {one['problem']}")
    if "seen" in facts and facts["seen"]["files"]:
        _show_files(facts)
    if facts.get("is_update"):
        print(f"\n{len(good)} sources are new" + f" and added to {facts['path']}" * bool(good))
        return
    counts = (sum(one[key] or 0 for one in good) for key in ("documents", "judged"))
    if warning := unjudged(*counts):
        print("\n" + textwrap.fill(warning, 112))
    print(f"\nwrote {facts['path']}. Check it, then: nmoe run; nmoe report; nmoe ui")


def run_tasks(arguments: argparse.Namespace) -> int:
    """Execute the jobs of the tasks; the exit status is 1 if one failed."""
    from nmoe_core.tasks.preview import not_current, require_plan

    run = run_of(arguments)
    show = (lambda *_: None) if arguments.json else _show_task
    if arguments.plan is not None:
        require_plan(run, arguments.plan)
    if arguments.rebuild:
        from nmoe_core.tasks.graph.records import forget

        forget(run, arguments.rebuild)
    status = 0
    made: list[dict[str, Any]] = []
    left: list[State] = []
    if arguments.tasks or not_current(run, remember=True):
        status, made = _of_dagster("run")(run, arguments.tasks, show)
        left = not_current(run, remember=True) if status == 0 else []
    if arguments.json:
        print_json({"tasks": made, "status": status, "not_current": [*map(_why, left)]})
    elif status == 0:
        total = duration(sum(task["seconds"] for task in made))
        _show_end(arguments.tasks, total, left)
    return status


def _why(state: State) -> dict[str, str]:
    """Describe an output that is not current, as JSON values."""
    return {"output": state.key, "partition": state.partition, "why": state.reason}


def _show_end(tasks: Sequence[str], total: str, left: Sequence[State]) -> None:
    """Print which tasks ran, and the outputs of other tasks that are not current."""
    if not left:
        print(f"all outputs are current after {total}; see nmoe report [--html FILE], nmoe ui")
        return
    ran = ", ".join(tasks) or "all tasks"
    print(f"{ran}: done after {total}. Outputs of other tasks that are not current:\n")
    print_outputs(left)
    print("\nto bring all up to date: nmoe run")


def _show_task(task: dict[str, Any], number: int, count: int) -> None:
    """Print a line before each task, and the task's time after it."""
    if "seconds" in task and task["run_id"] is None:
        print("    all its outputs are current", flush=True)
        return
    if "seconds" in task:
        processors = duration(task["cpu_seconds"])
        print(f"    {duration(task['seconds'])}, CPU time {processors}", flush=True)
        return
    last = task["last_seconds"]
    then = "" if last is None else f": {duration(last)} last time"
    print(f"{task['task']} ({number} of {count}){then}", flush=True)


def serve(arguments: argparse.Namespace) -> int:
    """Serve the UI until it is interrupted."""
    return _of_dagster("ui")(Run(arguments.config or project_file()), arguments.port)


def find_report(arguments: argparse.Namespace) -> dict[str, Any]:
    from nmoe_core.tasks.preview import not_current
    from nmoe_core.tasks.report.summary import run_report

    run = run_of(arguments)
    if arguments.html is None:
        report = run_report(run)
        report["not_current"] = [_why(state) for state in not_current(run)]
        if arguments.sample:
            from nmoe_core.tasks.report.samples import samples_of_all

            names = [source["source"] for source in report["sources"]]
            found = samples_of_all(run, names, arguments.sample)
            report["samples"] = [one._asdict() for one in found]
        return report
    from nmoe_core.tasks.report.write import write_report

    written = write_report(run, arguments.html, _costs(run))
    return {"written": [str(path.absolute()) for path in written]}


def _show_report(report: dict[str, Any]) -> None:
    if "written" in report:
        print(*report["written"], sep="\n")
        return
    columns = list(report["sources"][0])
    rows = [[source[key] for key in columns] for source in report["sources"]]
    summed = columns[1 : columns.index("sequences") + 1]
    totals = [sum(source[key] for source in report["sources"]) for key in summed]
    others = [None] * (len(columns) - 1 - len(summed))
    print_table(columns, [*rows, ["total", *totals, *others]])
    if report["oracle"] is not None:
        print("keep, band, drop: decisions of the grader; curated: documents that the rule keeps;")
    if "repeats" in columns:
        print("repeats: further readings of repeated documents, which the curated ones include;")
    print("topics: mean number of distinct topics per window of seq_len tokens")
    _show_account(report)
    if report["oracle"] is not None:
        _show_graders(report)
    plan = report["plan"]
    print(
        f"\nloader: {plan['steps']} steps of {plan['batch_size']} x {plan['seq_len']} tokens; "
        f"first {plan['digest_steps']} batches {plan['digest'][:16]}"
    )
    print(f"plan:   {plan['path']}\nfiles:  {report['root']}")
    if count := len(report["not_current"]):
        first = report["not_current"][0]
        print(f"{count} outputs are not current, such as {first['output']} ({first['why']}):")
        print("some figures are older than their inputs; nmoe plan shows what nmoe run would do")


def _show_graders(report: dict[str, Any]) -> None:
    """Print how well the graders rank documents, and the thresholds."""
    from nmoe_core.quality.few_labels import FEW_LABELS_SAID, few_labels_table

    show_scoreboard(report["heads"], report["cost"])
    if report["few_labels"]:
        print_table(*few_labels_table(report["few_labels"]))
        print(textwrap.fill(FEW_LABELS_SAID, 112) + "\n")
    choice = report["grader_choice"]
    print(textwrap.fill(choice["sentence"] if choice else f"grader: {report['grader']}", 112))
    exits = ("tau_probe", "tau_student")  # 0 if no document exits early
    taus = {name: t for name, t in report["thresholds"].items() if t or name not in exits}
    print(f"thresholds: {', '.join(f'{name} {tau:.3f}' for name, tau in taus.items())}")
    if report["dropping"]:
        print(textwrap.fill(report["dropping"], 112))
    print(f"oracle: {report['oracle']}; backbone: {report['backbone']}")
    print_rows(report["labels"])
    print_rows(report["raters"])
    if report["backbone"] == "tiny" and report["grader"] != "student":
        print("(both are placeholders for large models: these scores do not measure quality)")
    elif report["oracle"].startswith("heuristic/"):
        print(
            "(the oracle is a placeholder for a large model: the student learned text statistics)"
        )


def _show_account(report: dict[str, Any]) -> None:
    """Print the account of files, documents and tokens, changed shares, and sample documents."""
    from nmoe_core.tasks.report.account import account_rows

    print()
    account = report["account"]
    print_table(["account", "all sources", *account["sources"]], account_rows(account))
    if report["changed_text"]:
        print("\ntext that transforms replaced:")
        print_rows(report["changed_text"])
    print("\nshares of tokens that changed most, before and after:")
    for kind, moved in report["composition"].items():
        shares = (f"{name} {100 * old:.1f} -> {100 * new:.1f} %" for name, old, new in moved)
        print(textwrap.fill(f"{kind + ':':10}{'; '.join(shares)}", 112, subsequent_indent=" " * 10))
    print()
    for sample in report.get("samples", []):
        verdict = f"left out: {sample['reason']}" if sample["reason"] else "kept"
        text = textwrap.shorten(sample["text"], 160, placeholder=" ...")
        print(f"{sample['doc_id']}\n  {verdict} ({sample['judged']})\n  {text!r}")
    if report.get("samples"):
        print()


def _costs(run: Run) -> list[dict[str, Any]]:
    """Times of the runs through Dagster; empty if it is not installed."""
    try:
        return _of_dagster("costs")(run)
    except ConfigError:
        return []


def _of_dagster(name: str) -> Callable[..., Any]:
    """The function in nmoe_assets that runs a verb. Raises ConfigError if Dagster is not
    installed."""
    (verb,) = entry_points(group=_VERBS, name=name)
    try:
        return verb.load()
    except ModuleNotFoundError as error:
        do = "pip install 'nmoe-data[dagster]'"
        raise ConfigError(f"{error.name} is not installed", do=do) from error
