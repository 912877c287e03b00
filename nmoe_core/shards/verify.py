"""Checks that a manifest's files match it: `nmoe verify`, and the blocking asset checks.

By default the check reads headers, sizes, indexes, and the manifests of the shards of a split.
`checksums` also hashes every file that a manifest names, and `deep` also reads every token. All
problems are reported, not only the first. Memory: one chunk of 2**24 tokens.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from loader.files.format import MANIFEST_NAME, Manifest, ShardEntry, load_manifest, resolve_inside
from loader.files.shard import IndexReader, open_shard, read_npy_header
from nmoe_core.base.errors import FormatError
from nmoe_core.base.fingerprint import sha256_of_bytes
from nmoe_core.shards.documents import ingest_ids
from nmoe_core.shards.manifest import (
    changes_file,
    entry_row,
    files_beside,
    named_files,
    shard_dir_name,
)

CHUNK_TOKENS = 2**24
_DIGESTED = (("path", "checksum"), ("index_path", "index_checksum"), ("ids_path", "ids_checksum"))
_DIGESTED_BESIDE = ("lineage_path", "lineage_checksum"), ("columns_path", "columns_checksum")
# Fields that must be equal in all shards of a split.
_SHARED = ("dataset", "version", "tokenizer", "vocab_size", "eos_token_id", "dtype")
_SHARED += ("tokenizer_fingerprint", "fingerprints", "schema_version", "pipeline_version")


@dataclass(frozen=True, slots=True)
class Problem:
    """One difference between a file and the manifest; `check` is the name of the violated rule."""

    check: str
    error: FormatError

    def __str__(self) -> str:
        return f"[{self.error.code}] {self.error}"


AtHand = Callable[[Manifest, Iterable[str], bool], AbstractContextManager[None]]


def on_this_machine(_manifest: Manifest, _names: Iterable[str], _is_whole: bool) -> Any:
    """The default of `at_hand`: the files are on this machine already."""
    return nullcontext()


def verify_manifest(
    manifest: Manifest,
    *,
    checksums: bool = False,
    deep: bool = False,
    at_hand: AtHand = on_this_machine,
) -> list[Problem]:
    """All problems of a manifest's files; empty if there are none.

    `checksums` hashes every file. `deep` also hashes every file, and checks every token: EOS must
    be at the end of each document and nowhere else, and every id inside the vocabulary. `at_hand`
    copies files of a manifest to this machine while they are checked: completely or, with False,
    only their size and first bytes.
    """
    problems = list(_unknown_files(manifest))
    is_whole = checksums or deep
    with at_hand(manifest, shard_manifests(manifest), True):
        parts, found = _shard_manifests(manifest)
    problems += found
    for entry in manifest.shards:
        row = entry_row(entry)
        with at_hand(manifest, named_files(row), is_whole):
            found = list(_structure(manifest, entry))
            problems += found
            if is_whole:
                problems += _digests(manifest, row, _DIGESTED)
            if deep and not found:
                problems += _tokens(manifest, entry)
    for part in (manifest, *parts):
        info = part.extra.get("source_info")
        if isinstance(info, dict) and (is_whole or "lineage_path" in info):
            with at_hand(part, files_beside(part), True):
                problems += _digests(part, info, _DIGESTED_BESIDE)
        if is_whole:
            problems += _changes(part)
    return problems


def shard_manifests(manifest: Manifest) -> dict[str, bool]:
    """Names of the manifests of a split's shards, and whether each must exist: directories that
    other tools wrote may lack them."""
    below = {PurePosixPath(entry.path).parent.as_posix() for entry in manifest.shards} - {"."}
    ours: set[str] = set()
    # prep wrote this manifest, and the hash in it protects it
    if "pipeline_version" in manifest.extra:
        num_buckets = manifest.extra.get("source_info", {}).get("num_buckets", 0)
        ours = {shard_dir_name(bucket) for bucket in range(num_buckets)}
    return {f"{name}/{MANIFEST_NAME}": name in ours for name in sorted(below | ours)}


def _shard_manifests(manifest: Manifest) -> tuple[list[Manifest], list[Problem]]:
    """The manifests of a split's shards, and their differences from the split's manifest."""
    parts = []
    problems = []
    for name, is_required in shard_manifests(manifest).items():
        path = manifest.path.parent / name
        if not is_required and not path.exists():
            continue
        try:
            part = load_manifest(path)
            _require_same(manifest, part, path.parent.name)
            parts.append(part)
        except FormatError as error:
            problems.append(Problem("index", error))
    return parts, problems


def _require_same(manifest: Manifest, part: Manifest, directory: str) -> None:
    """Raise FormatError if a shard manifest differs from the manifest of its split."""
    above = [e for e in manifest.shards if PurePosixPath(e.path).parent.as_posix() == directory]
    rows = [entry_row(entry, directory) for entry in part.shards]
    if rows != [entry_row(entry) for entry in above]:
        raise _mixed(part, "shards", len(rows), f"the {len(above)} entries of {manifest.path}")
    for key in _SHARED:
        found, expected = (getattr(m, key, m.extra.get(key)) for m in (part, manifest))
        if found != expected:
            raise _mixed(part, key, found, expected)


def _mixed(part: Manifest, key: str, found: object, expected: object) -> FormatError:
    return FormatError(
        f"shard manifest differs from the manifest of its split: {key}",
        where=part.path,
        found=found,
        expected=expected,
        do="run prep again, or restore the file",
        code="E-MANIFEST-MIXED",
    )


def _changes(manifest: Manifest) -> Iterator[Problem]:
    """Whether the record of changes has the rows that the manifest says."""
    path = changes_file(manifest)
    if path is None:
        return
    from nmoe_core.shards.attribute_file import read_attribute, rows_digest

    expected = manifest.extra["source_info"]["changes_digest"]
    try:
        if (found := rows_digest(read_attribute(path))) != expected:
            yield _differs("checksums", path, found, expected)
    except FormatError as error:
        yield Problem("checksums", error)


def _structure(manifest: Manifest, entry: ShardEntry) -> Iterator[Problem]:
    try:
        num_tokens = read_npy_header(manifest.shard_path(entry), manifest.dtype).num_tokens
        if num_tokens != entry.num_tokens:
            yield _differs("index", manifest.shard_path(entry), num_tokens, entry.num_tokens)
        index = IndexReader(manifest.index_path(entry))
        if index.num_docs != entry.num_documents:
            yield _differs("index", index.path, index.num_docs, entry.num_documents)
        end = index.get_document(index.num_docs - 1)[1] if index.num_docs else 0
        if end != num_tokens:
            yield _differs("index", index.path, f"last document ends at {end}", num_tokens)
        name = entry.extra.get("ids_path")
        ids = resolve_inside(manifest.path.parent, name) if isinstance(name, str) else None
        if ids is not None and not ids.is_file():
            raise FormatError(
                "file is missing",
                where=ids,
                do="remove its shard directory and run prep again, or restore the file",
                code="E-IDS-MISSING",
            )
    except FormatError as error:
        yield Problem("index", error)


def _digests(
    manifest: Manifest, recorded: dict[str, Any], digested: tuple[tuple[str, str], ...]
) -> Iterator[Problem]:
    for path_key, digest_key in digested:
        expected = recorded.get(digest_key)
        if not isinstance(expected, str) or not isinstance(recorded.get(path_key), str):
            continue
        path = resolve_inside(manifest.path.parent, recorded[path_key])
        found = sha256_of_bytes(path) if path.is_file() else "no file"
        if found != expected:
            error = FormatError(
                "SHA-256 differs from the recorded SHA-256",
                where=path,
                found=found,
                expected=expected,
                do="remove its shard directory and run prep again, or restore the file",
                code="E-SHARD-CHECKSUM",
            )
            yield Problem("checksums", error)


def _tokens(manifest: Manifest, entry: ShardEntry) -> Iterator[Problem]:
    path = manifest.shard_path(entry)
    tokens = open_shard(path)
    ends = IndexReader(manifest.index_path(entry)).to_array()[:, 1].astype(np.int64)
    for start in range(0, len(tokens), CHUNK_TOKENS):
        chunk = tokens[start : start + CHUNK_TOKENS]
        largest = int(chunk.max())
        if largest >= manifest.vocab_size:
            yield _differs("token_range", path, f"token {largest}", f"< {manifest.vocab_size}")
        found = start + np.flatnonzero(chunk == manifest.eos_token_id) + 1
        expected = ends[(ends > start) & (ends <= start + len(chunk))]
        if not np.array_equal(found, expected):
            wrong = np.setxor1d(found, expected)[0] - 1
            yield _differs("eos", path, f"EOS differs at token {wrong}", "one at each document end")


def _unknown_files(manifest: Manifest) -> Iterator[Problem]:
    known = {entry.path for entry in manifest.shards}
    known |= {entry.index_path for entry in manifest.shards}
    root = manifest.path.parent
    for path in sorted([*root.rglob("*.npy"), *root.rglob("*.idx")]):
        name = path.relative_to(root).as_posix()
        # A hidden directory belongs to an unfinished pass; readers ignore it.
        if name not in known and not any(part.startswith(".") for part in name.split("/")):
            error = FormatError(
                "file is not in the manifest",
                where=path,
                do="delete the file, or make the manifest again",
                code="E-MANIFEST-UNKNOWN-FILE",
            )
            yield Problem("index", error)


def _differs(check: str, path: Path, found: object, expected: object) -> Problem:
    code = {"token_range": "E-SHARD-TOKEN-RANGE", "eos": "E-SHARD-EOS"}.get(check, "E-SHARD-INDEX")
    error = FormatError(
        "file does not match its manifest", where=path, found=found, expected=expected, code=code
    )
    return Problem(check, error)


@dataclass(frozen=True, slots=True)
class Leak:
    """Documents of a validation split that are also in the training split."""

    num_ids: int
    num_texts: int
    example: str | None


def find_leak(train: Manifest, valid: Manifest) -> Leak:
    """Count validation documents whose id or exact text is also in the training split."""
    rows = list(ingest_ids(valid))
    ids = {ingest_id for ingest_id, _ in rows}
    texts = {text for _, text in rows}
    shared_ids = set()
    shared_texts = set()
    example = None
    for ingest_id, text in ingest_ids(train):
        if ingest_id in ids:
            shared_ids.add(ingest_id)
            example = example or ingest_id
        if text in texts:
            shared_texts.add(text)
    return Leak(len(shared_ids), len(shared_texts), example)
