"""Hard links: files that are equal in two versions of a shard are stored once.

Committed files are never modified, so a link is as safe as a copy. If the file system does not
support hard links, files are copied.
"""

import errno
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loader.files.format import MANIFEST_NAME, load_manifest
from loader.files.regular import open_file
from nmoe_core.base.atomic import TMP_MARK, fsync_dir
from nmoe_core.base.bucket.paths import bucket_of
from nmoe_core.base.errors import FormatError
from nmoe_core.base.fingerprint import sha256_file
from nmoe_core.shards.manifest import entry_row, named_files

_CANNOT_LINK = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS)
Row = dict[str, Any]


def keep_equal_files(staged: Path, old_dir: Path | None, rows: Sequence[Row]) -> str | None:
    """Replace new files with the equal files of an earlier version; return the creation time of
    that version if all its files are equal.

    `rows` are the objects of the new manifest that name files.
    """
    try:
        old = load_manifest(old_dir / MANIFEST_NAME) if old_dir else None
    except FormatError:
        old = None
    if old is None or old_dir is None:
        return None
    there = _files([*map(entry_row, old.shards), old.extra.get("source_info", {})])
    files = _files(rows)
    for name, checksum in files.items():
        is_known = there.get(name) == checksum and bucket_of(old_dir) is None
        if is_known and _has_digest(old_dir / name, checksum):
            tmp = staged / f"{name}{TMP_MARK}{os.getpid()}"
            link_or_copy(old_dir / name, tmp)
            os.replace(tmp, staged / name)
    return old.extra.get("created_at") if files == there else None


def link_or_copy(path: Path, to: Path) -> None:
    """Make a hard link to a committed file, or a durable copy with the same file times."""
    try:
        os.link(path, to)
    except OSError as error:
        if error.errno not in _CANNOT_LINK:
            raise
        shutil.copy2(path, to)
        with open_file(to) as file:
            os.fsync(file.fileno())


def link_tree(directory: Path, to: Path) -> None:
    """Make hard links to the files of a directory tree in a new directory."""
    to.mkdir()
    for path in sorted(directory.iterdir()):
        (link_tree if path.is_dir() else link_or_copy)(path, to / path.name)
    fsync_dir(to)


def _files(rows: Sequence[Row]) -> dict[str, str | None]:
    """The SHA-256 of each file that `rows` name, by file name."""
    return {name: digest for row in rows for name, digest in named_files(row).items()}


def _has_digest(path: Path, checksum: str | None) -> bool:
    return path.is_file() and sha256_file(path) == checksum
