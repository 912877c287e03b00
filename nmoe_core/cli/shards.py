"""`nmoe verify`, `info`, `inspect`, `regenerate-index`: look at prepared shards, and mend one."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

from loader.format import load_manifest
from nmoe_core.cli.output import print_json, print_table
from nmoe_core.prep.tokenizer import load_tokenizer
from nmoe_core.shards.index import regenerate_index
from nmoe_core.shards.inspect import (
    InspectedFile,
    ShardInspection,
    files_of_directory,
    files_of_manifest,
    inspect_file,
    sample_tokens,
)
from nmoe_core.shards.verify import verify_manifest

_DEFAULT_EOS_TOKEN_ID = 199_999
_DEFAULT_VOCAB_SIZE = 201_088


def register(verbs: Any) -> None:
    """Add the four verbs."""
    verify = verbs.add_parser("verify", help="check a manifest's files")
    verify.add_argument("manifest", type=Path)
    verify.add_argument("--checksums", action="store_true", help="hash every file")
    verify.add_argument("--deep", action="store_true", help="read every token")
    verify.add_argument("--json", action="store_true")
    verify.set_defaults(run=run_verify)

    info = verbs.add_parser("info", help="show a manifest")
    info.add_argument("manifest", type=Path)
    info.add_argument("--json", action="store_true")
    info.set_defaults(run=run_info)

    index = verbs.add_parser("regenerate-index", help="rebuild a lost .idx from its shard")
    index.add_argument("shard", type=Path, help="the .npy file")
    index.add_argument("--eos-token-id", type=int, required=True)
    index.add_argument("--allow-tail", action="store_true", help="make a document of a tail")
    index.set_defaults(run=run_regenerate_index)

    inspect = verbs.add_parser("inspect", help="look for defects of tokenisation")
    where = inspect.add_mutually_exclusive_group(required=True)
    where.add_argument("--manifest", type=Path)
    where.add_argument("--data-dir", type=Path)
    inspect.add_argument("--eos-token-id", type=int, help="without a manifest; default 199999")
    inspect.add_argument("--num-shards", type=_count, default=1, help="files to look into")
    inspect.add_argument("--all", action="store_true", help="look into every file")
    inspect.add_argument("-v", "--verbose", action="store_true", help="show each issue")
    inspect.add_argument(
        "--sample", type=int, default=0, metavar="N", help="N random tokens a file"
    )
    inspect.add_argument("--seed", type=_count, default=0, help="seed of the sample")
    inspect.add_argument("--stats", action="store_true", help="token distribution")
    inspect.add_argument("--json", action="store_true")
    inspect.set_defaults(run=run_inspect)


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is below 0")
    return value


def run_verify(arguments: argparse.Namespace) -> int:
    """Exit 1 and name every file that is not what the manifest says."""
    manifest = load_manifest(arguments.manifest)
    problems = verify_manifest(manifest, checksums=arguments.checksums, deep=arguments.deep)
    if arguments.json:
        print_json({"ok": not problems, "problems": [str(problem) for problem in problems]})
    for problem in problems:
        print(problem.error.line(), file=sys.stderr)
    if problems:
        return 1
    if not arguments.json:
        tier = "files" + ", checksums" * arguments.checksums + ", tokens" * arguments.deep
        print(
            f"OK {arguments.manifest}: {manifest.num_shards} shard files, "
            f"{manifest.total_documents:,} documents, {manifest.total_tokens:,} tokens ({tier})"
        )
    return 0


def run_info(arguments: argparse.Namespace) -> int:
    """Print the header of a manifest and two averages."""
    m = load_manifest(arguments.manifest)
    facts: dict[str, Any] = {
        "dataset": m.dataset,
        "version": m.version,
        "tokenizer": m.tokenizer,
        "vocab_size": m.vocab_size,
        "eos_token_id": m.eos_token_id,
        "total_tokens": m.total_tokens,
        "total_documents": m.total_documents,
        "num_shards": m.num_shards,
        "tokens_per_document": round(m.total_tokens / max(m.total_documents, 1), 1),
        "tokens_per_shard": round(m.total_tokens / max(m.num_shards, 1), 1),
        "content_hash": m.content_digest(),
        "created_at": m.extra.get("created_at"),
        "source_info": m.extra.get("source_info"),
        "fingerprints": m.extra.get("fingerprints"),
    }
    if arguments.json:
        print_json(facts)
        return 0
    for key, value in facts.items():
        print(f"{key + ':':22}{value:,}" if isinstance(value, int) else f"{key + ':':22}{value}")
    return 0


def run_regenerate_index(arguments: argparse.Namespace) -> int:
    """Write the index next to the shard, byte-identical to the one prep wrote."""
    path, num_documents = regenerate_index(
        arguments.shard, arguments.eos_token_id, allow_tail=arguments.allow_tail
    )
    print(f"{path}: {num_documents:,} documents")
    return 0


def run_inspect(arguments: argparse.Namespace) -> int:
    """Exit 1 if any file has an issue."""
    if arguments.manifest is not None:
        manifest = load_manifest(arguments.manifest)
        files, vocab_size = files_of_manifest(manifest), manifest.vocab_size
        eos_token_id = manifest.eos_token_id
        tokenizer_name = manifest.tokenizer
    else:
        files, vocab_size = files_of_directory(arguments.data_dir), _DEFAULT_VOCAB_SIZE
        eos_token_id = _DEFAULT_EOS_TOKEN_ID
        tokenizer_name = "o200k_harmony"
    if arguments.eos_token_id is not None:
        eos_token_id = arguments.eos_token_id
    if not arguments.all:
        files = files[: arguments.num_shards]
    counts = np.zeros(vocab_size, np.int64) if arguments.stats else None
    seen = [inspect_file(file, eos_token_id, vocab_size, counts) for file in files]
    issues = {str(s.path): s.issues() for s in seen if s.issues()}
    if arguments.json:
        print_json({"files": [_row(s) for s in seen], "issues": issues, "stats": _stats(counts)})
    else:
        print_table(list(_row(seen[0])) if seen else (), [list(_row(s).values()) for s in seen])
        _print_details(seen, counts, arguments.verbose)
        _print_samples(files, tokenizer_name, vocab_size, arguments.sample, arguments.seed)
    return 1 if issues else 0


def _row(seen: ShardInspection) -> dict[str, Any]:
    return {
        "file": seen.path.name,
        "directory": seen.path.parent.name,
        "tokens": seen.num_tokens,
        "documents": seen.num_documents,
        "eos": seen.num_eos,
        "double_eos": len(seen.double_eos),
        "issues": ", ".join(seen.issues()),
    }


def _stats(counts: np.ndarray | None) -> dict[str, Any] | None:
    if counts is None:
        return None
    used = int((counts > 0).sum())
    top = np.argsort(-counts, kind="stable")[:10]
    return {
        "unique_tokens": used,
        "vocab_coverage": used / len(counts),
        "most_frequent": [[int(i), int(counts[i])] for i in top if counts[i]],
    }


def _print_details(seen: list[ShardInspection], counts: np.ndarray | None, verbose: bool) -> None:
    for shard in seen if verbose else ():
        for position in shard.double_eos[:3]:
            print(f"{shard.path}: doubled EOS at token {position}")
    stats = _stats(counts)
    if stats is not None:
        print(f"unique tokens {stats['unique_tokens']:,}, coverage {stats['vocab_coverage']:.2%}")
        print_table(("token", "count"), stats["most_frequent"])


def _print_samples(
    files: list[InspectedFile], tokenizer_name: str, vocab_size: int, num: int, seed: int
) -> None:
    if not num:
        return
    tokenizer = load_tokenizer(tokenizer_name)
    for file in files:
        rows = [
            [position, token, repr(tokenizer.decode([token])) if token < vocab_size else "none"]
            for position, token in sample_tokens(file, num, seed)
        ]
        print(f"\n{file.path.name}")
        print_table(("position", "token", "text"), rows)
