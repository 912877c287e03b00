"""JSON objects with the SHA-256 of their content under `content_hash`.

Every JSON file that a later task reads has this hash, so that edited or damaged files are refused.
`content_hash` does not cover `created_at`; an object with `created_at` also has a `file_hash`,
which covers `created_at`.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from loader.errors import FormatError, NmoeError

RESTORE = "the file was edited or damaged: restore it, or write it again"
_HASHES = ("content_hash", "file_hash")


def content_hash(value: Mapping[str, Any]) -> str:
    """SHA-256 of the canonical JSON of `value` without `created_at` and the two hashes."""
    return _hash(value, "created_at", *_HASHES)


def _hash(value: Mapping[str, Any], *without: str) -> str:
    content = {key: item for key, item in value.items() if key not in without}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def sealed(value: Mapping[str, Any]) -> dict[str, Any]:
    """`value` with its hashes as the last keys."""
    content = {key: item for key, item in value.items() if key not in _HASHES}
    hashes = {"content_hash": content_hash(content)}
    if "created_at" in content:
        hashes["file_hash"] = _hash(content)
    return content | hashes


def check_seal(
    value: Mapping[str, Any],
    where: object,
    *,
    required: bool,
    code: str,
    error: type[NmoeError] = FormatError,
    do: str = RESTORE,
) -> None:
    """Raise `error` with `code` if the hashes of `value` do not match its content or, with
    `required`, if it has no hash."""
    recorded = value.get("content_hash")
    if recorded is None and not required:
        return
    found = {"content_hash": content_hash(value)}
    if "file_hash" in value:
        found["file_hash"] = _hash(value, *_HASHES)
    for name, digest in found.items():
        if value.get(name) != digest:
            raise error(
                f"{name} does not match the file's content",
                where=where,
                found=digest,
                expected=value.get(name) or f"a {name}",
                do=do,
                code=code,
            )
