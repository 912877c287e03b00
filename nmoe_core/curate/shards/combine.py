"""Writes the manifest over all curated shards of a source, and the diversity of their windows.

The manifest is written only if every curated shard was made from the current parent shard. If the
manifest would be the same as before, the file is not rewritten. If shards have buckets, each bucket
has a manifest beside it, which lists the bucket's files.
"""

from collections import Counter
from pathlib import Path
from typing import Any

from loader.files.blocks import blocks_name
from loader.files.format import Manifest, load_manifest, read_json_object
from nmoe_core.base.atomic import replacing, write_json
from nmoe_core.base.bucket.paths import shown
from nmoe_core.base.errors import CurationError
from nmoe_core.base.fingerprint import read_summary, seal_summary
from nmoe_core.base.result import Result
from nmoe_core.config.tree import ShardPaths, Tree
from nmoe_core.curate.diversity.measure import compare_orders
from nmoe_core.curate.shards.curated import REPEATS, composition, shard_format
from nmoe_core.curate.shards.lineage import arranged_documents
from nmoe_core.curate.shards.planning import CurateSettings
from nmoe_core.shards.manifest import (
    build_manifest,
    combine_shards,
    commit_manifest,
    digest_of,
    documents_digest,
)

_SHARED_INFO = ("source", "assignment", "order", "include", "seed")


def combine_curated(tree: Tree, source: str, num_shards: int, settings: CurateSettings) -> Result:
    """Write `curation.json` of a source, then its curated manifest.

    The fact `misaligned_shards` counts shards whose windows were filled for another offset, because
    an earlier shard has changed since. Curate these shards again.

    Raises:
        CurationError: A shard was curated from an older version of its parent (E-CURATION-STALE),
            or its lineage is damaged (E-CURATION-LINEAGE).
        FormatError: A manifest is missing, or shards were curated with different settings
            (E-MANIFEST-MIXED).
    """
    shards = tree.shards(source, num_shards)
    parent = load_manifest(tree.manifest(source))
    path = tree.curated_manifest(source)
    made = [_checked(shard) for shard in shards]
    manifest = combined_manifest(tree, source, num_shards)
    diversity = compare_orders(*arranged_documents(shards), settings.seq_len)
    plans = _plans(shards, made)
    curation = tree.curation(source)
    recorded = seal_summary(
        {
            "source": source,
            "num_documents": parent.total_documents,
            "num_tokens": parent.total_tokens,
            "num_kept": manifest["total_documents"],
            "num_kept_tokens": manifest["total_tokens"],
            "diversity": diversity,
            **plans,
        }
    )
    with replacing(path), replacing(curation):
        if not curation.exists() or read_json_object(curation) != recorded:
            write_json(curation, recorded)
        _, changed = commit_manifest(path, manifest)
        changed |= _commit_buckets(tree, source, manifest)
    facts = {
        "documents": manifest["total_documents"],
        "tokens": manifest["total_tokens"],
        **{name: plans[name] for name in REPEATS if name in plans},
        "orders_taken": ", ".join(f"{name} ({count})" for name, count in plans["orders"].items()),
        "misaligned_shards": plans["num_misaligned"],
        "changed": changed,
        "path": shown(path),
        **composition(diversity, settings.packing),
    }
    if settings.resume_from_token is not None:
        facts["documents_deferred"] = plans["num_deferred"]
    return Result(manifest["content_hash"], facts)


def combined_manifest(tree: Tree, source: str, num_shards: int) -> dict[str, Any]:
    """The manifest over all curated shards of a source. Raises as `combine_curated`."""
    parent = load_manifest(tree.manifest(source))
    first = load_manifest(tree.shard(source, 0).curated_manifest).extra["source_info"]
    source_info = {key: first[key] for key in _SHARED_INFO}
    source_info["parent"] = documents_digest(parent)
    split = tree.curated_split(source)
    return combine_shards(split, shard_format(parent), num_shards, source_info)


def bucket_manifests(
    tree: Tree, source: str, manifest: dict[str, Any]
) -> dict[Path, dict[str, Any]]:
    """The manifest of each bucket of a source by its path, from the curated manifest of the source:
    the files of the bucket; empty without buckets. It has no digest of other documents, so it
    changes only with its own files."""
    files: dict[str, list[dict[str, Any]]] = {}
    for entry in manifest["shards"]:
        if name := entry.get("bucket"):
            files.setdefault(name, []).append(entry)
    fmt = shard_format(load_manifest(tree.manifest(source)))
    info = {k: v for k, v in manifest["source_info"].items() if k != "parent"}
    prints = manifest["fingerprints"]
    return {
        tree.bucket_manifest(source, name): build_manifest(
            fmt, entries, prints, info | {"bucket": name}
        )
        for name, entries in sorted(files.items(), key=lambda one: one[0].replace("/", "+"))
    }


def _commit_buckets(tree: Tree, source: str, manifest: dict[str, Any]) -> bool:
    """Write the manifests of buckets that changed, and remove those of buckets that are gone."""
    made = bucket_manifests(tree, source, manifest)
    changed = [commit_manifest(path, one)[1] for path, one in made.items()]
    gone = [path for path in tree.bucket_manifests(source) if path not in made]
    for path in gone:
        path.with_name(blocks_name(path)).unlink(missing_ok=True)
        path.unlink()
    return any(changed) or bool(gone)


def repeats_of(tree: Tree, source: str) -> tuple[int, int]:
    """The readings of documents beyond their first in the curated shards of a source, and their
    tokens. Raises FormatError if `curation.json` is missing or damaged."""
    found = read_summary(tree.curation(source))
    return found.get(REPEATS[0], 0), found.get(REPEATS[1], 0)


def _checked(shard: ShardPaths) -> Manifest:
    """Read the manifest of a curated shard; raises an error if the shard was not made from the
    current parent shard."""
    manifest = load_manifest(shard.curated_manifest)
    found = manifest.extra.get("source_info", {}).get("parent")
    expected = digest_of(shard.manifest)
    if found != expected:
        raise CurationError(
            "curated shard was made from another version of its parent",
            where=shard.curated_manifest,
            found=found,
            expected=expected,
            do="curate this shard again",
            code="E-CURATION-STALE",
        )
    return manifest


def _plans(shards: list[ShardPaths], made: list[Manifest]) -> dict[str, Any]:
    """The orders of the shards, and the number of shards whose offset differs from the plan."""
    orders: Counter[str] = Counter()
    repeats: Counter[str] = Counter()
    start = num_misaligned = num_deferred = 0
    for shard, manifest in zip(shards, made):
        facts = read_summary(shard.curation, CurationError, "E-CURATION-STALE")
        orders[facts["order"]] += 1
        num_deferred += facts["num_deferred"]
        repeats.update({name: facts[name] for name in REPEATS if name in facts})
        if facts["order"] == "window_fill" and manifest.total_documents:
            num_misaligned += facts["offset"] != start % int(facts["fingerprints"]["seq_len"])
        start += manifest.total_tokens
    taken = dict(sorted(orders.items()))
    counts = {"num_misaligned": num_misaligned, "num_deferred": num_deferred}
    return {"orders": taken, **counts, **repeats}
