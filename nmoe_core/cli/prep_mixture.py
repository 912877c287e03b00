"""`nmoe prep-mixture`: every source of a mixture to token shards, or what that would take."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nmoe_core.base.errors import ConfigError, NmoeError
from nmoe_core.cli.output import print_json, print_table
from nmoe_core.cli.prep import add_tokenizing, make_split, num_workers, print_results
from nmoe_core.config.run import Run
from nmoe_core.prep.mixture import SPLITS, SourcePlan, prep_settings, run_sources
from nmoe_core.sources.spec import open_source

_STAGES = ("pretrain", "mid", "long")
_PLAN_COLUMNS = ("source", "split", "kind", "reads", "quota", "tokens", "shards", "time", "disk")


def register(verbs: Any) -> None:
    """Add the verb."""
    verb = verbs.add_parser("prep-mixture", help="prepare every source of a mixture")
    verb.add_argument("--config", required=True, metavar="TOML", help="run configuration")
    verb.add_argument("--mixture", type=Path, metavar="TOML", help="instead of mixture_toml")
    verb.add_argument(
        "--flow-profiles", type=Path, metavar="TOML", help="instead of flow_profiles_toml"
    )
    verb.add_argument("--flow", metavar="NAME", help="instead of the config's flow_mode")
    verb.add_argument("--data-root", type=Path, metavar="DIR", help="instead of data_root")
    verb.add_argument("--stage", choices=_STAGES, help="one stage only; without it, all")
    verb.add_argument("--splits", default="train,valid", help="train, valid or both")
    verb.add_argument("--max-tokens", metavar="N", help="total, such as 100M, 1B, 1.5T")
    verb.add_argument(
        "--continue-on-error", action="store_true", help="go on with the other sources; exit 1"
    )
    verb.add_argument("--dry-run", action="store_true", help="print the plan, write nothing")
    add_tokenizing(verb, num_shards=None, tokenizer=None)
    verb.set_defaults(run=prep_mixture)


def prep_mixture(arguments: argparse.Namespace) -> int:
    """Prepare all sources of a mixture, one after the other."""
    run = _overridden(Run(arguments.config), arguments)
    sources = run_sources(
        run, flow=arguments.flow, stage=arguments.stage, max_tokens=arguments.max_tokens
    )
    splits = _splits(arguments.splits)
    jobs = [(s, split) for s in sources for split in splits if split == "train" or s.has_valid]
    without = [s.name for s in sources if "valid" in splits and not s.has_valid]
    if arguments.dry_run:
        status = _dry_run(run, jobs, as_json=arguments.json)
        _print_without_valid(without, as_json=arguments.json)
        return status
    if not arguments.continue_on_error:
        for source, split in jobs:  # every source must open before the first one writes
            open_source(source.spec, run.base, split)[0].check()
    results, failures = [], 0
    for source, split in jobs:
        try:
            settings = prep_settings(run, source, split)
            output = run.tree.split(source.name, split)
            results.append(
                make_split(source.spec, split, settings, run.base, output, arguments.force)
            )
        except NmoeError as error:
            if not arguments.continue_on_error:
                raise
            print(f"{source.name}/{split}: {error.line()}", file=sys.stderr)
            failures += 1
    print_results(results, as_json=arguments.json)
    _print_without_valid(without, as_json=arguments.json)
    return 1 if failures else 0


def _print_without_valid(names: Sequence[str], *, as_json: bool) -> None:
    if names and not as_json:
        print(f"no validation split is named for: {', '.join(names)}")


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
        "num_shards": arguments.num_shards,
        "engine": arguments.engine,
        "workers": num_workers(arguments),
    }
    return run.with_settings(update | {f"prep.{k}": v for k, v in table.items() if v is not None})


def _splits(text: str) -> list[str]:
    splits = list(dict.fromkeys(part.strip() for part in text.split(",")))
    for split in splits:
        if split not in SPLITS:
            raise ConfigError("no such split", found=repr(split), expected=" or ".join(SPLITS))
    return splits


def _dry_run(run: Run, jobs: Sequence[tuple[SourcePlan, str]], *, as_json: bool) -> int:
    """Print the plan; exit 1 when a source could not be prepared as it is."""
    from nmoe_core.prep.estimate import PlannedSplit, plan_prep

    planned = plan_prep(run, jobs)
    if as_json:
        print_json([_plan_facts(part) for part in planned])
    else:
        print_table(_PLAN_COLUMNS, [_plan_row(part) for part in planned])

        def total(key: str) -> float:
            return sum(getattr(part, key) or 0 for part in planned)

        unknown = [f"{p.source}/{p.split}" for p in planned if p.tokens is None]
        print(
            f"\ntotal: about {total('tokens'):,.0f} tokens, {_duration(total('seconds'))} with "
            f"{run.config.prep.workers} workers, {_size(total('disk_bytes'))}"
        )
        if unknown:
            print(f"not in the total, because nothing tells their size: {', '.join(unknown)}")
        if any(part.kind == "huggingface" and not part.problem for part in planned):
            print("time of Hugging Face datasets is that of tokenising, without the network")
        for part in planned:
            if part.exists:
                print(f"{part.source}/{part.split}: there already; made again only with --force")
        print(f"files go below {run.tree.data}; nothing was written")
    problems: list[PlannedSplit] = [part for part in planned if part.problem]
    for part in problems:
        assert part.problem is not None
        print(f"{part.source}/{part.split}: {part.problem.line()}", file=sys.stderr)
    return 1 if problems else 0


def _plan_row(part: Any) -> list[object]:
    return [
        part.source,
        part.split,
        part.kind,
        part.reads if len(part.reads) <= 48 else part.reads[:45] + "...",
        "all" if part.quota_tokens is None else f"{part.quota_tokens:,}",
        "?" if part.tokens is None else f"{part.tokens:,}",
        part.num_shards,
        "?" if part.seconds is None else _duration(part.seconds),
        "?" if part.disk_bytes is None else _size(part.disk_bytes),
    ]


def _plan_facts(part: Any) -> dict[str, object]:
    return {
        "source": part.source,
        "split": part.split,
        "kind": part.kind,
        "reads": part.reads,
        "quota_tokens": part.quota_tokens,
        "estimated_tokens": part.tokens,
        "num_shards": part.num_shards,
        "estimated_seconds": None if part.seconds is None else round(part.seconds, 1),
        "estimated_disk_bytes": part.disk_bytes,
        "output": str(part.output),
        "exists": part.exists,
        "problem": part.problem.line() if part.problem else None,
    }


def _size(size_bytes: float) -> str:
    return f"{size_bytes / 1e9:,.1f} GB" if size_bytes >= 1e9 else f"{size_bytes / 1e6:,.1f} MB"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:,.0f} s" if seconds >= 1 else "under 1 s"
    return f"{seconds / 60:,.0f} min" if seconds < 5400 else f"{seconds / 3600:,.1f} h"
