"""JSON objects that carry the SHA-256 of their own content under `content_hash`.

Every JSON file that a later task reads as truth is sealed when it is written and checked when it is
read, so an edited or damaged file is refused instead of believed. Files of other tools, and of
versions that did not seal a kind of file yet, carry no hash: their readers say whether one is
required.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from loader.errors import FormatError, NmoeError

_NOT_CONTENT = ("created_at", "content_hash")


def content_hash(value: Mapping[str, Any]) -> str:
    """SHA-256 over the canonical JSON of `value`, without `created_at` and `content_hash`."""
    content = {key: item for key, item in value.items() if key not in _NOT_CONTENT}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def sealed(value: Mapping[str, Any]) -> dict[str, Any]:
    """`value` with its `content_hash` as the last key."""
    content = {key: item for key, item in value.items() if key != "content_hash"}
    return content | {"content_hash": content_hash(content)}


def check_seal(
    value: Mapping[str, Any],
    where: object,
    *,
    required: bool,
    code: str,
    error: type[NmoeError] = FormatError,
    do: str = "the file was edited or damaged: restore it, or make it again",
) -> None:
    """Refuse `value` unless its `content_hash` is that of its content.

    Args:
        value: The object as it was read.
        where: File that the error names.
        required: Whether an object without a hash is refused too.
        code: Code of the error.
        error: Class of the error.
        do: What the user should do.

    Raises:
        NmoeError: Of class `error`: the hash differs, or is missing where it is required.
    """
    recorded = value.get("content_hash")
    if recorded is None and not required:
        return
    found = content_hash(value)
    if recorded != found:
        raise error(
            "content_hash is not that of the file's content",
            where=where,
            found=found,
            expected="a content_hash" if recorded is None else recorded,
            do=do,
            code=code,
        )
