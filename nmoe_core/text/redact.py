"""Removes passwords and keys from received text that messages and records quote."""

import json
import re
import sys
from urllib.parse import quote

from loader.errors import without_credentials

HIDDEN = "[hidden]"
_AUTHORIZATION = re.compile(
    r"(authorization\\?[\"']?\s*[:=]\s*\\?[\"']?)(?:[a-z]+\s+)?[^\s\"',;}\]\\]+", re.IGNORECASE
)
_MARGIN_CHARS = 2**16


class Redactor:
    """Hides one secret, in every encoding of it, and any Authorization header."""

    def __init__(self, secret: str | None) -> None:
        spellings: set[str] = set()
        if secret:
            in_json = json.dumps(secret)[1:-1]
            spellings = {secret, in_json, in_json.replace("/", "\\/"), quote(secret, safe="")}
            spellings |= {repr(secret)[1:-1], quote(secret)}
        self._spellings = sorted(spellings, key=len, reverse=True)

    def clean(self, text: str, max_chars: int = sys.maxsize) -> str:
        """The first `max_chars` characters of the text without the secret. Only these characters
        and a few more are searched. If they end within a secret, the part of the secret is removed
        too."""
        kept = text[: max_chars + _MARGIN_CHARS]
        for spelling in self._spellings:
            kept = kept.replace(spelling, HIDDEN)
        if len(text) > max_chars + _MARGIN_CHARS and self._spellings:
            kept = kept[: -len(self._spellings[0])]
        return without_credentials(_AUTHORIZATION.sub(rf"\1{HIDDEN}", kept))[:max_chars]
