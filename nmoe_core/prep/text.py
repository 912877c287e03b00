"""Text normalisation `nfc-ctl-v1`: idempotent, versioned, the same on every machine.

Order: lone surrogates become U+FFFD, line ends become LF, C0/C1 controls other than TAB and LF and
every U+FEFF are removed, white space is stripped from both ends, NFC last, since a removed control
may have kept two characters from composing. Joiners and direction marks stay: scripts need them.
The name enters every shard's fingerprints.
"""

from __future__ import annotations

import re
import unicodedata

NORMALIZER = "nfc-ctl-v1"
_DROPPED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ufeff]")


def normalize_text(text: str) -> str:
    """Normalise one document.

    >>> normalize_text(" cafe\\u0301\\r\\nline\\x00 ")
    'café\\nline'
    """
    if not text.isascii():
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    if _DROPPED.search(text):
        text = _DROPPED.sub("", text)
    text = text.strip()
    return text if text.isascii() else unicodedata.normalize("NFC", text)
