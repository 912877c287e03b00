"""`nmoe prep-mixture` and `nmoe prep`: text to token shards."""

from __future__ import annotations

import argparse
import re
import sys
import time
from pathlib import Path
from typing import Any

from nmoe_core.cli.output import print_json, print_table
from nmoe_core.config import VERSION_PATTERN, Run, RunConfig, parse_count
from nmoe_core.errors import ConfigError, NmoeError
from nmoe_core.mixture import SPLITS, SourcePlan, prep_settings, run_sources
from nmoe_core.prep.run import Existing, PrepSettings, prep_shards, write_manifest
from nmoe_core.prep.tokenizer import DEFAULT_TOKENIZER
from nmoe_core.shards.writer import DEFAULT_TOKENS_PER_SHARD
from nmoe_core.sources.spec import SourceSpec, open_source
from nmoe_core.strict import validate

KINDS = {"huggingface": "huggingface", "hf": "huggingface", "jsonl": "jsonl", "files": "files"}


def register(verbs: Any) -> None:
    """Add the two verbs."""
    mixture = verbs.add_parser("prep-mixture", help="prepare every source of a mixture")
    mixture.add_argument("--config", required=True, metavar="TOML", help="run configuration")
    mixture.add_argument("--mixture", metavar="TOML", help="instead of the config's mixture_toml")
    mixture.add_argument("--flow-profiles", metavar="TOML", help="instead of flow_profiles_toml")
    mixture.add_argument("--flow", metavar="NAME", help="instead of the config's flow_mode")
    mixture.add_argument("--data-root", metavar="DIR", help="instead of the config's data_root")
    mixture.add_argument("--stage", choices=("pretrain", "mid", "long"), help="one stage only")
    mixture.add_argument("--splits", default="train,valid", help="train, valid or both")
    mixture.add_argument("--max-tokens", metavar="N", help="total, such as 100M, 1B, 1.5T")
    mixture.add_argument("--continue-on-error", action="store_true")
    mixture.add_argument("--dry-run", action="store_true", help="print the plan, write nothing")
    _add_common(mixture, defaults=False)
    mixture.set_defaults(run=prep_mixture)

    single = verbs.add_parser("prep", help="prepare one source")
    single.add_argument("--source", required=True, choices=tuple(KINDS), help="kind of source")
    single.add_argument("--dataset", help="hub id or local directory (huggingface)")
    single.add_argument("--paths", nargs="+", action="extend", default=[], help="files or globs")
    single.add_argument("--split", default="train", help="train, train[:1%%], train[100:200]")
    single.add_argument("--subset", help="subset of the dataset (huggingface)")
    single.add_argument("--text-field", default="text")
    single.add_argument("--id-field")
    single.add_argument("--on-error", choices=("fail", "skip", "replace"), default="fail")
    single.add_argument("--output", required=True, type=Path, help="directory of manifest.json")
    single.add_argument("--name", required=True, help="source name")
    single.add_argument("--version", default="v1")
    single.add_argument("--max-tokens", metavar="N", help="total, such as 100M")
    single.add_argument("--tokens-per-shard", type=int, default=DEFAULT_TOKENS_PER_SHARD)
    single.add_argument("--min-doc-tokens", type=int, default=10)
    single.add_argument("--max-doc-tokens", type=int, default=1_000_000)
    _add_common(single, defaults=True)
    single.set_defaults(run=prep)


def _add_common(parser: argparse.ArgumentParser, *, defaults: bool) -> None:
    parser.add_argument("--tokenizer", default=DEFAULT_TOKENIZER if defaults else None)
    parser.add_argument("--vocab-size", type=int, help="refused unless it is the tokenizer's")
    parser.add_argument("--eos-token-id", type=int, help="refused unless it is the tokenizer's")
    parser.add_argument("--num-shards", type=int, default=64 if defaults else None)
    parser.add_argument("--workers", type=int, default=1 if defaults else None)
    parser.add_argument("--parallel", action="store_true", help="accepted; prep is always safe")
    parser.add_argument("--force", action="store_true", help="make current shards again too")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def prep_mixture(arguments: argparse.Namespace) -> int:
    """Prepare all sources of a mixture, one after the other."""
    run = _overridden(Run(arguments.config), arguments)
    sources = run_sources(
        run, flow=arguments.flow, stage=arguments.stage, max_tokens=arguments.max_tokens
    )
    splits = _splits(arguments.splits)
    jobs = [(s, split) for s in sources for split in splits if split == "train" or s.has_valid]
    if not arguments.continue_on_error:
        for source, split in jobs:  # every source must open before the first one writes
            open_source(source.spec, run.base, split)[0].check()
    if arguments.dry_run:
        _print_plan(run, jobs, as_json=arguments.json)
        return 0
    results, failures = [], 0
    for source, split in jobs:
        try:
            results.append(_prep_one(run, source, split, arguments.force))
        except NmoeError as error:
            if not arguments.continue_on_error:
                raise
            print(f"{source.name}/{split}: {error.line()}", file=sys.stderr)
            failures += 1
    _print_results(results, as_json=arguments.json)
    return 1 if failures else 0


