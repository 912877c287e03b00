"""Whether files are what their manifest says: size, SHA-256, and an index of the same documents.

Costs one read of each file. Used before a run over a copy, and by `python -m loader verify`.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from loader.errors import FormatError
from loader.files.format import Manifest, ShardEntry
from loader.files.shard import IndexReader
from loader.files.spans import check_index


def verify_shard(manifest: Manifest, entry: ShardEntry) -> None:
    """Compare a shard and its index with the manifest.

    Raises:
        FormatError: The shard differs (E-SHARD-CHECKSUM), its index is missing or not of this shard
            (E-INDEX-...).
    """
    if entry.checksum:  # a directory without a manifest records none
        check_digest(manifest.shard_path(entry), entry.checksum, "E-SHARD-CHECKSUM")
    if not entry.index_path:
        return
    path = manifest.index_path(entry)
    recorded = entry.extra.get("index_checksum")
    if isinstance(recorded, str):
        check_digest(path, recorded, "E-INDEX-CHECKSUM")
    check_index(IndexReader(path), entry)


def check_digest(path: Path, expected: str, code: str, name: object = None) -> None:
    """Compare a file's SHA-256. Raises FormatError with `code`, naming `name` or the path."""
    found = sha256_of(path)
    if found != expected:
        raise FormatError(
            "file is not what its manifest says",
            where=name or path,
            found=f"sha256 {found}",
            expected=expected,
            do="run prep for this shard again, or restore the file",
            code=code,
        )


def sha256_of(path: Path) -> str:
    """SHA-256 of a file. Raises FormatError where it cannot be read (E-SHARD-MISSING)."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise FormatError(
            "file cannot be read", where=path, found=error.strerror, code="E-SHARD-MISSING"
        ) from None
