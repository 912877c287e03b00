"""Forms of keys and tokens, as their vendors or standards document them; docs/transforms.md names
each document. A form alone is not enough: the characters must be varied, so `ghp_xxxx...` is none.
"""

import base64
import binascii

from nmoe_core.text.transforms.randomness import is_random

_PRIVATE = r"(?:[A-Z0-9]+ ){0,3}PRIVATE KEY(?: BLOCK)?-----"
TOKENS = "|".join(
    (
        rf"-----BEGIN {_PRIVATE}(?:-{{0,4}}[^\-])*-----END {_PRIVATE}",
        r"\beyJ[\w\-]{10,}\.eyJ[\w\-]{10,}\.[\w\-]{16,}",  # JSON Web Tokens
        r"\b(?:AKIA|ASIA)[A-Z2-7]{16}\b",  # AWS
        r"\bgh[pousr]_[A-Za-z0-9]{36,}\b|\bgithub_pat_[A-Za-z0-9]{22}_[A-Za-z0-9]{59}\b",
        r"\bgl(?:pat|oas|dt|rt|rtr|cbt|ptt|ft|imt|agent|wt|soat|ffct)-[\w\-]{20,}"
        r"(?:\.[0-9a-z]{2}\.[0-9a-z]{9})?",
        r"\bxox[abeoprs](?:\.xox[bp])?-[0-9A-Za-z\-]{20,}|\bxapp-[0-9]-[0-9A-Za-z\-]{20,}",  # Slack
        r"https://hooks\.slack\.com/(?:services|workflows)/[A-Za-z0-9/]{40,}",
        r"\b[rs]k_live_[0-9A-Za-z]{16,}|\bwhsec_[A-Za-z0-9+/]{32,}=?",  # Stripe
        r"\bsk-(?:(?:proj|svcacct|admin)-)?[\w\-]{20,}T3BlbkFJ[\w\-]{20,}",  # OpenAI
        r"\bsk-ant-[a-z]{3,8}[0-9]{2}-[\w\-]{80,}",  # Anthropic
        r"\bAIza[\w\-]{35}|\bGOCSPX-[\w\-]{28}|\bya29\.[\w\-]{20,}",  # Google
        r"\bnpm_[A-Za-z0-9]{36}\b|\bpypi-AgE[\w\-]{50,}|\bhf_[A-Za-z0-9]{34}\b",
    )
)
HINT = (  # what every token begins with, or has inside
    r"PRIVATE KEY|\beyJ|AKIA|ASIA|\bgh[pousr]_|github_pat_|\bgl[a-z]{2,5}-|\bxox[a-z]|\bxapp-"
    r"|hooks\.slack|[rs]k_live_|whsec_|T3BlbkFJ|sk-ant-|AIza|GOCSPX-|ya29\.|npm_|pypi-AgE|\bhf_"
)
ASSIGNMENT = (
    r"(?i:passwo?r?d|passphrase|pwd|secret|token|credential|(?:api|access|auth|private|encryption)"
    r"[_\-]?key)[\w\-]{0,20}[\"'\]]{0,2}\s{0,3}(?:=>|:=|==?|:|>)\s{0,3}"
    r"(?:\"[^\s\"]{16,}\"|'[^\s']{16,}'|`[^\s`]{16,}`|[\w+/=\-]{16,})"
)
_MAX_CHARS = 4096  # a longer value is data
_SEPARATORS = ":=>"
# Parts of tokens that manuals show; the last is the payload of the debugger at jwt.io.
_EXAMPLES = ("example", "eyjzdwiioiixmjm0nty3odkwi")


def is_example(text: str) -> bool:
    """Whether a key is one of those that manuals show, such as AKIAIOSFODNN7EXAMPLE."""
    lower = text.lower()
    return any(part in lower for part in _EXAMPLES)


def is_token(text: str) -> bool:
    """Whether a candidate is varied enough to be real."""
    if text.startswith("-----"):
        return len(set(text)) >= 40  # a block whose key is three dots has fewer characters
    is_varied = len(set(text[-20:])) >= 8 and "xxxx" not in text.lower()
    return is_varied and (not text.startswith("eyJ") or _names_algorithm(text))


def _names_algorithm(token: str) -> bool:
    """Whether the header of a JSON Web Token does."""
    header = token.partition(".")[0]
    try:
        return b'"alg"' in base64.urlsafe_b64decode(header + "=" * (-len(header) % 4))
    except binascii.Error:
        return False


def assigned(text: str) -> tuple[int, int] | None:
    """The place of a random value in `name = "value"`; None if it is a word, a name or a URL."""
    start = min(at for char in _SEPARATORS if (at := text.find(char)) >= 0)
    value = text[start:].lstrip(_SEPARATORS + " \t\n\"'`")
    start = len(text) - len(value)
    value = value.rstrip("\"'`")
    is_value = len(value) <= _MAX_CHARS and "://" not in value and is_random(value)
    return (start, start + len(value)) if is_value else None