def prep(arguments: argparse.Namespace) -> int:
    """Prepare one source."""
    kind = KINDS[arguments.source]
    table = {
        "id": arguments.name,
        "kind": kind,
        "text_field": arguments.text_field,
        "id_field": arguments.id_field,
        "on_error": arguments.on_error,
    }
    if kind == "huggingface":
        table |= {"hf_dataset": arguments.dataset, "hf_subset": arguments.subset}
        table |= {"hf_split": arguments.split}
    else:
        table |= {"paths": tuple(arguments.paths), "split": arguments.split}
    table = {key: value for key, value in table.items() if value is not None}
    spec = validate(SourceSpec, table, "nmoe prep")
    if not re.fullmatch(VERSION_PATTERN, arguments.version):
        raise ConfigError("--version is out of range", found=arguments.version, expected="like v1")
    settings = PrepSettings(
        name=spec.id,
        version=arguments.version,
        tokenizer=arguments.tokenizer,
        num_shards=_at_least_one("--num-shards", arguments.num_shards),
        tokens_per_shard=_at_least_one("--tokens-per-shard", arguments.tokens_per_shard),
        min_doc_tokens=_at_least_one("--min-doc-tokens", arguments.min_doc_tokens),
        max_doc_tokens=_at_least_one("--max-doc-tokens", arguments.max_doc_tokens),
        max_tokens=None if arguments.max_tokens is None else parse_count(arguments.max_tokens),
        on_error=spec.on_error,
        reading_digest=spec.reading_digest("train"),
        vocab_size=arguments.vocab_size,
        eos_token_id=arguments.eos_token_id,
        workers=_at_least_one("--workers", arguments.workers),
    )
    output = arguments.output.resolve()
    row = _run_prep(spec, "train", settings, Path.cwd(), output, arguments.force)
    _print_results([row], as_json=arguments.json)
    return 0


def _prep_one(run: Run, source: SourcePlan, split: str, force: bool) -> dict[str, Any]:
    settings = prep_settings(run, source, split)
    output = run.paths.split(source.name, split)
    return _run_prep(source.spec, split, settings, run.base, output, force)


def _run_prep(
    spec: SourceSpec, split: str, settings: PrepSettings, base: Path, output: Path, force: bool
) -> dict[str, Any]:
    started = time.monotonic()
    source, rows = open_source(spec, base, split)
    existing: Existing = "remake" if force else "refuse"
    report = prep_shards(source, rows, settings, output, existing=existing)
    manifest, _ = write_manifest(settings, output)
    return {
        "source": settings.name,
        "split": split,
        "documents": manifest["total_documents"],
        "tokens": manifest["total_tokens"],
        "shards_made": len(report.made),
        "shards_kept": len(report.skipped),
        "documents_tokenized": report.documents_tokenized,
        "seconds": round(time.monotonic() - started, 1),
        "manifest": str(output / "manifest.json"),
    }


def _overridden(run: Run, arguments: argparse.Namespace) -> Run:
    """The run with the command line's values in place of the file's."""
    cwd = Path.cwd()
    paths = {
        "mixture_toml": arguments.mixture,
        "flow_profiles_toml": arguments.flow_profiles,
        "data_root": arguments.data_root,
    }
    update: dict[str, Any] = {key: str(cwd / value) for key, value in paths.items() if value}
    for key in ("tokenizer", "vocab_size", "eos_token_id"):
        if getattr(arguments, key) is not None:
            update[key] = getattr(arguments, key)
    table = {
        key: getattr(arguments, key)
        for key in ("num_shards", "workers")
        if getattr(arguments, key) is not None
    }
    prep_table = run.config.prep.model_dump() | table
    config = run.config.model_dump() | update | {"prep": prep_table}
    return run.with_config(validate(RunConfig, config, "nmoe prep-mixture"))


def _splits(text: str) -> list[str]:
    splits = [part.strip() for part in text.split(",")]
    for split in splits:
        if split not in SPLITS:
            raise ConfigError("no such split", found=split, expected=" or ".join(SPLITS))
    return splits


def _at_least_one(flag: str, value: int) -> int:
    if value < 1:
        raise ConfigError(f"{flag} is out of range", found=value, expected="1 or more")
    return value


def _print_plan(run: Run, jobs: list[tuple[SourcePlan, str]], *, as_json: bool) -> None:
    rows = []
    for source, split in jobs:
        settings = prep_settings(run, source, split)
        output = run.paths.split(source.name, split)
        tokens = settings.max_tokens if settings.max_tokens is not None else "all"
        rows.append([source.name, split, source.spec.kind, tokens, settings.num_shards, output])
    header = ("source", "split", "kind", "tokens", "shards", "output")
    if as_json:
        print_json([dict(zip(header, row)) for row in rows])
    else:
        print_table(header, rows)


def _print_results(results: list[dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        print_json(results)
    elif results:
        header = [key for key in results[0] if key != "manifest"]
        print_table(header, [[row[key] for key in header] for row in results])
