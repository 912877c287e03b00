"""`nmoe prep` and `nmoe prep-mixture` tokenize one source, or all sources of a mixture, to shards.

`nmoe versions` lists, compares and restores earlier versions of a split.
"""

import argparse
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args

from nmoe_core.base.errors import ConfigError, NmoeError
from nmoe_core.base.result import Result
from nmoe_core.base.strict import validate
from nmoe_core.cli.flags import add_keys, add_run_flags, path_or_url, run_of
from nmoe_core.cli.output import (
    add_verb,
    duration,
    print_facts,
    print_json,
    print_rows,
    print_table,
    size,
)
from nmoe_core.config.run import Run
from nmoe_core.config.schema import keys_of
from nmoe_core.config.tables import parse_count
from nmoe_core.prep.mixture import SourcePlan
from nmoe_core.prep.versions import (
    compare_versions,
    find_version,
    list_versions,
    remove_versions,
    restore_version,
    share_of_mixture,
)
from nmoe_core.sources.open import open_source, refuse_unnamed
from nmoe_core.sources.spec import SourceKind, SourceSpec
from nmoe_core.tasks.commands import Job, make_split, splits_of

_KINDS = ("huggingface", "hf", *get_args(SourceKind)[1:])
_KEYS = ("tokenizer", "vocab_size", "eos_token_id")
_KEYS += ("prep.num_shards", "prep.workers", "prep.max_tokens")
_SOURCE = ("hf_dataset", "hf_subset", "hf_data_files", "hf_revision", "hf_streaming")
_SOURCE += ("paths", "split", "text_field", "id_field")
_SOURCE += ("on_error", "max_bad_share", "max_record_mb", "follow_links")
_SOURCE += ("encoding", "chat_template", "csv_delimiter", "csv_quote", "csv_names")
_SOURCE += ("format", "tokens_field", "integers", "bounds")
_OF_SOURCE = {name.removeprefix("hf_"): name for name in _SOURCE}  # flag name to key
_NOTES = {
    "skipped_records": "left out: {count:,} {what}",
    "file_encodings": "{count:,} files in the encoding {what}",
    "changed_tokens": "{count:,} records: {what}",
}
_PLAN_COLUMNS = ("source", "split", "kind", "reads", "quota", "tokens", "shards", "time", "disk")


def register(verbs: Any) -> None:
    mixture = add_verb(verbs, "prep-mixture", prep_mixture, "prepare every source of a mixture")
    mixture.add_argument("--stage", choices=("pretrain", "mid", "long"), help="only this stage")
    mixture.add_argument(
        "--splits", default="train,valid", help="splits to prepare: train, valid or both"
    )
    mixture.add_argument(
        "--continue-on-error", action="store_true", help="skip sources that fail; exit 1 at the end"
    )
    mixture.add_argument("--dry-run", action="store_true", help="print an estimate, write nothing")
    _add_common(mixture)
    add_run_flags(mixture, _KEYS, {"data_root": "data"}, is_required=True, flow="flow_mode")
    mixture.add_argument("--json", action="store_true", help="print JSON")

    one = add_verb(verbs, "prep", prep, "prepare one source", _show)
    one.add_argument("--source", required=True, choices=_KINDS, help="kind of source")
    keys = {key.name: key for key in keys_of(SourceSpec)}
    add_keys(one, {flag: keys[name] for flag, name in _OF_SOURCE.items()})
    one.add_argument(
        "--output", required=True, type=Path, help="directory that contains manifest.json"
    )
    one.add_argument("--name", required=True, help="source name")
    _add_common(one)
    add_run_flags(one, _KEYS)
    _register_versions(verbs)


