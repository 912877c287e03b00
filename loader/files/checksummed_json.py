"""JSON objects that carry the SHA-256 of their own content under `content_hash`.

Every JSON file that a later task relies on is sealed, so that an edited or damaged one is refused.
`content_hash` leaves out `created_at`; an object with that key has a `file_hash` too.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from loader.errors import FormatError, NmoeError

RESTORE = "the file was edited or damaged: restore it, or make it again"
_HASHES = ("content_hash", "file_hash")


def content_hash(value: Mapping[str, Any]) -> str:
    """SHA-256 over the canonical JSON of `value`, without `created_at` and the two hashes."""
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
    """Refuse `value` if its hashes differ from its content, or, with `required`, if it has no hash.
    Raises `error` with `code`."""
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
