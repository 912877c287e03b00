"""Digests, and the rule that decides whether an output is current.

Each task writes, with its output, the fingerprints of all inputs of the output: input digests,
settings, and the version of the task. If the recorded fingerprints of a task equal the current
ones, the task does no work. Fingerprints are values, never times.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from loader.errors import FormatError, NmoeError
from loader.files.checksummed_json import RESTORE, check_seal, sealed
from loader.files.format import read_json_object
from loader.files.nested import json_value
from loader.files.regular import read_file
from nmoe_core.base.atomic import write_json
from nmoe_core.base.bucket.local import sha256_of_bytes
from nmoe_core.base.bucket.paths import listed_digest

Fingerprints = dict[str, str]
# The coarsest resolution of file times: 2 s, on FAT.
CLOCK_NS = 2 * 10**9


def first_difference(there: Mapping[str, Any], wanted: Mapping[str, Any]) -> str | None:
    """The first key whose values differ, or that only one of the two records has."""
    differing = (k for k in {**wanted, **there} if there.get(k) != wanted.get(k))
    return next(differing, None)


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a file. The digest of a file in a bucket is taken from its list."""
    listed = listed_digest(path)
    return sha256_of_bytes(path) if listed is None else listed


def sha256_json(value: Any) -> str:
    """Hex SHA-256 of the canonical JSON of `value`: sorted keys, no spaces, UTF-8."""
    text = json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    return hashlib.sha256(text.encode()).hexdigest()


def recorded(summary: Path) -> Fingerprints | None:
    """Fingerprints that a task recorded in its committed JSON summary; None if the summary is
    missing or is not JSON: a task commits only JSON.
    """
    try:
        value = json_value(read_file(summary))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return value.get("fingerprints") if isinstance(value, dict) else None


def read_sealed(path: Path) -> dict[str, Any] | None:
    """The JSON object of a file with a checksum, without the checksum; None if the file is missing
    or was changed.

    Use it for caches: without the file, the work is repeated.
    """
    try:
        value = read_json_object(path)
        check_seal(value, path, required=True, code="E-FORMAT")
    except FormatError:
        return None
    return {key: item for key, item in value.items() if key != "content_hash"}


def seal_summary(value: dict[str, Any]) -> dict[str, Any]:
    """Add the version of the format and a checksum to a task's summary. Every summary with a
    version has a checksum."""
    return sealed(value | {"schema_version": 1})


def read_summary(
    path: Path,
    error: type[NmoeError] = FormatError,
    code: str = "E-SUMMARY-HASH",
    *,
    sealed_since: str = "schema_version",
    do: str = RESTORE,
) -> dict[str, Any]:
    """Read a task's summary and check its checksum. Old summaries have no checksum. A summary with
    the key `sealed_since` must have a checksum, since both were introduced together. `error`,
    `code` and `do` are the class, the code and the advice of the error.

    Raises:
        NmoeError: Raised as `error`: the file was changed.
        FormatError: The file is missing or not JSON.
    """
    value = read_json_object(path)
    check_seal(value, path, required=sealed_since in value, error=error, code=code, do=do)
    return value


def read_recorded(summary: Path) -> tuple[Fingerprints | None, dict[str, Any]]:
    """As `recorded`, with the checked summary; the summary is empty if it is missing, edited or
    damaged."""
    try:
        value = read_summary(summary)
    except FormatError:
        return recorded(summary), {}
    return value.get("fingerprints"), value


def is_current(summary: Path, fingerprints: Fingerprints) -> bool:
    """Whether the output committed with `summary` was made from exactly these fingerprints.

    An edited or damaged summary is ignored.
    """
    found, value = read_recorded(summary)
    return found == fingerprints and bool(value)


class Identity(NamedTuple):
    """A value that changes whenever a file may have changed."""

    device: int
    inode: int
    size_bytes: int
    mtime_ns: int
    ctime_ns: int


_Known = dict[str, tuple[Identity, str]]
_known: _Known = {}


def local_digest(path: Path) -> str:
    """SHA-256 of a local file. It is hashed again only if its path, device, inode, size or times
    have changed, or if it was changed in the last two seconds. Programs cannot set `ctime`, so a
    file that a program rewrites in place with the old times is hashed again too."""
    if (listed := listed_digest(path)) is not None:
        return listed
    return while_unchanged(path, sha256_file, _known)


def while_unchanged(path: Path, compute: Callable[[Path], str], known: _Known) -> str:
    """The text that `compute` makes from a file, kept in `known` by the rule of `local_digest`."""
    identity = file_identity(path)
    if identity is None:
        return compute(path)
    key = _key(path)
    found = known.get(key)
    if found is None or found[0] != identity:
        found = known[key] = identity, compute(path)
    return found[1]


def keep_digests(path: Path, files: Iterable[Path]) -> None:
    """Write the digests of these files that this process knows, for `recall_digests` in another
    process."""
    known = ((key, _known[key]) for key in map(_key, files) if key in _known)
    write_json(path, sealed({key: [*identity, digest] for key, (identity, digest) in known}))


def recall_digests(path: Path) -> None:
    """Load the digests that `keep_digests` wrote; a file that was edited or damaged is ignored."""
    for key, row in (read_sealed(path) or {}).items():
        _known[key] = Identity(*row[:-1]), row[-1]


def file_identity(path: Path) -> Identity | None:
    """The identity of a file's content; None if the file is so new that a further change could
    leave its times equal."""
    stat = path.stat()
    if time.time_ns() - stat.st_ctime_ns < CLOCK_NS:
        return None
    return Identity(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


def _key(path: Path) -> str:
    return os.fsencode(path.absolute()).decode("utf-8", "backslashreplace")
