"""Builds and combines `manifest.json`: one per `shard_NNNN/`, and one for the whole split.

The fields of the published format come first, then our additional fields. `content_hash` covers
everything except `created_at` and the hashes, so two runs over the same input write the same
`content_hash`; `file_hash` also covers `created_at`.
"""

import os
import re
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from loader.files.checksummed_json import sealed
from loader.files.format import (
    MANIFEST_NAME,
    SCHEMA_VERSION,
    Manifest,
    ShardEntry,
    load_manifest,
    resolve_inside,
)
from loader.files.shard import INDEX_HEADER, read_npy_header
from nmoe_core.base.atomic import write_json
from nmoe_core.base.bucket.paths import listed_digest
from nmoe_core.base.errors import ConfigError, FormatError
from nmoe_core.base.fingerprint import Fingerprints, first_difference, sha256_json, while_unchanged
from nmoe_core.config.tree import shard_dir_name

PIPELINE_VERSION = "nmoe-data/1"
COLUMNS_NAME = "columns.parquet"
CHANGES_NAME = "changes.parquet"
SHARD_DIR = re.compile(r"shard_\d{4,}")
_FILE_KEYS = ("path", "index_path", "ids_path")


@dataclass(frozen=True, slots=True)
class ShardFormat:
    """The facts about tokens that every manifest of a source records."""

    dataset: str
    version: str
    tokenizer: str
    vocab_size: int
    eos_token_id: int
    tokenizer_fingerprint: str
    bos_token_id: int | None = None
    """Token that starts each document; None if documents have no BOS."""
    dtype: str = "uint32"
    """Integer type of shard files: `uint32` or `uint16`."""

    @property
    def integers(self) -> np.dtype:
        """Integer type of shard files, as a numpy type."""
        return np.dtype(self.dtype).newbyteorder("<")


def build_manifest(
    fmt: ShardFormat,
    entries: list[dict[str, Any]],
    fingerprints: dict[str, str],
    source_info: dict[str, Any],
    made_at: str | None = None,
) -> dict[str, Any]:
    """The manifest of `entries` as a JSON object; `made_at` is the creation time (default: now)."""
    manifest: dict[str, Any] = {
        "dataset": fmt.dataset,
        "version": fmt.version,
        "tokenizer": fmt.tokenizer,
        "vocab_size": fmt.vocab_size,
        "eos_token_id": fmt.eos_token_id,
        "dtype": fmt.dtype,
        "created_at": created_at(made_at),
        "total_tokens": sum(entry["num_tokens"] for entry in entries),
        "total_documents": sum(entry["num_documents"] for entry in entries),
        "num_shards": len(entries),
        "shards": entries,
        "source_info": source_info,
        "schema_version": SCHEMA_VERSION,
        "pipeline_version": PIPELINE_VERSION,
        "tokenizer_fingerprint": fmt.tokenizer_fingerprint,
        "fingerprints": fingerprints,
    }
    if fmt.bos_token_id is not None:
        manifest["bos_token_id"] = fmt.bos_token_id
    return sealed(manifest)


def combine_shards(
    split_dir: Path, fmt: ShardFormat, num_buckets: int, source_info: dict[str, Any]
) -> dict[str, Any]:
    """The manifest of a split, combined from the manifests of its shards. Raises FormatError if a
    shard has no manifest (E-MANIFEST-MISSING), or shards were made from different inputs
    (E-MANIFEST-MIXED)."""
    paths = [split_dir / shard_dir_name(bucket) / MANIFEST_NAME for bucket in range(num_buckets)]
    parts = [load_manifest(path) for path in paths]
    fingerprints = parts[0].extra.get("fingerprints", {})
    for part in parts[1:]:
        other = part.extra.get("fingerprints", {})
        if key := first_difference(other, fingerprints):
            raise FormatError(
                f"shards were made from different inputs: {key} differs",
                where=part.path,
                found=other.get(key),
                expected=f"{fingerprints.get(key)} as in {parts[0].path.parent.name}",
                do="make the shards with the older inputs again",
                code="E-MANIFEST-MIXED",
            )
    entries = [entry_row(entry, part.path.parent.name) for part in parts for entry in part.shards]
    return build_manifest(fmt, entries, fingerprints, source_info | {"num_buckets": num_buckets})


