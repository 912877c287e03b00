"""`nmoe verify`, `info`, `inspect`, `regenerate-index`, `export`: check and convert shards."""

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

from loader.errors import without_credentials
from loader.files.format import MANIFEST_NAME, Manifest, load_manifest
from loader.plan.records import LoaderPlan
from loader.plan.settings import DEFAULT_EOS_TOKEN_ID, DEFAULT_VOCAB_SIZE
from nmoe_core.cli.flags import number, path_or_url
from nmoe_core.cli.output import add_verb, print_json, print_rows, print_table
from nmoe_core.shards.export.plan import MIXTURE_NAME
from nmoe_core.shards.export.run import SUMMARY_NAME, damaged_files
from nmoe_core.shards.inspect import (
    ShardInspection,
    files_of_directory,
    files_of_manifest,
    inspect_file,
    open_tokenizer,
    sample_tokens,
    token_statistics,
)
from nmoe_core.shards.manifest import COLUMNS_NAME
from nmoe_core.shards.shard_file import regenerate_index

_FORMATS = {
    "megatron": "Megatron-LM's indexed dataset: .bin and .idx",
    "olmo": "OLMo-core's token arrays: .npy and .csv.gz",
    "mds": "MosaicML Streaming's shards: .mds and index.json",
    "llmc": "llm.c's token files: .bin",
    "parquet": "texts with their columns as a Hugging Face dataset: .parquet",
}
_HEADER = ("dataset", "version", "tokenizer", "vocab_size", "eos_token_id", "total_tokens")
_HEADER += ("total_documents", "num_shards")


def register(verbs: Any) -> None:
    verify = add_verb(verbs, "verify", run_verify, "check the files of a manifest or plan")
    text = "path or URL; or the directory of an export"
    verify.add_argument("manifest", metavar="MANIFEST|PLAN", help=text)
    verify.add_argument("--checksums", action="store_true", help="hash every file")
    verify.add_argument(
        "--deep", action="store_true", help="read every token, and compare every file's SHA-256"
    )
    verify.add_argument("--json", action="store_true")

    info = add_verb(verbs, "info", find_info, "show a manifest or plan", _show_info)
    info.add_argument("manifest", metavar="MANIFEST|PLAN", help="path or URL")

    text = "rebuild a lost .idx from its .npy file"
    index = add_verb(verbs, "regenerate-index", run_regenerate_index, text, _show_index)
    index.add_argument("shard", type=Path, help="the .npy file")
    index.add_argument("--eos-token-id", type=int, required=True)
    index.add_argument(
        "--allow-tail", action="store_true", help="treat tokens after the last EOS as a document"
    )

    inspect = add_verb(verbs, "inspect", run_inspect, "look for tokenization defects in shards")
    where = inspect.add_mutually_exclusive_group(required=True)
    where.add_argument("--manifest", type=path_or_url)
    where.add_argument("--data-dir", type=Path)
    inspect.add_argument(
        "--eos-token-id", type=int, help=f"with --data-dir (default {DEFAULT_EOS_TOKEN_ID})"
    )
    inspect.add_argument(
        "--num-shards", type=number(1), default=1, help="number of files to inspect"
    )
    inspect.add_argument("--all", action="store_true", help="inspect every file")
    inspect.add_argument("-v", "--verbose", action="store_true", help="show each issue")
    inspect.add_argument(
        "--sample", type=number(0), default=0, metavar="N", help="N random tokens per file, as text"
    )
    inspect.add_argument("--tokenizer", help="with --sample, if the manifest's tokenizer is a file")
    inspect.add_argument("--seed", type=number(0), default=0, help="seed of the sample")
    inspect.add_argument("--stats", action="store_true", help="show the distribution of tokens")
    inspect.add_argument(
        "--min-coverage",
        type=_share,
        metavar="SHARE",
        help="fail if the files use a smaller share of the vocabulary than this, 0 to 1",
    )
    inspect.add_argument("--json", action="store_true")

    exported = verbs.add_parser("export", help="write shards in the format of another trainer")
    forms = exported.add_subparsers(dest="form", required=True, metavar="FORMAT")
    for name, text in _FORMATS.items():
        form = add_verb(forms, name, run_export, text, _show_export)
        form.set_defaults(seq_len=None, tokenizer=None)
        text = "manifest of a split or of a shard, or a loader plan"
        form.add_argument("manifest", type=path_or_url, metavar="MANIFEST|PLAN", help=text)
        form.add_argument("--output", type=Path, required=True, metavar="DIR")
        if name == "mds":
            text = "write windows of N tokens as samples (default: documents)"
            form.add_argument("--seq-len", type=int, metavar="N", help=text)
        if name == "parquet":
            text = "if the tokenizer of the shards is a file"
            form.add_argument("--tokenizer", help=text)


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{value} is not between 0 and 1")
    return value


