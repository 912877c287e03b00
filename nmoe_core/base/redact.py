"""Keeps passwords and keys out of messages and records that repeat what others sent."""

import json
import re
from urllib.parse import quote

from loader.errors import without_credentials

HIDDEN = "[hidden]"
_AUTHORIZATION = re.compile(
    r"(authorization\\?[\"']?\s*[:=]\s*\\?[\"']?)(?:[a-z]+\s+)?[^\s\"',;}\]\\]+", re.IGNORECASE
)


class Redactor:
    """Hides one secret, in every spelling of it, and any Authorization header."""

    def __init__(self, secret: str | None) -> None:
        spellings: set[str] = set()
        if secret:
            in_json = json.dumps(secret)[1:-1]
            spellings = {secret, in_json, in_json.replace("/", "\\/"), quote(secret, safe="")}
            spellings |= {repr(secret)[1:-1], quote(secret)}
        self._spellings = sorted(spellings, key=len, reverse=True)

    def clean(self, text: str) -> str:
        """The text without the secret. Clean first and cut afterwards: half a key would not be
        recognised."""
        for spelling in self._spellings:
            text = text.replace(spelling, HIDDEN)
        return without_credentials(_AUTHORIZATION.sub(rf"\1{HIDDEN}", text))
