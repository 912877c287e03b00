"""Strict, bounded readers of the on-disk formats: `.npy` shard, `.idx` index, `manifest.json`.

Nothing is trusted: headers are parsed without pickle, sizes are checked against the file before a
byte is mapped, and a path in a manifest cannot leave the manifest's directory. Trees written by
other tools open: only the fields of the published format are required, unknown ones are ignored,
and our own additions are checked where present. Formats: docs/formats.md.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from loader.errors import FormatError
from loader.files.sealed import check_seal

INDEX_MAGIC = b"NMOEIDX\0"
INDEX_VERSION = 1
INDEX_HEADER = struct.Struct("<8sQQQ")
MANIFEST_NAME = "manifest.json"
SCHEMA_VERSION = 1
MAX_MANIFEST_BYTES = 512 * 2**20
_NPY_MAGIC = b"\x93NUMPY\x01\x00"
_MAX_NPY_HEADER_BYTES = 4096


class IndexHeader(NamedTuple):
    """The four header fields of an `.idx` file."""

    magic: bytes
    version: int
    num_docs: int
    reserved: int


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
    """A committed set of shards. `extra` holds every field the published format does not name."""

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
        """The manifest's checked `content_hash`; without one, a digest of sizes and checksums."""
        recorded = self.extra.get("content_hash")
        if isinstance(recorded, str):
            return recorded
        rows = [[s.path, s.num_tokens, s.num_documents, s.checksum] for s in self.shards]
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def resolve_inside(root: Path, relative: str) -> Path:
    """Join a manifest's relative POSIX path to its directory.

    Raises:
        FormatError: The path is absolute, holds `..` or NUL, or a link leads out (E-PATH-ESCAPE).
    """
    pure = PurePosixPath(relative)
    if not relative or "\0" in relative or "\\" in relative or pure.is_absolute():
        raise _escape(root, relative)
    if ".." in pure.parts:
        raise _escape(root, relative)
    path = root / pure
    real = None
    try:
        # Only a link below the root can lead out; looking for one is cheaper than resolving all.
        at = os.fspath(root)
        for part in pure.parts:
            at = os.path.join(at, part)
            if stat.S_ISLNK(os.lstat(at).st_mode):
                real = Path(os.path.realpath(path))
                break
    except (FileNotFoundError, NotADirectoryError):
        return path  # opening it says what is missing
    except (OSError, UnicodeEncodeError):  # a name that no file can have
        raise _escape(root, relative) from None
    if real is not None and not real.is_relative_to(os.path.realpath(root)):
        raise _escape(root, relative)
    return path


def _escape(root: Path, relative: str) -> FormatError:
    return FormatError(
        "path leaves its directory",
        where=root,
        found=repr(relative),
        expected="a relative path inside it",
        code="E-PATH-ESCAPE",
    )


def read_npy_header(path: Path) -> tuple[int, int]:
    """Check a shard's header against its file; return (number of tokens, byte offset of the data).

    Raises:
        FormatError: Missing (E-SHARD-MISSING), not NPY v1.0 `<u4` 1-D in C order (E-SHARD-FORMAT),
            or shorter or longer than the header says (E-SHARD-TRUNCATED).
    """
    try:
        size_bytes = path.stat().st_size
        with open(path, "rb") as file:
            head = file.read(len(_NPY_MAGIC) + 2)
            if len(head) < len(_NPY_MAGIC) + 2 or not head.startswith(_NPY_MAGIC):
                raise _shard_format(path, repr(head[:8]), "an NPY version 1.0 file")
            header_bytes = int.from_bytes(head[-2:], "little")
            if header_bytes > _MAX_NPY_HEADER_BYTES:
                raise _shard_format(path, f"a header of {header_bytes} bytes", "at most 4096")
            header = file.read(header_bytes)
    except OSError as error:
        raise _unreadable(path, error, "E-SHARD-MISSING") from None
    num_tokens = _parse_npy_header(path, header, header_bytes)
    offset = len(head) + header_bytes
    if size_bytes != offset + 4 * num_tokens:
        raise FormatError(
            "shard size does not match its header",
            where=path,
            found=f"{size_bytes} bytes",
            expected=f"{offset + 4 * num_tokens}",
            do="run prep for this shard again, or restore the file",
            code="E-SHARD-TRUNCATED",
        )
    return num_tokens, offset


