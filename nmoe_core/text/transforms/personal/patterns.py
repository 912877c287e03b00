"""Patterns of personal data: e-mail and IP addresses, card numbers, IBANs, telephone numbers."""

import ipaddress
from collections.abc import Callable
from typing import NamedTuple

# Lengths of card numbers, by the range of their first four digits.
_CARDS = {
    (2221, 2720): (16,),  # Mastercard
    (3000, 3999): (14, 15),
    (3528, 3589): (16,),  # JCB
    (4000, 4999): (13, 16, 19),
    (5000, 5999): (16,),
    (6000, 6999): (16, 19),
}
# Not `is_global`, whose result depends on the version of Python.
_NOT_PUBLIC = [
    ipaddress.ip_network(network)
    for network in (
        *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16"),
        *("172.16.0.0/12", "192.0.0.0/24", "192.0.2.0/24", "192.168.0.0/16", "198.18.0.0/15"),
        *("198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/3", "2001::/23", "2001:db8::/32"),
        "3fff::/20",
    )
]
_FILES = frozenset(  # file extensions that no top-level domain in use equals
    (
        *("avif", "bmp", "gif", "ico", "jpeg", "jpg", "pdf", "png", "svg", "webp"),
        *("css", "html", "js", "json", "ts", "txt", "gz", "tar", "tgz", "xz", "zip"),
    )
)


class Pattern(NamedTuple):
    """One kind of personal data.

    Attributes:
        regex: Pattern of candidates, of RE2, so without back-references and look-around.
        is_one: Checks a candidate, for example its check digits; None if every candidate counts.
    """

    regex: str
    is_one: Callable[[str], bool] | None = None


def is_card(candidate: str) -> bool:
    """Whether the digits pass the Luhn check and have a length valid for cards with these first
    digits."""
    digits = [int(char) for char in candidate if char.isdigit()]
    doubled = [sum(divmod(2 * digit, 10)) for digit in digits[-2::-2]]
    start = int("".join(map(str, digits[:4])))
    known = [lengths for (first, last), lengths in _CARDS.items() if first <= start <= last]
    has_length = any(len(digits) in lengths for lengths in known)
    return has_length and (sum(digits[-1::-2]) + sum(doubled)) % 10 == 0


def is_iban(candidate: str) -> bool:
    """ISO 7064 MOD 97-10 over 15 to 34 characters."""
    chars = candidate.replace(" ", "")
    number = "".join(str(int(char, 36)) for char in chars[4:] + chars[:4])
    return 15 <= len(chars) <= 34 and int(number) % 97 == 1


def is_ip(candidate: str) -> bool:
    """Whether the candidate is a public address, and not part of a longer number sequence or a
    version number."""
    try:
        address = ipaddress.ip_address(candidate)
    except ValueError:
        return False
    is_number = len(candidate) == 7 and len(set(candidate)) > 2  # 1.2.3.4, unlike 8.8.8.8
    return not is_number and not any(address in network for network in _NOT_PUBLIC)


def is_email(candidate: str) -> bool:
    """Whether the candidate is an e-mail address and not a repository, file or package."""
    name, _, host = candidate.partition("@")
    labels = host.lower().split(".")
    is_package = labels[0].isdigit() and (labels[1].isdigit() or labels[-1] in _FILES)
    is_place = ":" in host or name == "git"
    return not is_place and not is_package and labels[-1] not in _FILES


def is_phone(candidate: str) -> bool:
    """Whether the candidate has 8 to 15 digits, as telephone numbers do."""
    return 8 <= sum(map(str.isdigit, candidate)) <= 15


PATTERNS = {
    "n_emails": Pattern(
        r"[A-Za-z0-9._%+\-]+@[A-Za-z0-9\-]+(?:\.[A-Za-z0-9\-]+)*\.[A-Za-z]{2,}(?::[A-Za-z0-9~/_])?",
        is_email,
    ),
    "n_ips": Pattern(
        r"(?i:\b(?:version|ver|release|section|chapter|build)\.? ?)?"
        r"\b(?:[0-9]{1,3}(?:\.[0-9]{1,3}){3,}|[23][0-9A-Fa-f]{3}(?::[0-9A-Fa-f]{0,4}){2,7})\b",
        is_ip,
    ),
    "n_cards": Pattern(r"\b[2-6][0-9]{3}(?:[ \-]?[0-9]{2,6}){2,4}\b", is_card),
    "n_ibans": Pattern(r"\b[A-Z]{2}[0-9]{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,3})?\b", is_iban),
    "n_phones": Pattern(
        r"\+[1-9][0-9]{0,2}[ \-](?:\([0-9]{1,4}\)[ \-]?)?[0-9]{1,4}(?:[ \-]?[0-9]{2,4}){1,4}\b"
        r"|\+(?:1[2-9][0-9]{2}[2-9]|[2-9][0-9]{3,7})[0-9]{6}\b"
        r"|\([0-9]{3}\) ?[0-9]{3}[ \-][0-9]{4}\b|\b[2-9][0-9]{2}[-.][2-9][0-9]{2}[-.][0-9]{4}\b",
        is_phone,
    ),
}
