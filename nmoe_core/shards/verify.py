"""Checks that a manifest's files are what it says: `nmoe verify`, and the blocking asset checks.

The cheap tier reads headers, sizes and indexes; `checksums` hashes every file; `deep` reads every
token. Every problem is found and listed, not only the first. Memory: one chunk of 2**24 tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import orjson

from loader.format import (
    IndexReader,
    Manifest,
    ShardEntry,
    open_shard,
    read_npy_header,
    resolve_inside,
)
from nmoe_core.errors import FormatError
from nmoe_core.fingerprint import sha256_file

CHUNK_TOKENS = 2**24
_DIGESTED = (("path", "checksum"), ("index_path", "index_checksum"), ("ids_path", "ids_checksum"))


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is not as the manifest says. `check` names the rule it breaks."""

    check: str
    error: FormatError

    def __str__(self) -> str:
        return f"[{self.error.code}] {self.error}"


def verify_manifest(
    manifest: Manifest, *, checksums: bool = False, deep: bool = False
) -> list[Problem]:
    """Every problem of a manifest's files; empty when all is well.

    Args:
        manifest: A manifest that loaded.
        checksums: Hash every file and compare.
        deep: Read every token: one EOS at the end of each document and nowhere else, and every
            id inside the vocabulary.
    """
    problems = list(_unknown_files(manifest))
    for entry in manifest.shards:
        found = list(_structure(manifest, entry))
        if checksums:
            found += _digests(manifest, entry)
        if deep and not found:
            found += _tokens(manifest, entry)
        problems += found
    return problems


def _structure(manifest: Manifest, entry: ShardEntry) -> Iterator[Problem]:
    try:
        num_tokens, _ = read_npy_header(manifest.shard_path(entry))
        if num_tokens != entry.num_tokens:
            yield _differs("index", manifest.shard_path(entry), num_tokens, entry.num_tokens)
        index = IndexReader(manifest.index_path(entry))
        if index.num_docs != entry.num_documents:
            yield _differs("index", index.path, index.num_docs, entry.num_documents)
        if index.num_docs and index.get_document(index.num_docs - 1)[1] != num_tokens:
            end = index.get_document(index.num_docs - 1)[1]
            yield _differs("index", index.path, f"last document ends at {end}", num_tokens)
        if not index.num_docs and num_tokens:
            yield _differs("index", index.path, "no document", f"documents of {num_tokens} tokens")
    except FormatError as error:
        yield Problem("index", error)


def _digests(manifest: Manifest, entry: ShardEntry) -> Iterator[Problem]:
    recorded = {
        "path": entry.path,
        "index_path": entry.index_path,
        "checksum": entry.checksum,
        **entry.extra,
    }
    for path_key, digest_key in _DIGESTED:
        expected = recorded.get(digest_key)
        if not isinstance(expected, str) or not isinstance(recorded.get(path_key), str):
            continue
        path = resolve_inside(manifest.path.parent, recorded[path_key])
        found = sha256_file(path) if path.is_file() else "no file"
        if found != expected:
            error = FormatError(
                "SHA-256 is not the recorded one",
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
        # A hidden directory holds a pass that is not done; no reader looks there.
        if name not in known and not any(part.startswith(".") for part in name.split("/")):
            error = FormatError(
                "file is not in the manifest",
                where=path,
                do="delete it, or make the manifest again",
                code="E-MANIFEST-UNKNOWN-FILE",
            )
            yield Problem("index", error)


def _differs(check: str, path: Path, found: object, expected: object) -> Problem:
    code = {"token_range": "E-SHARD-TOKEN-RANGE", "eos": "E-SHARD-EOS"}.get(check, "E-SHARD-INDEX")
    error = FormatError(
        "file does not match its manifest", where=path, found=found, expected=expected, code=code
    )
    return Problem(check, error)


def ingest_ids(manifest: Manifest) -> Iterator[dict[str, str]]:
    """The lineage rows of a manifest, `{"id", "text_sha256"}` in document order.

    Trees of other tools have none.
    """
    for entry in manifest.shards:
        name = entry.extra.get("ids_path")
        if isinstance(name, str):
            with open(resolve_inside(manifest.path.parent, name), "rb") as file:
                for line in file:
                    yield orjson.loads(line)


@dataclass(frozen=True, slots=True)
class Leak:
    """Documents of a validation split that training has too."""

    num_ids: int
    num_texts: int
    example: str | None


def find_leak(train: Manifest, valid: Manifest) -> Leak:
    """Count validation documents whose id, or whose exact text, is in training as well."""
    rows = list(ingest_ids(valid))
    ids = {row["id"] for row in rows}
    texts = {row["text_sha256"] for row in rows}
    shared_ids, shared_texts, example = set(), set(), None
    for row in ingest_ids(train):
        if row["id"] in ids:
            shared_ids.add(row["id"])
            example = example or row["id"]
        if row["text_sha256"] in texts:
            shared_texts.add(row["text_sha256"])
    return Leak(len(shared_ids), len(shared_texts), example)