def _parse_npy_header(path: Path, header: bytes, header_bytes: int) -> int:
    if len(header) != header_bytes:
        raise _shard_format(path, f"{len(header)} header bytes", str(header_bytes))
    try:
        fields = ast.literal_eval(header.decode("latin-1").strip())
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        raise _shard_format(path, repr(header[:60]), "a literal header dictionary") from None
    if not isinstance(fields, dict) or set(fields) != {"descr", "fortran_order", "shape"}:
        raise _shard_format(path, repr(fields)[:120], "keys descr, fortran_order, shape")
    shape = fields["shape"]
    one_dim = isinstance(shape, tuple) and len(shape) == 1
    if not one_dim or type(shape[0]) is not int or not 0 <= shape[0] < 2**48:
        raise _shard_format(path, f"shape {shape!r}", "one dimension")
    if fields["descr"] != "<u4" or fields["fortran_order"] is not False:
        found = f"descr {fields['descr']!r}, fortran_order {fields['fortran_order']!r}"
        raise _shard_format(path, found, "descr '<u4' in C order")
    return shape[0]


def _shard_format(path: Path, found: str, expected: str) -> FormatError:
    return FormatError(
        "not a token shard", where=path, found=found, expected=expected, code="E-SHARD-FORMAT"
    )


def _unreadable(path: Path, error: OSError, code: str) -> FormatError:
    do = "make it again"
    if code == "E-INDEX-MISSING":
        do = "nmoe regenerate-index rebuilds it from the shard"
    what = "file is missing" if isinstance(error, FileNotFoundError) else "file cannot be read"
    reason = None if isinstance(error, FileNotFoundError) else error.strerror
    return FormatError(what, where=path, found=reason, do=do, code=code)


def open_shard(path: Path) -> np.ndarray:
    """Map a shard read-only: uint32 `[num_tokens]`. Raises as `read_npy_header` does."""
    num_tokens, offset = read_npy_header(path)
    if num_tokens == 0:
        return np.empty(0, np.uint32)
    mapped = np.memmap(path, np.dtype("<u4"), "r", offset, (num_tokens,))
    # A plain view: slicing np.memmap builds a subclass object each time, which costs as much as
    # copying a window of 2,048 tokens.
    return np.asarray(mapped)


