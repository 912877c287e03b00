"""Reads `manifest.json` strictly: the shards of a directory, and the digests of their bytes.

A path in a manifest cannot leave the manifest's directory. Manifests of other tools can be read:
only the fields of the published format are required, unknown fields are ignored, and the fields
that this project adds are checked if present. Format: docs/formats.md.
"""

import hashlib
import json
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from loader.errors import FormatError
from loader.files.addresses import as_path
from loader.files.checksummed_json import check_seal
from loader.files.nested import json_value
from loader.files.regular import open_file, read_file
from loader.files.shard import IndexReader, unreadable

MANIFEST_NAME = "manifest.json"
SCHEMA_VERSION = 1
DTYPES = ("uint32", "uint16")
MAX_MANIFEST_BYTES = 512 * 2**20


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """One `.npy` file of a manifest. Paths are POSIX, relative to the manifest's directory."""

    path: str
    index_path: str
    num_tokens: int
    num_documents: int
    checksum: str
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Manifest:
    """A committed set of shards. `extra` has all fields that are not part of the published
    format."""

    path: Path
    dataset: str
    version: str
    tokenizer: str
    vocab_size: int
    eos_token_id: int
    dtype: str
    total_tokens: int
    total_documents: int
    num_shards: int
    shards: tuple[ShardEntry, ...]
    extra: dict[str, Any] = field(default_factory=dict)

    def shard_path(self, entry: ShardEntry) -> Path:
        """Absolute path of the entry's `.npy` file, inside the manifest's directory."""
        return resolve_inside(self.path.parent, entry.path)

    def index_path(self, entry: ShardEntry) -> Path:
        """Absolute path of the entry's `.idx` file, inside the manifest's directory."""
        return resolve_inside(self.path.parent, entry.index_path)

    def content_digest(self) -> str:
        """The manifest's verified `content_hash`, or, if it has none, a digest of sizes and
        checksums."""
        recorded = self.extra.get("content_hash")
        if isinstance(recorded, str):
            return recorded
        rows = [[s.path, s.num_tokens, s.num_documents, s.checksum] for s in self.shards]
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def resolve_inside(root: Path, relative: str) -> Path:
    """Join a manifest's relative POSIX path to its directory. Raises FormatError if the path is
    absolute, contains `..` or NUL, or a link leads out (E-PATH-ESCAPE)."""
    pure = PurePosixPath(relative)
    is_plain = not any(c in relative for c in "\0\\") and ".." not in pure.parts
    outside: str | None = ""
    if relative and is_plain and not pure.is_absolute():
        outside = _link_out(root, pure)
        if outside is None:
            return root / pure
    raise FormatError(
        "path leaves its directory",
        where=root,
        found=f"{relative!r}, a symbolic link to {outside}" if outside else repr(relative),
        expected="a relative path inside it",
        do="name the directory to which the link leads, or copy the files" if outside else None,
        code="E-PATH-ESCAPE",
    )


def _link_out(root: Path, pure: PurePosixPath) -> str | None:
    """Where a link leads out of `root`; None if it does not, empty if the name is not a possible
    file name. Searching for links is cheaper than resolving every path."""
    at = os.fspath(root)
    try:
        for part in pure.parts:
            at = os.path.join(at, part)
            if stat.S_ISLNK(os.lstat(at).st_mode):
                real = os.path.realpath(root / pure)
                return None if Path(real).is_relative_to(os.path.realpath(root)) else real
    except (FileNotFoundError, NotADirectoryError):
        return None  # opening the file later reports that it is missing
    except (OSError, UnicodeEncodeError):
        return ""
    return None


def load_manifest(path: str | Path) -> Manifest:
    """Read and check a committed manifest. Raises FormatError if the file is
    missing (E-MANIFEST-MISSING); if its JSON is invalid, a field is missing or of the wrong type,
    or a total is not the sum of the shards (E-MANIFEST-FORMAT); if its `content_hash` is missing or
    does not match (E-MANIFEST-HASH); and if a path leaves the directory (E-PATH-ESCAPE)."""
    path = as_path(path)
    value = read_json_object(path)
    # Our prep writes a hash into every manifest; other tools write none.
    is_ours = "pipeline_version" in value or "fingerprints" in value
    check_seal(value, path, required=is_ours, code="E-MANIFEST-HASH")
    entries = value.pop("shards", None)
    if not isinstance(entries, list):
        raise _manifest_error(path, f"shards {type(entries).__name__}", "a list")
    shards = tuple(_shard_entry(path, i, entry) for i, entry in enumerate(entries))
    texts = {k: _take(path, value, k, str) for k in ("dataset", "version", "tokenizer", "dtype")}
    keys = ("vocab_size", "eos_token_id", "total_tokens", "total_documents", "num_shards")
    counts = {k: _take(path, value, k, int) for k in keys}
    if texts["dtype"] not in DTYPES:
        raise _manifest_error(path, f"dtype {texts['dtype']}", " or ".join(DTYPES))
    eos = counts["eos_token_id"]
    vocab_size = counts["vocab_size"]
    if eos >= vocab_size:
        raise _manifest_error(path, f"eos_token_id {eos}", f"below {vocab_size}")
    schema_version = value.get("schema_version", SCHEMA_VERSION)
    if type(schema_version) is not int or schema_version > SCHEMA_VERSION:
        raise _manifest_error(path, f"schema_version {schema_version!r}", f"<= {SCHEMA_VERSION}")
    for key, total in (
        ("num_shards", len(shards)),
        ("total_tokens", sum(s.num_tokens for s in shards)),
        ("total_documents", sum(s.num_documents for s in shards)),
    ):
        if counts[key] != total:
            raise _manifest_error(path, f"{key} {counts[key]}", f"{total}, the sum of shards")
    return Manifest(path=path, shards=shards, extra=value, **texts, **counts)


