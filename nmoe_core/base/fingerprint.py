"""Digests, and the rule that decides whether an output has to be made again.

Each task writes, with its output, the fingerprints of everything the output was made from: input
digests, settings, and the task's own version. A task whose recorded fingerprints equal the ones it
would use now does no work. Fingerprints are values, never times.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loader.errors import FormatError, NmoeError
from loader.files.format import read_json_object
from loader.files.sealed import RESTORE, check_seal, sealed

Fingerprints = dict[str, str]
_READ_BYTES = 4 * 2**20


def first_difference(there: Mapping[str, Any], wanted: Mapping[str, Any]) -> str | None:
    """The first key under which two records of what something was made from differ."""
    differing = (k for k in {**wanted, **there} if there.get(k) != wanted.get(k))
    return next(differing, None)


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a file's bytes.

    Reads are large, so that a hashing thread seldom waits for the interpreter's lock.
    """
    digest, piece = hashlib.sha256(), memoryview(bytearray(_READ_BYTES))
    with open(path, "rb", buffering=0) as file:
        while size := file.readinto(piece):
            digest.update(piece[:size])
    return digest.hexdigest()


def sha256_json(value: Any) -> str:
    """Hex SHA-256 of the canonical JSON of `value`: sorted keys, no spaces, UTF-8."""
    text = json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    return hashlib.sha256(text.encode()).hexdigest()


def recorded(summary: Path) -> Fingerprints | None:
    """Fingerprints that a task recorded in its committed JSON summary; None if there are none.

    A file that is not JSON was not committed by a task, so it has none.
    """
    try:
        value = json.loads(summary.read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
        return None
    return value.get("fingerprints") if isinstance(value, dict) else None


def read_sealed(path: Path) -> dict[str, Any] | None:
    """A sealed JSON object without its hash; None if there is none or it is not as it was written.

    For files that only save work: without one, the work is done again.
    """
    try:
        value = read_json_object(path)
        check_seal(value, path, required=True, code="E-FORMAT")
    except FormatError:
        return None
    return {key: item for key, item in value.items() if key != "content_hash"}


def seal_summary(value: dict[str, Any]) -> dict[str, Any]:
    """A task's summary as it is written: with a version, since which it has a hash."""
    return sealed(value | {"schema_version": 1})


def read_summary(
    path: Path,
    error: type[NmoeError] = FormatError,
    code: str = "E-SUMMARY-HASH",
    *,
    sealed_since: str = "schema_version",
    do: str = RESTORE,
) -> dict[str, Any]:
    """A task's summary, which must be as it was written; older ones have no hash.

    `error`, `code` and `do` make the error. A summary with the key `sealed_since`, which came with
    the hash, must have both.

    Raises:
        NmoeError: Of class `error`: it is not.
        FormatError: It is missing, or not JSON.
    """
    value = read_json_object(path)
    check_seal(value, path, required=sealed_since in value, error=error, code=code, do=do)
    return value


def is_current(summary: Path, fingerprints: Fingerprints) -> bool:
    """Whether the output committed with `summary` was made from exactly these fingerprints.

    A summary that was edited or damaged does not count.
    """
    try:
        return recorded(summary) == fingerprints and bool(read_summary(summary))
    except FormatError:
        return False