class IndexReader:
    """Document boundaries of one shard.

    Args:
        path: An `.idx` file.

    Raises:
        FormatError: Missing (E-INDEX-MISSING), or magic, version, size or boundaries are wrong
            (E-INDEX-FORMAT).
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            size_bytes = self.path.stat().st_size
            with open(self.path, "rb") as file:
                head = file.read(INDEX_HEADER.size)
                if len(head) != INDEX_HEADER.size:
                    raise self._error(f"{len(head)} bytes", "a 32-byte header")
                self.header = IndexHeader(*INDEX_HEADER.unpack(head))
                self._check_header(size_bytes)
                body = file.read(16 * self.header.num_docs)
        except OSError as error:
            raise _unreadable(self.path, error, "E-INDEX-MISSING") from None
        self._spans = np.frombuffer(body, "<u8").reshape(-1, 2)
        self._check_spans()

    @property
    def num_docs(self) -> int:
        """Number of documents."""
        return self.header.num_docs

    def get_document(self, i: int) -> tuple[int, int]:
        """Token span `(start, end)` of document `i`, end exclusive and past its EOS.

        Raises:
            IndexError: `i` is negative or not below `num_docs`.
        """
        if not 0 <= i < self.num_docs:
            raise IndexError(f"{self.path}: document {i} of {self.num_docs}")
        start, end = self._spans[i]
        return int(start), int(end)

    def iter_documents(self) -> Iterator[tuple[int, int]]:
        """All spans in order."""
        yield from zip(*self._spans.T.tolist())

    def to_array(self) -> np.ndarray:
        """All spans: uint64 `[num_docs, 2]`."""
        return self._spans

    def _check_header(self, size_bytes: int) -> None:
        magic, version, num_docs, _ = self.header
        if magic != INDEX_MAGIC or version != INDEX_VERSION:
            raise self._error(f"magic {magic!r} version {version}", f"{INDEX_MAGIC!r} version 1")
        if size_bytes != INDEX_HEADER.size + 16 * num_docs:
            raise self._error(
                f"{size_bytes} bytes", f"{INDEX_HEADER.size + 16 * num_docs} for {num_docs} docs"
            )

    def _check_spans(self) -> None:
        starts, ends = self._spans[:, 0], self._spans[:, 1]
        if not len(starts):
            return
        if starts[0] != 0:
            raise self._error(f"first document at {starts[0]}", "0")
        for bad, found in (
            (np.flatnonzero(ends <= starts), "an empty or reversed span"),
            (np.flatnonzero(starts[1:] != ends[:-1]), "a gap or overlap after it"),
        ):
            if len(bad):
                raise self._error(f"document {bad[0]}: {found}", "contiguous spans")

    def _error(self, found: str, expected: str) -> FormatError:
        return FormatError(
            "not a document index",
            where=self.path,
            found=found,
            expected=expected,
            do="nmoe regenerate-index rebuilds it from the shard",
            code="E-INDEX-FORMAT",
        )


def load_manifest(path: str | Path) -> Manifest:
    """Read a committed manifest.

    Raises:
        FormatError: Missing (E-MANIFEST-MISSING), or not a manifest: bad JSON, a field missing or
            of the wrong type, totals that are not the sums (E-MANIFEST-FORMAT), its
            `content_hash` is missing or of other content (E-MANIFEST-HASH), a path leaves the
            directory (E-PATH-ESCAPE).
    """
    path = Path(path)
    value = read_json_object(path)
    check_seal(value, path, required=_is_ours(value), code="E-MANIFEST-HASH")
    entries = value.pop("shards", None)
    if not isinstance(entries, list):
        raise _manifest_error(path, f"shards {type(entries).__name__}", "a list")
    shards = tuple(_shard_entry(path, i, entry) for i, entry in enumerate(entries))
    texts = {k: _take(path, value, k, str) for k in ("dataset", "version", "tokenizer", "dtype")}
    keys = ("vocab_size", "eos_token_id", "total_tokens", "total_documents", "num_shards")
    counts = {k: _take(path, value, k, int) for k in keys}
    if texts["dtype"] != "uint32":
        raise _manifest_error(path, f"dtype {texts['dtype']}", "uint32")
    if counts["eos_token_id"] >= counts["vocab_size"]:
        raise _manifest_error(
            path, f"eos_token_id {counts['eos_token_id']}", f"below {counts['vocab_size']}"
        )
    schema_version = value.get("schema_version", SCHEMA_VERSION)
    if type(schema_version) is not int or schema_version > SCHEMA_VERSION:
        raise _manifest_error(path, f"schema_version {schema_version!r}", f"<= {SCHEMA_VERSION}")
    manifest = Manifest(path=path, shards=shards, extra=value, **texts, **counts)
    _check_totals(manifest)
    return manifest


def _is_ours(value: dict[str, Any]) -> bool:
    """Whether our prep made the manifest: it seals every manifest, other tools seal none."""
    return "pipeline_version" in value or "fingerprints" in value


def read_json_object(path: Path, max_bytes: int = MAX_MANIFEST_BYTES) -> dict[str, Any]:
    """Parse a bounded JSON file that holds one object; numbers must be finite, keys unique."""
    try:
        if path.stat().st_size > max_bytes:
            raise _manifest_error(path, f"{path.stat().st_size} bytes", f"at most {max_bytes}")
        value = json.loads(
            path.read_bytes(), parse_constant=_refuse_constant, object_pairs_hook=_unique_keys
        )
    except OSError as error:
        raise _unreadable(path, error, "E-MANIFEST-MISSING") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, FormatError):
            raise
        raise _manifest_error(path, f"{error}", "one JSON object") from None
    if not isinstance(value, dict):
        raise _manifest_error(path, type(value).__name__, "one JSON object")
    return value


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number here")


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


def _check_totals(manifest: Manifest) -> None:
    for name, total, parts in (
        ("num_shards", manifest.num_shards, len(manifest.shards)),
        ("total_tokens", manifest.total_tokens, sum(s.num_tokens for s in manifest.shards)),
        (
            "total_documents",
            manifest.total_documents,
            sum(s.num_documents for s in manifest.shards),
        ),
    ):
        if total != parts:
            raise _manifest_error(manifest.path, f"{name} {total}", f"{parts}, the sum of shards")


def _manifest_error(path: Path, found: str, expected: str) -> FormatError:
    return FormatError(
        "not a valid manifest",
        where=path,
        found=found,
        expected=expected,
        code="E-MANIFEST-FORMAT",
    )