def _manifest(path: Path) -> Manifest:
    """Read the manifest at a path or in a directory."""
    return load_manifest(path / MANIFEST_NAME if path.is_dir() else path)


def run_verify(arguments: argparse.Namespace) -> int:
    """Name every file that differs from the manifest; the exit status is then 1."""
    from nmoe_core.shards.publish.read import opened
    from nmoe_core.tasks.takedown.left import errors_of_left

    given = Path(arguments.manifest)
    exports = [given, *sorted(given.glob("*/*"))] if (given / MIXTURE_NAME).is_file() else [given]
    if found := [path for path in exports if (path / SUMMARY_NAME).is_file()]:
        return _verify_exports(given, found, arguments.json)
    tiers = {"checksums": arguments.checksums, "deep": arguments.deep}
    with opened(arguments.manifest) as data:
        problems = data.verify(**tiers)
        manifests = data.manifests
        for left in errors_of_left(manifests):
            print(f"warning: {left.line()}", file=sys.stderr)
    if arguments.json:
        print_json({"ok": not problems, "problems": [str(problem) for problem in problems]})
    for problem in problems:
        print(problem.error.line(), file=sys.stderr)
    if problems:
        return 1
    if not arguments.json:
        has_checksums = arguments.checksums or arguments.deep
        tier = "files" + ", checksums" * has_checksums + ", tokens" * arguments.deep
        print(
            f"OK {without_credentials(arguments.manifest)}: "
            f"{sum(m.num_shards for m in manifests)} shard files, "
            f"{sum(m.total_documents for m in manifests):,} documents, "
            f"{sum(m.total_tokens for m in manifests):,} tokens ({tier})"
        )
    return 0


def _verify_exports(output: Path, exports: list[Path], is_json: bool) -> int:
    """Compare the files of an export, or of the exports of a plan, with each `export.json`."""
    problems = [problem for path in exports for problem in damaged_files(path)]
    if is_json:
        print_json({"ok": not problems, "problems": [error.line() for error in problems]})
    for error in problems:
        print(error.line(), file=sys.stderr)
    if not problems and not is_json:
        print(f"OK {output}: an export, whose files have their checksums")
    return 1 if problems else 0


def find_info(arguments: argparse.Namespace) -> dict[str, Any]:
    """The header and two averages of a manifest, or the sources of a plan."""
    from nmoe_core.shards.publish.read import opened

    with opened(arguments.manifest) as data:
        if data.plan is not None:
            return _plan_facts(data.plan)
        m = data.manifests[0]
        omitted = data.left_out()
    facts: dict[str, Any] = {name: getattr(m, name) for name in _HEADER} | {
        "tokens_per_document": round(m.total_tokens / max(m.total_documents, 1), 1),
        "tokens_per_shard": round(m.total_tokens / max(m.num_shards, 1), 1),
        **omitted,
        "content_hash": m.content_digest(),
    }
    return facts | {k: m.extra.get(k) for k in ("created_at", "source_info", "fingerprints")}


def _plan_facts(plan: LoaderPlan) -> dict[str, Any]:
    shown = ("plan_id", "plan_hash", "policy", "batch_size", "seq_len", "tokenizer", "vocab_size")
    tokens = {"train": plan.sources, "valid": plan.valid}
    return {
        **{name: getattr(plan, name) for name in shown},
        "num_sequences": plan.num_sequences,
        **{name: {s.name: s.num_tokens for s in sources} for name, sources in tokens.items()},
    }


def _show_info(facts: dict[str, Any]) -> None:
    for key, value in facts.items():
        if isinstance(value, dict):
            for part, inner in value.items():
                print(f"{f'{key}.{part}:':38}{inner}")
        elif value is not None:
            print(f"{f'{key}:':38}{f'{value:,}' if isinstance(value, int) else value}")


def run_regenerate_index(arguments: argparse.Namespace) -> dict[str, Any]:
    """Write the index next to the shard, byte-identical to the index that prep wrote."""
    path, num_documents = regenerate_index(
        arguments.shard, arguments.eos_token_id, allow_tail=arguments.allow_tail
    )
    return {"path": str(path), "documents": num_documents}


def _show_index(facts: dict[str, Any]) -> None:
    print(f"{facts['path']}: {facts['documents']:,} documents")


