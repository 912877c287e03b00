"""`nmoe prep`: one source to token shards; and what it shares with `prep-mixture`."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

from nmoe_core.base.errors import ConfigError
from nmoe_core.base.settings import DEFAULT_TOKENIZER, DEFAULT_TOKENS_PER_SHARD
from nmoe_core.base.strict import validate
from nmoe_core.cli.output import print_json, print_table
from nmoe_core.config.counts import parse_count
from nmoe_core.config.tables import ComputeTable
from nmoe_core.prep.progress import progress_printer
from nmoe_core.prep.run import Existing, prep_shards, write_manifest
from nmoe_core.prep.settings import PrepReport, PrepSettings
from nmoe_core.sources.spec import SourceSpec, open_source

_KINDS = ("huggingface", "hf", "jsonl", "parquet", "arrow", "files")
_ENGINES = ("quicktok", "tiktoken", "gigatoken")


def register(verbs: Any) -> None:
    """Add the verb."""
    verb = verbs.add_parser("prep", help="prepare one source")
    verb.add_argument("--source", required=True, choices=_KINDS, help="kind of source")
    verb.add_argument("--dataset", help="hub id or local directory (huggingface)")
    verb.add_argument(
        "--paths", nargs="+", action="extend", default=[], help="files, globs or URLs"
    )
    verb.add_argument("--split", default="train", help="train, train[:1%%], train[100:200]")
    verb.add_argument("--subset", help="subset of the dataset (huggingface)")
    verb.add_argument("--data-files", nargs="+", help="files of the dataset, globs (huggingface)")
    verb.add_argument("--revision", help="commit, branch or tag of the dataset (huggingface)")
    verb.add_argument("--text-field", default="text")
    verb.add_argument("--id-field", help="field of the ids; without it, rows are numbered")
    verb.add_argument(
        "--on-error",
        choices=("fail", "skip", "replace"),
        default="fail",
        help="a record that cannot be read: leave out, and fail past --max-bad-share (fail); "
        "leave out and count (skip); replace bytes that are not UTF-8 (replace)",
    )
    verb.add_argument("--max-bad-share", type=float, help="of all records; default 0.001")
    verb.add_argument("--max-record-mb", type=int, metavar="N", help="of a line or text file")
    verb.add_argument("--output", required=True, type=Path, help="directory of manifest.json")
    verb.add_argument("--name", required=True, help="source name")
    verb.add_argument("--version", default="v1")
    verb.add_argument("--max-tokens", metavar="N", help="total, such as 100M")
    verb.add_argument("--tokens-per-shard", type=int, default=DEFAULT_TOKENS_PER_SHARD)
    verb.add_argument("--min-doc-tokens", type=int, default=10, help="leave out shorter ones")
    verb.add_argument("--max-doc-tokens", type=int, default=1_000_000, help="cut longer ones")
    add_tokenizing(verb, num_shards=64, tokenizer=DEFAULT_TOKENIZER)
    verb.set_defaults(run=prep)


def add_tokenizing(
    parser: argparse.ArgumentParser, *, num_shards: int | None, tokenizer: str | None
) -> None:
    """Add the flags of both verbs; a default of None leaves the configuration's value."""
    parser.add_argument("--tokenizer", default=tokenizer)
    parser.add_argument("--vocab-size", type=int, help="refused unless it is the tokenizer's")
    parser.add_argument("--eos-token-id", type=int, help="refused unless it is the tokenizer's")
    parser.add_argument("--engine", choices=_ENGINES, help="same ids, other speed")
    parser.add_argument("--num-shards", type=int, default=num_shards)
    parser.add_argument("--workers", type=int, help="processes; the bytes do not depend on it")
    parser.add_argument(
        "--parallel", action="store_true", help="a worker a core, where --workers is not given"
    )
    parser.add_argument("--force", action="store_true", help="make current shards again too")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def num_workers(arguments: argparse.Namespace) -> int | None:
    """Workers that the command line asks for, if it does."""
    if arguments.workers is None and arguments.parallel:
        return os.cpu_count() or 1
    return arguments.workers


def prep(arguments: argparse.Namespace) -> int:
    """Prepare one source."""
    spec = _spec(arguments)
    settings = _settings(arguments, spec)
    output = arguments.output.resolve()
    row = make_split(spec, "train", settings, Path.cwd(), output, arguments.force)
    print_results([row], as_json=arguments.json)
    return 0