def shard_dirs(directory: Path) -> list[Path]:
    """The shards in a directory that have a manifest, sorted by number."""
    found = (path.parent for path in directory.glob(f"shard_*/{MANIFEST_NAME}"))
    return sorted(path for path in found if SHARD_DIR.fullmatch(path.name))


def source_infos(split_dir: Path) -> list[dict[str, Any]]:
    """The `source_info` of each shard of a split, sorted by number; shards without a manifest are
    skipped."""
    manifests = [load_manifest(shard / MANIFEST_NAME) for shard in shard_dirs(split_dir)]
    return [manifest.extra.get("source_info", {}) for manifest in manifests]


def left_out(split_dir: Path, num_documents: int) -> dict[str, Any]:
    """Counts of documents that prep left out (empty or short, with their share of all read
    documents), cut or split; empty if the shards do not record it."""
    infos = source_infos(split_dir)
    if not infos or not all("filtered_documents" in info for info in infos):
        return {}
    num_left_out = sum(info["filtered_documents"] + info["empty_documents"] for info in infos)
    return {
        "left_out": num_left_out,
        "left_out_share": round(num_left_out / max(num_left_out + num_documents, 1), 4),
        "cut": sum(info["truncated_documents"] for info in infos),
        "split_records": sum(info.get("split_records", 0) for info in infos),
    }


def changes_by_rule(split_dir: Path) -> list[dict[str, Any]]:
    """What transforms changed in the shards of a split, a row for each `transform` and `rule`:
    `documents` that the rule changed, `spans` that it replaced, and `chars` in these spans; empty
    without transforms."""
    totals: dict[str, Counter[str]] = {}
    for info in source_infos(split_dir):
        for name, counts in info.get("changes", {}).items():
            totals.setdefault(name, Counter()).update(counts)
    rows = []
    for name, counts in sorted(totals.items()):
        transform, _, rule = name.partition("/")
        rows.append({"transform": transform, "rule": rule, **counts})
    return rows