def run_inspect(arguments: argparse.Namespace) -> int:
    """Inspect files. The exit status is 1 if a file has an issue or the coverage is too low."""
    if arguments.manifest is not None:
        manifest = _manifest(arguments.manifest)
        seen = files_of_manifest(manifest)
        vocab_size = manifest.vocab_size
        eos_token_id = manifest.eos_token_id
        own = manifest.tokenizer
    else:
        seen = files_of_directory(arguments.data_dir)
        vocab_size = DEFAULT_VOCAB_SIZE
        eos_token_id = DEFAULT_EOS_TOKEN_ID
        own = None
    if arguments.eos_token_id is not None:
        eos_token_id = arguments.eos_token_id
    if not arguments.all:
        seen = seen[: arguments.num_shards]
    is_counted = arguments.stats or arguments.min_coverage is not None
    counts = np.zeros(vocab_size, np.int64) if is_counted else None
    for file in seen:
        inspect_file(file, eos_token_id, vocab_size, counts)
    issues = {str(s.path): s.issues() for s in seen if s.issues()}
    stats = None if counts is None else token_statistics(counts)
    if stats is not None and stats["vocab_coverage"] < (arguments.min_coverage or 0):
        issues["vocabulary"] = [
            f"coverage {stats['vocab_coverage']:.4f} is below {arguments.min_coverage}"
        ]
    columns = _columns([one.path for one in seen])
    readable = [one for one in seen if one.unreadable is None]
    samples = {}
    if arguments.sample:
        tokenizer = open_tokenizer(own, arguments.tokenizer)
        samples = sample_tokens(readable, tokenizer, vocab_size, arguments.sample, arguments.seed)
    if arguments.json:
        rows = [one.row() for one in seen]
        facts = {"files": rows, "issues": issues, "stats": stats, "samples": samples}
        print_json(facts | ({"columns": columns} if columns else {}))
    else:
        _print_inspection(seen, stats, samples, arguments.verbose)
        if columns:
            print("\npassthrough columns of the shards above")
            print_rows(columns)
        for where, found in issues.items():
            for issue in found:
                print(f"ERROR [E-INSPECT]: {where}: {issue}", file=sys.stderr)
        if not issues:
            print(f"OK {len(seen)} files: no issues")
    return 1 if issues else 0


def _columns(files: list[Path]) -> list[dict[str, Any]]:
    """Facts about the passthrough columns beside these files."""
    paths = dict.fromkeys(file.with_name(COLUMNS_NAME) for file in files)
    if not any(path.is_file() for path in paths):
        return []
    from nmoe_core.shards.columns import column_facts

    return column_facts([path for path in paths if path.is_file()])


def _print_inspection(
    seen: list[ShardInspection],
    stats: dict[str, Any] | None,
    samples: dict[str, list[dict[str, Any]]],
    verbose: bool,
) -> None:
    print_table(list(seen[0].row()) if seen else (), [list(s.row().values()) for s in seen])
    for shard in seen if verbose else ():
        for position in shard.double_eos:
            print(f"{shard.path}: doubled EOS at token {position}")
        for position in shard.out_of_vocabulary:
            print(f"{shard.path}: id outside the vocabulary at token {position}")
    if stats is not None:
        print(f"\nunique tokens {stats['unique_tokens']:,}, coverage {stats['vocab_coverage']:.2%}")
        print_table(("token", "count"), stats["most_frequent"])
    for path, rows in samples.items():
        print(f"\n{path}")
        cells = [[r["position"], r["token"], repr(r["text"]), repr(r["context"])] for r in rows]
        print_table(("position", "token", "text", "context"), cells)


def run_export(arguments: argparse.Namespace) -> dict[str, Any]:
    """Write the export unless it is current."""
    from nmoe_core.shards.export.plan import export_plan
    from nmoe_core.shards.export.run import export
    from nmoe_core.shards.publish.pieces import is_plan
    from nmoe_core.tasks.takedown.left import require_none_left

    own = arguments
    require_none_left(own.manifest)
    write = export_plan if is_plan(own.manifest) else export
    made = write(own.manifest, own.output, own.form, own.seq_len, own.tokenizer).facts
    return {"output": str(own.output), **made}


def _show_export(made: dict[str, Any]) -> None:
    state = "written" if made["changed"] else "already there"
    print(
        f"{made['output']}: {len(made['files'])} files, {made['documents']:,} documents, "
        f"{made['tokens']:,} tokens, {state}"
    )
    if left_out := made["tokens_left_out"]:
        print(f"left out: the last {left_out:,} tokens, which fill no sample")
    for what in made.get("not_exported", ()):
        print(f"not exported: {what}")
    if use := made.get("use"):
        print(f"\n{use}")