def _register_versions(verbs: Any) -> None:
    versions = verbs.add_parser(
        "versions", help="list, restore and remove earlier versions of a split"
    )
    parts = versions.add_subparsers(dest="part", required=True, metavar="COMMAND")
    listed = add_verb(parts, "list", find_versions, "list all versions of a split", print_rows)
    compared = add_verb(
        parts, "compare", compare, "compare documents and tokens of two versions", _show_compared
    )
    restored = add_verb(parts, "restore", restore, "make an earlier version current", print_rows)
    removed = add_verb(parts, "remove", remove, "remove all earlier versions", print_rows)
    for verb in (listed, compared, restored, removed):
        verb.add_argument("split", type=path_or_url, help="directory that contains manifest.json")
    compared.add_argument("old", metavar="VERSION", help="id of a version, or its first characters")
    compared.add_argument("new", metavar="WITH", nargs="?", help="default: the current version")
    restored.add_argument(
        "version", metavar="VERSION", help="id of a version, or its first characters"
    )


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--parallel", action="store_true", help="use one worker per core, unless --workers is given"
    )
    parser.add_argument(
        "--force", action="store_true", help="rebuild all shards, even those that are current"
    )


def prep(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    run = _run(arguments)
    spec = _spec(arguments).with_columns(run.config.attributes.columns)
    asked = run.config.prep.max_tokens
    most = None if asked in ("flow", "all") else parse_count(asked)
    job = SourcePlan(spec, most), "train"
    return [_made(run, job, arguments, arguments.output.resolve())]


def prep_mixture(arguments: argparse.Namespace) -> int:
    """Prepare all sources of a mixture, one after the other."""
    run = _run(arguments)
    splits = list(dict.fromkeys(part.strip() for part in arguments.splits.split(",")))
    jobs = splits_of(run, splits, arguments.stage)
    without = sorted({s.name for s, _ in jobs if not s.has_valid}) if "valid" in splits else []
    failures = 0
    results = []
    if arguments.dry_run:
        failures = _dry_run(run, jobs, as_json=arguments.json)
    else:
        if not arguments.continue_on_error:
            refuse_unnamed((source.spec for source, _ in jobs), run.loader.mixture_toml)
            for source, split in jobs:  # check all sources before writing the first
                open_source(source.spec, run.base, split).source.check()
        for source, split in jobs:
            try:
                results.append(_made(run, (source, split), arguments))
            except NmoeError as error:
                if not arguments.continue_on_error:
                    raise
                print(f"{source.name}/{split}: {error.line()}", file=sys.stderr)
                failures += 1
        print_facts(results, arguments.json, _show)
    if without and not arguments.json:
        print(f"sources without a validation split: {', '.join(without)}")
    return 1 if failures else 0


def _run(arguments: argparse.Namespace) -> Run:
    is_parallel = arguments.parallel and arguments.workers is None
    return run_of(arguments, more={"prep.workers": os.cpu_count() or 1} if is_parallel else None)


def _made(
    run: Run, job: Job, arguments: argparse.Namespace, output: Path | None = None
) -> dict[str, Any]:
    """Prepare a split; return its facts, and report skipped or changed records."""
    made: Result = make_split(run, job, output, is_forced=arguments.force)
    facts = dict(made.facts)
    name = f"{facts['source']}/{facts['split']}"
    examples = facts.pop("bad_examples")
    if facts["bad_records"]:
        print(
            f"{name}: {facts['bad_records']} records skipped: {'; '.join(examples)}",
            file=sys.stderr,
        )
    if replaced := facts.pop("replaced_records"):
        print(f"{name}: {replaced} records had invalid bytes, now replaced", file=sys.stderr)
    for key, said in _NOTES.items():
        for what, count in facts.pop(key, {}).items():
            print(f"{name}: {said.format(count=count, what=what)}", file=sys.stderr)
    return facts


def _show(results: list[dict[str, Any]]) -> None:
    if results:
        header = [key for key in results[0] if key != "manifest"]
        print_table(header, [[row[key] for key in header] for row in results])


def _spec(arguments: argparse.Namespace) -> SourceSpec:
    kind = "huggingface" if arguments.source == "hf" else arguments.source
    is_hub = kind == "huggingface"
    if is_hub and arguments.dataset is None:
        raise ConfigError("--dataset is missing", do="name a hub id or a local directory")
    table = {key: getattr(arguments, flag) for flag, key in _OF_SOURCE.items()}
    table |= {"id": arguments.name, "kind": kind}
    if is_hub:
        table["hf_split"] = table.pop("split")
    return validate(SourceSpec, {k: v for k, v in table.items() if v is not None}, "nmoe prep")


def _dry_run(run: Run, jobs: list[Job], *, as_json: bool) -> int:
    """Print the estimate; return the number of sources that prep would refuse."""
    from nmoe_core.prep.estimate import plan_split

    planned = [plan_split(run, source, split) for source, split in jobs]
    if as_json:
        print_json([_plan_facts(part) for part in planned])
    else:
        print_table(_PLAN_COLUMNS, [_plan_row(part) for part in planned])
        _print_totals(run, planned)
    problems = [(part, part.problem) for part in planned if part.problem is not None]
    for part, problem in problems:
        print(f"{part.source}/{part.split}: {problem.line()}", file=sys.stderr)
    return len(problems)


def _print_totals(run: Run, planned: Iterable[Any]) -> None:
    def total(key: str) -> float:
        return sum(getattr(part, key) or 0 for part in planned)

    print(
        f"\ntotal: about {total('tokens'):,.0f} tokens, {duration(total('seconds'))} with "
        f"{run.config.prep.workers} workers, {size(total('disk_bytes'))}"
    )
    unknown = [f"{part.source}/{part.split}" for part in planned if part.tokens is None]
    if unknown:
        print(f"not in the total, because their size is unknown: {', '.join(unknown)}")
    if any(part.kind == "huggingface" and not part.problem for part in planned):
        print("the time for Hugging Face datasets excludes the download")
    for part in planned:
        if part.exists:
            print(f"{part.source}/{part.split}: exists; prep adds new documents, up to the budget")
    print(f"dry run, no file written; prep would write below {run.tree.data.absolute()}")


def _plan_row(part: Any) -> list[object]:
    return [
        part.source,
        part.split,
        part.kind,
        part.reads if len(part.reads) <= 48 else part.reads[:45] + "...",
        "all" if part.quota_tokens is None else f"{part.quota_tokens:,}",
        "?" if part.tokens is None else f"{part.tokens:,}",
        part.num_shards,
        duration(part.seconds),
        size(part.disk_bytes),
    ]


def _plan_facts(part: Any) -> dict[str, object]:
    names = ("source", "split", "kind", "reads", "quota_tokens", "num_shards", "exists")
    return {name: getattr(part, name) for name in names} | {
        "estimated_tokens": part.tokens,
        "estimated_seconds": None if part.seconds is None else round(part.seconds, 1),
        "estimated_disk_bytes": part.disk_bytes,
        "output": str(part.output),
        "problem": part.problem.line() if part.problem else None,
    }


def find_versions(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    return [version.facts for version in list_versions(arguments.split.resolve())]


def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    """Documents, tokens and share of the mixture's tokens, for both versions."""
    split = arguments.split.resolve()
    old = find_version(split, arguments.old)
    new = find_version(split, arguments.new) if arguments.new else list_versions(split)[0]
    both = [
        one.facts | {"mixture_share": share_of_mixture(split, one.manifest.total_tokens)}
        for one in (old, new)
    ]
    return {"versions": both, "documents": compare_versions(old.manifest, new.manifest)}


def restore(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Restore a version; return all versions, as `list` does."""
    restore_version(arguments.split, arguments.version)
    return find_versions(arguments)


def remove(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Remove the earlier versions; return the current one, as `list` does."""
    remove_versions(arguments.split)
    return find_versions(arguments)


def _show_compared(facts: dict[str, Any]) -> None:
    print_rows(facts["versions"])
    print("documents: " + ", ".join(f"{n:,} {name}" for name, n in facts["documents"].items()))
