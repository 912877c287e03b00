"""The manifest over the curated shards of a source, with the diversity of the whole.

It is written only when every curated shard was made from the parent shard that is there now, and
left untouched when its content would be the same.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loader.files.format import MANIFEST_NAME, load_manifest, read_json_object
from nmoe_core.base.atomic import write_json
from nmoe_core.base.errors import CurationError
from nmoe_core.base.fingerprint import read_summary, seal_summary
from nmoe_core.base.locks import replacing
from nmoe_core.curate.diversity.measure import compare_orders
from nmoe_core.curate.shards.consumed import CURATION_NAME
from nmoe_core.curate.shards.curated import shard_format
from nmoe_core.curate.shards.lineage import arranged_documents
from nmoe_core.shards.documents import shard_manifest
from nmoe_core.shards.manifest import combine_shards, commit_manifest, documents_digest

_SHARED_INFO = ("source", "assignment", "order", "include", "seed")


@dataclass(frozen=True, slots=True)
class CombineReport:
    """The curated manifest of a source; `is_current` when the same content was there already.

    `diversity` is what `compare_orders` returns for all shards, one after another. `orders` counts
    shards by the order taken. `num_misaligned` counts those whose windows were filled for another
    place in the stream than theirs, because a shard before them changed: curate them again.
    """

    path: Path
    is_current: bool
    content_hash: str
    num_documents: int
    num_tokens: int
    diversity: dict[str, Any]
    orders: dict[str, int]
    num_misaligned: int
    num_deferred: int


def combine_curated(
    data_root: Path, curated_root: Path, source: str, num_buckets: int, seq_len: int
) -> CombineReport:
    """Write `{curated_root}/{source}/train/manifest.json`, and `curation.json` before it.

    Args:
        data_root: Holds the parents and their manifest, `{source}/train/`.
        curated_root: Holds the curated shards.
        source: Source name.
        num_buckets: Shards of the source.
        seq_len: Tokens of the windows that diversity is measured on.

    Raises:
        CurationError: A shard was curated from another parent than the one there now
            (E-CURATION-STALE), or its lineage is damaged (E-CURATION-LINEAGE).
        FormatError: A manifest is missing, or shards were curated with different settings
            (E-MANIFEST-MIXED).
    """
    train_dir = curated_root / source / "train"
    parent = load_manifest(data_root / source / "train" / MANIFEST_NAME)
    infos = [_source_info(data_root, curated_root, source, k) for k in range(num_buckets)]
    source_info = {key: infos[0][key] for key in _SHARED_INFO}
    source_info["parent"] = documents_digest(parent)
    manifest = combine_shards(train_dir, shard_format(parent), num_buckets, source_info)
    documents = arranged_documents(curated_root, source, range(num_buckets))
    before = documents.topics[documents.source_order], documents.tokens[documents.source_order]
    after_order = documents.source_order.argsort()
    diversity = compare_orders(*before, after_order, seq_len)
    plans = _plans(curated_root, source, num_buckets)
    path = train_dir / CURATION_NAME
    with replacing(train_dir / MANIFEST_NAME), replacing(path):
        facts = {
            "source": source,
            "num_documents": parent.total_documents,
            "num_tokens": parent.total_tokens,
            "num_kept": manifest["total_documents"],
            "num_kept_tokens": manifest["total_tokens"],
            "diversity": diversity,
            **plans,
        }
        facts = seal_summary(facts)
        if not path.exists() or read_json_object(path) != facts:
            write_json(path, facts)
        _, changed = commit_manifest(train_dir / MANIFEST_NAME, manifest)
    return CombineReport(
        path=train_dir / MANIFEST_NAME,
        is_current=not changed,
        content_hash=manifest["content_hash"],
        num_documents=manifest["total_documents"],
        num_tokens=manifest["total_tokens"],
        diversity=diversity,
        **plans,
    )


def _plans(curated_root: Path, source: str, num_buckets: int) -> dict[str, Any]:
    """How the shards were ordered, and how many begin elsewhere in a window than planned."""
    orders: Counter[str] = Counter()
    start = num_misaligned = num_deferred = 0
    for bucket in range(num_buckets):
        manifest = shard_manifest(curated_root, source, bucket)
        path = manifest.path.parent / CURATION_NAME
        facts = read_summary(path, CurationError, "E-CURATION-STALE")
        orders[facts["order"]] += 1
        num_deferred += facts["num_deferred"]
        if facts["order"] == "window_fill" and manifest.total_documents:
            planned = int(facts["fingerprints"]["seq_len"])
            num_misaligned += facts["offset"] != start % planned
        start += manifest.total_tokens
    return {
        "orders": dict(sorted(orders.items())),
        "num_misaligned": num_misaligned,
        "num_deferred": num_deferred,
    }


def _source_info(data_root: Path, curated_root: Path, source: str, bucket: int) -> dict[str, Any]:
    """`source_info` of a curated shard, made from the parent that is there now."""
    curated = shard_manifest(curated_root, source, bucket)
    info = curated.extra.get("source_info", {})
    expected = documents_digest(shard_manifest(data_root, source, bucket))
    if info.get("parent") != expected:
        raise CurationError(
            "curated shard was made from another version of its parent",
            where=curated.path,
            found=info.get("parent"),
            expected=expected,
            do="curate this shard again",
            code="E-CURATION-STALE",
        )
    return info