def commit_manifest(path: Path, manifest: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """Write a manifest, unless the committed one has the same content hash."""
    try:
        unchanged = load_manifest(path).extra.get("content_hash") == manifest["content_hash"]
    except FormatError:  # the manifest is missing, or readers would refuse it
        unchanged = False
    if not unchanged:
        write_json(path, manifest)
    return manifest, not unchanged


def documents_digest(manifest: Manifest) -> str:
    """SHA-256 of a manifest's documents: of the checksums of its files and their vocabulary.

    Later tasks detect changed input only by this digest. Unlike `content_digest`, this digest does
    not cover the inputs of the shards: if one record is edited, prep writes every manifest of the
    source again, but the bytes of only one shard change.
    """
    keys = ("path", "num_tokens", "num_documents", "checksum", "index_checksum", "ids_checksum")
    files = [{key: entry_row(entry).get(key) for key in keys} for entry in manifest.shards]
    tokenizer = manifest.extra.get("tokenizer_fingerprint") or manifest.tokenizer
    return sha256_json(
        {"files": files, "tokenizer": tokenizer, "eos_token_id": manifest.eos_token_id}
    )


_digests: dict[str, Any] = {}


def digest_of(manifest: Path) -> str:
    """`documents_digest` of a manifest, which is read again only if it changed. Raises as
    `load_manifest`."""
    return while_unchanged(manifest, lambda path: documents_digest(load_manifest(path)), _digests)


def column_files(manifest: Manifest) -> dict[Path, str]:
    """The files of passthrough columns of a shard's manifest, or of all shards of a split's
    manifest, in order, each with the digest of its rows; empty if there are none."""
    root = manifest.path.parent
    below = dict.fromkeys(PurePosixPath(entry.path).parent.as_posix() for entry in manifest.shards)
    found = {}
    for path in (root / name / MANIFEST_NAME for name in below):
        part = (
            manifest if path == manifest.path else load_manifest(path) if path.is_file() else None
        )
        info = None if part is None else part.extra.get("source_info")
        if isinstance(info, dict) and isinstance(name := info.get("columns_path"), str):
            found[resolve_inside(path.parent, name)] = str(info.get("columns_digest"))
    return found


def first_documents(manifest: Manifest) -> list[int]:
    """The number in its shard of the first document of each file of a manifest. The manifest of a
    bucket does not have all files of its shards."""
    numbers: dict[Path, int] = {}
    for directory in {manifest.shard_path(entry).parent: None for entry in manifest.shards}:
        shard = find_manifest(directory / MANIFEST_NAME) or manifest
        first = 0
        for entry in shard.shards:
            path = shard.shard_path(entry)
            if path.parent == directory:
                numbers[path] = first
                first += entry.num_documents
    # A file that its shard does not name any more is refused when it is read.
    return [numbers.get(manifest.shard_path(entry), 0) for entry in manifest.shards]


def changes_file(manifest: Manifest) -> Path | None:
    """The record of what transforms changed in a shard, whose rows have the `changes_digest` of the
    manifest; None if the shard was made without transforms, or is a published copy, which lacks
    the file since it holds removed text."""
    path = manifest.path.parent / CHANGES_NAME
    info = manifest.extra.get("source_info")
    has_changes = isinstance(info, dict) and "changes_digest" in info
    return path if has_changes and path.is_file() else None


def is_shard_current(shard_dir: Path, fingerprints: Fingerprints) -> bool:
    """Whether a shard was made from these inputs and its files exist with their full length.

    Damage that does not change the length is found by `verify --checksums`, which reads every byte.
    """
    manifest = find_manifest(shard_dir / MANIFEST_NAME)
    if manifest is None or manifest.extra.get("fingerprints") != fingerprints:
        return False
    return is_shard_whole(manifest)


def find_manifest(path: Path) -> Manifest | None:
    """Like `load_manifest`, but returns None if the file is missing or damaged."""
    try:
        return load_manifest(path)
    except FormatError:
        return None


def is_shard_whole(manifest: Manifest) -> bool:
    """Whether the files of a shard exist with their full length."""
    columns = manifest.extra.get("source_info", {}).get("columns_path")
    if columns is not None and not (manifest.path.parent / columns).is_file():
        return False
    try:
        return all(_is_whole(manifest, entry) for entry in manifest.shards)
    except FormatError:
        return False


def _is_whole(manifest: Manifest, entry: ShardEntry) -> bool:
    index = manifest.index_path(entry)
    ids = entry.extra.get("ids_path")
    if (digest := listed_digest(manifest.shard_path(entry))) is not None:
        return digest == entry.checksum and index.is_file()
    return (
        read_npy_header(manifest.shard_path(entry), manifest.dtype).num_tokens == entry.num_tokens
        and index.is_file()
        and index.stat().st_size == INDEX_HEADER.size + 16 * entry.num_documents
        and (ids is None or (manifest.path.parent / ids).is_file())
    )


def entry_row(entry: ShardEntry, directory: str = "") -> dict[str, Any]:
    """The JSON object of an entry in its own manifest or, with `directory`, in the split's
    manifest."""
    row: dict[str, Any] = {
        "path": entry.path,
        "index_path": entry.index_path,
        "num_tokens": entry.num_tokens,
        "num_documents": entry.num_documents,
        "checksum": entry.checksum,
        **entry.extra,
    }
    if not directory:
        return row
    return row | {key: f"{directory}/{row[key]}" for key in _FILE_KEYS if key in row}


def named_files(row: dict[str, Any]) -> dict[str, str | None]:
    """Relative paths of the files that an entry names (`path` or `*_path`), each with its checksum
    (`checksum` or `*_checksum`) or None."""
    keys = [key for key in row if key == "path" or key.endswith("_path")]
    return {row[k]: row.get(f"{k.removesuffix('path')}checksum") or None for k in keys if row[k]}


def files_beside(manifest: Manifest) -> dict[str, str | None]:
    """Like `named_files`, for the files of a manifest that are not token shards: passthrough
    columns, lineage."""
    info = manifest.extra.get("source_info")
    named = named_files(info) if isinstance(info, dict) else {}
    return {name: checksum for name, checksum in named.items() if checksum is not None}


def created_at(made_at: str | None = None) -> str:
    """Creation time (default: now), ISO 8601 UTC; `SOURCE_DATE_EPOCH` fixes it for reproducible
    trees."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    if not epoch and made_at is not None:
        return made_at
    epoch = epoch or str(int(time.time()))
    if not epoch.isdecimal() or len(epoch) > 11:
        raise ConfigError("SOURCE_DATE_EPOCH is not a valid time", found=epoch, expected="seconds")
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(int(epoch)))
