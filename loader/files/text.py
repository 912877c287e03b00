"""Tokens as text, for people: a vocabulary file in tiktoken's format and nothing else.

A line of the file is a token's bytes in base64, a space and its id. Ids that the file does not
name, such as special tokens, are shown as `<|id|>`.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping
from pathlib import Path

from loader.errors import ConfigError


def read_vocabulary(path: Path) -> dict[int, bytes]:
    """Bytes of each token id.

    Raises:
        ConfigError: The file is missing or a line is not a token.
    """
    found: dict[int, bytes] = {}
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError("no vocabulary file", where=path, found=error.strerror) from None
    for number, line in enumerate(lines, 1):
        try:
            token, token_id = line.split()
            found[int(token_id)] = base64.b64decode(token, validate=True)
        except (ValueError, binascii.Error):
            raise ConfigError(
                "not a vocabulary file",
                where=f"{path}:{number}",
                found=repr(line[:40]),
                expected="a token in base64, a space and its id",
            ) from None
    return found


def decode(tokens: Iterable[int], vocabulary: Mapping[int, bytes]) -> str:
    """Text of some tokens; bytes that are not UTF-8 are replaced."""
    parts = (vocabulary.get(token, b"<|%d|>" % token) for token in tokens)
    return b"".join(parts).decode("utf-8", "replace")
