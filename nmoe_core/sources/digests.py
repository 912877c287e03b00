"""SHA-256 of local files, each hashed once while it is untouched.

A file is untouched while its path, device, inode, size and times are the same. The time of its last
change of state (`ctime`) cannot be set, so a file rewritten in place with its old times is seen;
one changed within the last two seconds is hashed every time, as the next change could leave the
same times. Prep keeps the digests beside its journal, so that going on does not begin with hashing
what the ended run had hashed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from loader.files.sealed import sealed
from nmoe_core.base.atomic import write_json
from nmoe_core.base.fingerprint import read_sealed, sha256_file

# File times are at least this exact: 2 s on the coarsest file systems.
_CLOCK_NS = 2 * 10**9


class Identity(NamedTuple):
    """What changes whenever a file may have changed."""

    device: int
    inode: int
    size_bytes: int
    mtime_ns: int
    ctime_ns: int


_known: dict[str, tuple[Identity, str]] = {}


def local_digest(path: Path) -> str:
    """SHA-256 of a local file, from memory if it is untouched since it was hashed."""
    identity = file_identity(path)
    if identity is None:
        return sha256_file(path)
    known = _known.get(_key(path))
    if known is None or known[0] != identity:
        known = _known[_key(path)] = identity, sha256_file(path)
    return known[1]


def keep_digests(path: Path, files: Iterable[Path]) -> None:
    """Write the known digests of these files, for `recall_digests` in another process."""
    known = ((key, _known[key]) for key in map(_key, files) if key in _known)
    write_json(path, sealed({key: [*identity, digest] for key, (identity, digest) in known}))


def recall_digests(path: Path) -> None:
    """Load what `keep_digests` wrote; a file that was edited or damaged is ignored."""
    for key, row in (read_sealed(path) or {}).items():
        _known[key] = Identity(*row[:-1]), row[-1]


def file_identity(path: Path) -> Identity | None:
    """What tells an untouched file; None while another change could leave the same."""
    stat = path.stat()
    if time.time_ns() - stat.st_ctime_ns < _CLOCK_NS:
        return None
    return Identity(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


def _key(path: Path) -> str:
    return os.fsencode(path.absolute()).decode("utf-8", "backslashreplace")
