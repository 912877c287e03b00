"""What token shards and their manifests are held to."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from loader.files.format import Manifest, load_manifest
from nmoe_core.config.run import Run
from nmoe_core.shards.verify import Problem, find_leak, verify_manifest
from nmoe_core.tasks.checks.verdict import Verdict, Verdicts

MANIFEST_CHECKS = ("checksums", "eos", "index", "token_range")


def check_shards(run: Run, source: str, split: str, buckets: Iterable[int]) -> Verdicts:
    """`integrity`: every byte and token of shards, as `nmoe verify --checksums --deep`."""
    return {"integrity": integrity(run.tree.shard(source, b, split).manifest for b in buckets)}


def check_manifest(run: Run, source: str, split: str) -> Verdicts:
    """The four checks of a split's manifest, in one reading of its files."""
    manifest = load_manifest(run.tree.manifest(source, split))
    problems = verify_manifest(manifest, checksums=True, deep=True)
    return {
        name: _verdict_of([p for p in problems if p.check == name], manifest)
        for name in MANIFEST_CHECKS
    }


def check_leak(run: Run, source: str) -> Verdicts:
    """`no_leak`: no document of the validation split is in training, by id."""
    manifests = [load_manifest(run.tree.manifest(source, split)) for split in ("train", "valid")]
    leak = find_leak(*manifests)
    facts = {
        "shared_ids": leak.num_ids,
        "shared_texts": leak.num_texts,
        "valid_documents": manifests[1].total_documents,
    }
    if not manifests[1].total_documents:
        return {"no_leak": Verdict(False, "the validation split is empty", facts)}
    found = f"{leak.num_ids} ids and {leak.num_texts} texts are in both splits"
    found += f", such as {leak.example}" if leak.example else ""
    return {"no_leak": Verdict(leak.num_ids == 0, found, facts)}


def integrity(manifests: Iterable[Path]) -> Verdict:
    """Every byte and token of the shards with these manifests."""
    problems: list[Problem] = []
    documents = 0
    for path in manifests:
        manifest = load_manifest(path)
        problems += verify_manifest(manifest, checksums=True, deep=True)
        documents += manifest.total_documents
    return _problems(problems, f"{documents} documents, every token read")


def _verdict_of(problems: list[Problem], manifest: Manifest) -> Verdict:
    return _problems(problems, f"{manifest.num_shards} files, {manifest.total_tokens} tokens")


def _problems(problems: list[Problem], otherwise: str) -> Verdict:
    found = str(problems[0]) if problems else otherwise
    return Verdict(not problems, found, {"problems": len(problems)})
