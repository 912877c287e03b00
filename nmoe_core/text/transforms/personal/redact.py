"""Replaces personal data and keys: e-mail and public IP addresses, IBANs, card and telephone
numbers, keys and tokens.

RE2 searches all texts at once for candidates of each kind, and Python checks them, by check digits
for example. All is linear in the text.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import pyarrow as pa

from nmoe_core.config.transforms import RedactTable
from nmoe_core.text.transforms.batch import Batch
from nmoe_core.text.transforms.edits import Edit
from nmoe_core.text.transforms.personal import keys
from nmoe_core.text.transforms.personal import patterns as personal
from nmoe_core.text.transforms.personal.patterns import PATTERNS
from nmoe_core.text.transforms.search import column_of, holders, spans_of

Check = Callable[[str, str, str], tuple[int, int] | None]
"""The place of the data in a candidate, of which it gets the character before it, and two after it,
if there are any."""

# ISO 13616 registers the length of IBANs by country.
_IBAN_LENGTHS = (
    "AD24 AE23 AL28 AT20 AZ28 BA20 BE16 BG22 BH22 BI27 BR29 BY28 CH21 CR22 CY28 CZ24 DE22 DJ27 "
    "DK18 DO28 EE20 EG29 ES24 FI18 FK18 FO18 FR27 GB22 GE22 GI23 GL18 GR27 GT28 HN28 HR21 HU28 "
    "IE22 IL23 IQ23 IS26 IT27 JO30 KW30 KZ20 LB28 LC32 LI21 LT20 LU20 LV21 LY25 MC27 MD24 ME22 "
    "MK19 MN20 MR27 MT31 MU30 NI28 NL18 NO15 OM23 PK24 PL28 PS29 PT25 QA29 RO24 RS22 RU33 SA24 "
    "SC31 SD18 SE24 SI19 SK24 SM27 SO23 ST25 SV28 TL23 TN24 TR26 UA29 VA22 VG24 XK20 YE30"
)
_IBANS = {one[:2]: int(one[2:]) for one in _IBAN_LENGTHS.split()}
_NAMES = ("n_emails", "n_ibans", "n_cards", "n_ips")
_CARD_GROUPS = ([4, 4, 4, 4], [4, 6, 5], [4, 6, 4], [4, 4, 4, 4, 3])
# Card numbers that payment services publish for tests.
_TEST_NUMBERS = (
    "4111111111111111 4242424242424242 4012888888881881 4000056655665556 5555555555554444 "
    "5105105105105100 2223003122003222 378282246310005 371449635398431 6011111111111117 "
    "3530111333300000 30569309025904 3056930009020004 6011000990139424"
)
_TEST_CARDS = frozenset(_TEST_NUMBERS.split())
# RFC 2606 and RFC 6761 reserve them.
_EXAMPLE_HOST = re.compile(r"(?:^|\.)(?:example(?:\.(?:com|net|org))?|test|invalid|localhost)$")
_INSIDE = frozenset(".,-_/=+:")
_INSIDE_AFTER = frozenset("-_/=+")


class _Rule(NamedTuple):
    kind: str
    hint: str
    """A pattern that is faster to search, and that every text with a match of `regex` has."""
    regex: str
    place: Check


class Redact:
    """The transform `redact`."""

    def __init__(self, table: RedactTable) -> None:
        self._rules = [rule for rule in _rules(table) if rule.kind in table.kinds]
        self._hint = "|".join(f"(?:{rule.hint})" for rule in self._rules)
        self._replacements = {
            kind: table.placeholder.replace("{KIND}", kind.upper()).replace("{kind}", kind)
            for kind in table.kinds
        }

    def edits(self, batch: Batch) -> dict[int, list[Edit]]:
        """The spans of each text that has any, by its number. Where kinds overlap, the first of
        key, e-mail address, IBAN, card, IP address and telephone number is taken."""
        texts = column_of(batch.payloads)
        suspects = holders(texts, self._hint)
        texts = texts.take(pa.array(suspects))
        found: dict[int, list[tuple[int, int, int]]] = {}
        for rank, rule in enumerate(self._rules):
            rows = holders(texts, rule.hint)
            numbers = suspects[rows].tolist()
            for i, spans in zip(numbers, spans_of(texts.take(pa.array(rows)), rule.regex)):
                places = [*_places(batch.texts[int(i)], spans, rule.place)]
                if places:
                    found.setdefault(i, []).extend((*place, rank) for place in places)
        return {i: self._edits(found[i]) for i in sorted(found)}

    def _edits(self, spans: Sequence[tuple[int, int, int]]) -> list[Edit]:
        kept: list[tuple[int, int, int]] = []
        for span in sorted(spans):
            if not kept or span[0] >= kept[-1][1]:
                kept.append(span)
            elif span[2] < kept[-1][2]:
                kept[-1] = span
        kinds = [self._rules[rank].kind for _, _, rank in kept]
        return [
            Edit(start, end, kind, self._replacements[kind])
            for (start, end, _), kind in zip(kept, kinds)
        ]


def _places(text: str, spans: Sequence[tuple[int, int]], place: Check) -> Iterator[tuple[int, int]]:
    """Where the data is, in the candidates that have any."""
    for start, end in spans:
        before = text[start - 1 : start] if start else ""
        if found := place(before, text[start:end], text[end : end + 2]):
            yield start + found[0], start + found[1]


def _rules(table: RedactTable) -> Iterator[_Rule]:
    """Rules by priority."""
    keeps = table.keep_examples
    emails, ibans, cards, ips = (PATTERNS[name].regex for name in _NAMES)
    yield _Rule("key", keys.HINT, keys.TOKENS, partial(_token, keeps))
    yield _Rule("key", keys.ASSIGNMENT, keys.ASSIGNMENT, partial(_assigned, keeps))
    yield _Rule("email", r"[A-Za-z0-9._%+\-]@[A-Za-z0-9\-]+\.", emails, partial(_email, keeps))
    yield _Rule("iban", ibans, ibans, _iban)
    yield _Rule("card", r"\b[2-6][0-9]{3}(?:[ \-]?[0-9]){9}", cards, partial(_card, keeps))
    yield _Rule("ip", ips, ips, _ip)
    if "phone" in table.kinds:
        from nmoe_core.text.transforms.personal.phones import Phones

        phones = Phones(table.regions)
        yield _Rule("phone", phones.regex, phones.regex, phones.place)


def _token(keeps: bool, before: str, match: str, after: str) -> tuple[int, int] | None:
    is_shown = keeps and keys.is_example(match)
    return (0, len(match)) if keys.is_token(match) and not is_shown else None


def _assigned(keeps: bool, before: str, match: str, after: str) -> tuple[int, int] | None:
    span = keys.assigned(match)
    is_shown = span is not None and keeps and keys.is_example(match[slice(*span)])
    return None if is_shown else span


def _email(keeps: bool, before: str, match: str, after: str) -> tuple[int, int] | None:
    host = match.rpartition("@")[2].lower()
    is_shown = keeps and len(host) < 256 and _EXAMPLE_HOST.search(host)
    return (0, len(match)) if personal.is_email(match) and not is_shown else None


def _iban(before: str, match: str, after: str) -> tuple[int, int] | None:
    """An IBAN with the length of its country; words after it may look like its last groups."""
    length = _IBANS.get(match[:2], 0)
    end = 0
    while end < len(match) and length:
        length -= match[end] != " "
        end += 1
    is_cut = length or match[end : end + 1].isalnum()
    return (0, end) if not is_cut and personal.is_iban(match[:end]) else None


def _card(keeps: bool, before: str, match: str, after: str) -> tuple[int, int] | None:
    groups = [len(group) for group in re.split("[ -]", match)]
    is_grouped = len(groups) == 1 or groups in _CARD_GROUPS
    if not is_grouped or _is_inside(before, after) or not personal.is_card(match):
        return None
    number = "".join(filter(str.isdigit, match))
    return None if keeps and number in _TEST_CARDS else (0, len(match))


def _ip(before: str, match: str, after: str) -> tuple[int, int] | None:
    """An address. Four numbers under 100 are taken as the number of a section or version: one real
    address in forty is such, too."""
    is_number = ":" not in match and max(map(len, match.split("."))) < 3
    is_part = before == "-" or before == "_"
    return (0, len(match)) if personal.is_ip(match) and not is_number and not is_part else None


def _is_inside(before: str, after: str) -> bool:
    """Whether the characters around digits make them a part of a longer number or name."""
    is_fraction = after[:1] == "." and after[1:].isdigit()
    return before in _INSIDE or after[:1] in _INSIDE_AFTER or is_fraction