def read_json_object(path: Path, max_bytes: int = MAX_MANIFEST_BYTES) -> dict[str, Any]:
    """Parse a JSON file of limited size with one object; numbers must be finite and keys unique."""
    try:
        if path.stat().st_size > max_bytes:
            raise _manifest_error(path, f"{path.stat().st_size} bytes", f"at most {max_bytes}")
        value = json_value(
            read_file(path), parse_constant=_refuse_constant, object_pairs_hook=_unique_keys
        )
    except OSError as error:
        raise unreadable(path, error, "E-MANIFEST-MISSING") from None
    except ValueError as error:
        if isinstance(error, FormatError):
            raise
        raise _manifest_error(path, f"{error}", "one JSON object") from None
    if not isinstance(value, dict):
        raise _manifest_error(path, type(value).__name__, "one JSON object")
    return value


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not allowed as a number")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key appears twice")
    return value


def _shard_entry(path: Path, i: int, entry: object) -> ShardEntry:
    if not isinstance(entry, dict):
        raise _manifest_error(path, f"shards[{i}] {type(entry).__name__}", "an object")
    rest = dict(entry)
    where = f"shards[{i}]."
    texts = {k: _take(path, rest, k, str, where) for k in ("path", "index_path", "checksum")}
    counts = {k: _take(path, rest, k, int, where) for k in ("num_tokens", "num_documents")}
    for key in ("path", "index_path"):
        resolve_inside(path.parent, texts[key])
    return ShardEntry(extra=rest, **texts, **counts)


def _take(path: Path, value: dict[str, Any], key: str, kind: type, where: str = "") -> Any:
    item = value.pop(key, None)
    if type(item) is not kind or (kind is int and item < 0):
        raise _manifest_error(path, f"{where}{key} = {item!r}"[:120], kind.__name__)
    return item


def _manifest_error(path: Path, found: str, expected: str) -> FormatError:
    return FormatError(
        "not a valid file", where=path, found=found, expected=expected, code="E-MANIFEST-FORMAT"
    )


def verify_shard(manifest: Manifest, entry: ShardEntry) -> None:
    """Compare a shard and its index with the manifest. Raises FormatError if the shard differs
    (E-SHARD-CHECKSUM), or its index is missing or belongs to another shard (E-INDEX-...)."""
    if entry.checksum:  # the digest is empty if the directory has no manifest
        check_digest(manifest.shard_path(entry), entry.checksum, "E-SHARD-CHECKSUM")
    if not entry.index_path:
        return
    path = manifest.index_path(entry)
    recorded = entry.extra.get("index_checksum")
    if isinstance(recorded, str):
        check_digest(path, recorded, "E-INDEX-CHECKSUM")
    check_index(IndexReader(path), entry)


def check_digest(path: Path, expected: str, code: str, name: object = None) -> None:
    """Compare a file's SHA-256 with `expected`. Raises FormatError if they differ
    (`code`; the message names `name` or the path), or the file cannot be read (E-SHARD-MISSING)."""
    try:
        with open_file(path) as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise FormatError(
            "file cannot be read", where=path, found=error.strerror, code="E-SHARD-MISSING"
        ) from None
    if found != expected:
        raise FormatError(
            "file does not match its manifest",
            where=name or path,
            found=f"sha256 {found}",
            expected=expected,
            do="run prep for this shard again, or restore the file",
            code=code,
        )


def check_index(index: IndexReader, entry: ShardEntry) -> None:
    """Raise FormatError if an index does not match its file (E-INDEX-FORMAT)."""
    end = index.get_document(index.num_docs - 1)[1] if index.num_docs else 0
    if (index.num_docs, end) != (entry.num_documents, entry.num_tokens):
        raise FormatError(
            "index does not match its shard",
            where=index.path,
            found=f"{index.num_docs} documents, {end} tokens",
            expected=f"{entry.num_documents} documents, {entry.num_tokens} tokens",
            do="rebuild the index with `nmoe regenerate-index`",
            code="E-INDEX-FORMAT",
        )