def make_split(
    spec: SourceSpec, split: str, settings: PrepSettings, base: Path, output: Path, force: bool
) -> dict[str, Any]:
    """Prepare one split and commit its manifest; return what came out."""
    started = time.monotonic()
    source, rows = open_source(spec, base, split)
    existing: Existing = "remake" if force else "refuse"
    with progress_printer(f"{settings.name}/{split}") as progress:
        report = prep_shards(source, rows, settings, output, existing=existing, progress=progress)
    _print_bad_records(f"{settings.name}/{split}", report)
    manifest, _ = write_manifest(settings, output)
    return {
        "source": settings.name,
        "split": split,
        "documents": manifest["total_documents"],
        "tokens": manifest["total_tokens"],
        "bad_records": report.outcomes["bad"],
        "shards_made": len(report.made),
        "shards_kept": len(report.skipped),
        "documents_tokenized": report.documents_tokenized,
        "seconds": round(time.monotonic() - started, 1),
        "manifest": str(output / "manifest.json"),
    }


def _print_bad_records(name: str, report: PrepReport) -> None:
    if report.outcomes["bad"]:
        examples = "; ".join(report.bad_examples)
        print(f"{name}: {report.outcomes['bad']} records left out: {examples}", file=sys.stderr)
    if report.num_replaced:
        print(f"{name}: {report.num_replaced} records with bytes replaced", file=sys.stderr)


def print_results(results: list[dict[str, Any]], *, as_json: bool) -> None:
    """Print what came out of each split."""
    if as_json:
        print_json(results)
    elif results:
        header = [key for key in results[0] if key != "manifest"]
        print_table(header, [[row[key] for key in header] for row in results])


def _spec(arguments: argparse.Namespace) -> SourceSpec:
    kind = "huggingface" if arguments.source == "hf" else arguments.source
    table: dict[str, Any] = {
        "id": arguments.name,
        "kind": kind,
        "text_field": arguments.text_field,
        "id_field": arguments.id_field,
        "on_error": arguments.on_error,
        "max_bad_share": arguments.max_bad_share,
        "max_record_mb": arguments.max_record_mb,
    }
    of_datasets = {
        "dataset": "hf_dataset",
        "subset": "hf_subset",
        "data_files": "hf_data_files",
        "revision": "hf_revision",
    }
    if kind == "huggingface":
        _refuse_flags(arguments, ("paths",), kind, "--dataset")
        if arguments.dataset is None:
            raise ConfigError("--dataset is missing", do="name a hub id or a local directory")
        table |= {key: getattr(arguments, flag) for flag, key in of_datasets.items()}
        table["hf_split"] = arguments.split
    else:
        _refuse_flags(arguments, tuple(of_datasets), kind, "--paths")
        table |= {"paths": tuple(arguments.paths), "split": arguments.split}
    return validate(SourceSpec, {k: v for k, v in table.items() if v is not None}, "nmoe prep")


def _refuse_flags(
    arguments: argparse.Namespace, flags: tuple[str, ...], kind: str, instead: str
) -> None:
    for flag in flags:
        if getattr(arguments, flag):
            raise ConfigError(
                f"--{flag.replace('_', '-')} is not for kind {kind}", do=f"use {instead}"
            )


def _settings(arguments: argparse.Namespace, spec: SourceSpec) -> PrepSettings:
    if not re.fullmatch(r"[A-Za-z0-9_.]+", arguments.version):
        raise ConfigError("--version is out of range", found=arguments.version, expected="like v1")
    workers = num_workers(arguments)
    return PrepSettings(
        name=spec.id,
        version=arguments.version,
        tokenizer=arguments.tokenizer,
        num_shards=_at_least_one("--num-shards", arguments.num_shards),
        tokens_per_shard=_at_least_one("--tokens-per-shard", arguments.tokens_per_shard),
        min_doc_tokens=_at_least_one("--min-doc-tokens", arguments.min_doc_tokens),
        max_doc_tokens=_at_least_one("--max-doc-tokens", arguments.max_doc_tokens),
        max_tokens=None if arguments.max_tokens is None else parse_count(arguments.max_tokens),
        on_error=spec.on_error,
        max_bad_share=spec.max_bad_share,
        reading_digest=spec.reading_digest("train"),
        vocab_size=arguments.vocab_size,
        eos_token_id=arguments.eos_token_id,
        compute=ComputeTable(workers=_at_least_one("--workers", 1 if workers is None else workers)),
        engine=arguments.engine or "quicktok",
    )


def _at_least_one(flag: str, value: int) -> int:
    if value < 1:
        raise ConfigError(f"{flag} is out of range", found=value, expected="1 or more")
    return value
