"""`blocks.json`: the SHA-256 of each MiB of a manifest's tokens, to check parts of files.

The file is beside its manifest and has a checksum and the manifest's digest. A token file's first
block starts at its first token; its last block may be shorter.
"""

import hashlib
import json
import re
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from loader.errors import FormatError
from loader.files.checksummed_json import check_seal, sealed
from loader.files.format import Manifest, ShardEntry, check_digest, read_json_object
from loader.files.regular import open_file
from loader.files.shard import read_npy_header

BLOCKS_NAME = "blocks.json"
BLOCK_BYTES = 2**20
_FORMAT = "nmoe-blocks/1"
_HEX = 64  # digits of a SHA-256


def blocks_name(manifest: Path) -> str:
    """The name of the file of blocks beside a manifest: `blocks.json`; of a bucket, whose directory
    has the manifests of other buckets too, `blocks_{name of the manifest}`."""
    is_of_bucket = manifest.name.startswith("bucket_")
    return f"blocks_{manifest.name}" if is_of_bucket else BLOCKS_NAME


class FileBlocks(NamedTuple):
    """Blocks of a token file. offset_bytes: offset of the file's first token. integers: type of its
    tokens. digests: SHA-256 of each block."""

    block_bytes: int
    offset_bytes: int
    integers: np.dtype
    digests: tuple[str, ...]


def write_blocks(manifest: Manifest, block_bytes: int = BLOCK_BYTES) -> Path:
    """Read all tokens of a manifest and write `blocks.json` beside it; `block_bytes` is a multiple
    of 4. Raises FormatError if a file is missing, malformed or differs from the manifest."""

    def of_file(entry: ShardEntry) -> dict[str, Any]:
        path = manifest.shard_path(entry)
        _, offset_bytes, integers = read_npy_header(path, manifest.dtype)
        if entry.checksum:
            check_digest(path, entry.checksum, "E-SHARD-CHECKSUM")
        with open_file(path) as file:
            file.seek(offset_bytes)
            blocks = iter(lambda: file.read(block_bytes), b"")
            text = "".join(hashlib.sha256(block).hexdigest() for block in blocks)
        return {"offset_bytes": offset_bytes, "dtype": integers.str, "sha256": text}

    with ThreadPoolExecutor() as pool:  # hashing releases the GIL
        files = dict(zip((e.path for e in manifest.shards), pool.map(of_file, manifest.shards)))
    value = {"format": _FORMAT, "manifest": manifest.content_digest()}
    value |= {"block_bytes": block_bytes, "files": files}
    path = manifest.path.with_name(blocks_name(manifest.path))
    part = path.with_name(f".{path.stem}.part")
    part.write_text(json.dumps(sealed(value)) + "\n")
    part.replace(path)
    return path


def read_blocks(
    path: Path, manifest: Manifest, where: str | Path | None = None
) -> tuple[FileBlocks, ...]:
    """The blocks of each file of a manifest, in its order; a file that did not change is parsed
    once per process. Raises FormatError if `path` is not valid or belongs to another manifest
    (E-BLOCKS). where: the name of `path` in errors."""
    status = path.stat() if path.exists() else None
    version = status and (status.st_ino, status.st_size, status.st_mtime_ns)
    files = tuple(entry.path for entry in manifest.shards)
    return _parsed(path, version, manifest.content_digest(), files, where or path)


@lru_cache(maxsize=64)
def _parsed(
    path: Path, _version: object, expected: str, paths: tuple[str, ...], where: str | Path
) -> tuple[FileBlocks, ...]:
    value = read_json_object(path)
    check_seal(value, where, required=True, code="E-BLOCKS")
    files: Any = value.get("files")
    size = value.get("block_bytes")
    if type(size) is not int or size <= 0 or size % 4:
        raise _invalid(where, f"block_bytes = {size!r}", "a multiple of 4")
    if value.get("format") != _FORMAT or value.get("manifest") != expected:
        found = f"{value.get('format')} of manifest {value.get('manifest')}"
        raise _invalid(where, found, f"{_FORMAT} of manifest {expected}")
    try:
        return tuple(
            FileBlocks(
                size,
                int(files[name]["offset_bytes"]),
                np.dtype({"<u4": "<u4", "<u2": "<u2"}[files[name]["dtype"]]),
                tuple(re.findall(f"[0-9a-f]{{{_HEX}}}", files[name]["sha256"])),
            )
            for name in paths
        )
    except (KeyError, TypeError, ValueError) as error:
        raise _invalid(where, repr(error), "the blocks of every file of its manifest") from None


def check_count(blocks: FileBlocks, num_tokens: int, where: object) -> None:
    """Raise FormatError if blocks do not cover a file's tokens exactly (E-BLOCKS)."""
    expected = -(-num_tokens * blocks.integers.itemsize // blocks.block_bytes)
    if len(blocks.digests) != expected:
        raise _invalid(where, f"{len(blocks.digests)} blocks", str(expected))


def _invalid(where: object, found: str, expected: str) -> FormatError:
    return FormatError(
        "blocks.json does not match its manifest",
        where=where,
        found=found,
        expected=expected,
        do="write it again with `python -m loader blocks`, and publish",
        code="E-BLOCKS",
    )
