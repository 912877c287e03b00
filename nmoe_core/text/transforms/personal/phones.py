"""Telephone numbers, parsed by the library `phonenumbers`, which has the plans of all countries.

A number without a country code must be written as one: after a word such as "tel", with a bracket,
dash, dot or slash between its groups, or with a leading 0. Its groups must be those of its country.
"""

import re
from collections.abc import Sequence

from phonenumbers import Leniency, PhoneMetadata, PhoneNumberMatcher

from nmoe_core.base.errors import ConfigError

_WORD = r"\b(?i:tel|telephone|phone|fax|mobile|cell|whatsapp)[.:]{0,2}[ \t]{0,2}"
_INTERNATIONAL = r"\+[1-9](?:[ ()./\-]{0,2}[0-9]){6,14}\b"
_ANY_DIGIT = re.compile("[0-9]")
_DIGITS = frozenset("0123456789")
_GROUPING = frozenset("-./)")
_NOT_BEFORE = frozenset("+.,/=&@#%~-_:")
_LEAST_DIGITS = 7


class Phones:
    """Finds the number in a candidate."""

    def __init__(self, regions: Sequence[str]) -> None:
        self._plans: dict[str, tuple[str, frozenset[int]]] = {}
        for name in regions:
            plan = PhoneMetadata.metadata_for_region(name)
            if plan is None or plan.general_desc is None:
                raise ConfigError(
                    "no country has this code",
                    where="regions of the transform redact",
                    found=name,
                    expected="codes of ISO 3166, such as US or DE",
                )
            lengths = frozenset(plan.general_desc.possible_length)
            self._plans[name] = (plan.national_prefix or "", lengths)

    @property
    def regex(self) -> str:
        """The pattern of candidates, of RE2: a number of the regions has at least so many digits as
        the shortest of them."""
        if not self._plans:
            return _INTERNATIONAL
        least = max(_LEAST_DIGITS, min(min(lengths) for _, lengths in self._plans.values()))
        digits = rf"\(?[0-9](?:[ ()./\-]{{0,2}}[0-9]){{{least - 1},14}}\b"
        return f"{_INTERNATIONAL}|(?:{_WORD})?{digits}"

    def place(self, before: str, candidate: str, after: str) -> tuple[int, int] | None:
        """The place of the number; None if no country has it."""
        is_fraction = after[:1] == "." and after[1:].isdigit()
        if before.isalnum() or before in _NOT_BEFORE or is_fraction:
            return None
        if candidate[0] == "+":
            return _found(candidate, None, Leniency.VALID)
        digits = "".join(_ANY_DIGIT.findall(candidate))
        if not _is_written(candidate):
            return None
        for region, (prefix, lengths) in self._plans.items():
            has_prefix = bool(prefix) and digits.startswith(prefix)
            is_whole = has_prefix or prefix in ("", "1")
            if is_whole and len(digits) - len(prefix) * has_prefix in lengths:
                found = _found(candidate, region, Leniency.STRICT_GROUPING)
                if found:
                    return found
        return None


def _is_written(candidate: str) -> bool:
    """Whether a number without a country code is written as a telephone number, and not as a
    decimal fraction, a clause or numbers of a table."""
    if candidate[0].isalpha():
        return True
    separators = set(candidate) - _DIGITS
    is_other = separators == {"."} and candidate.count(".") == 1
    # Clauses of law, such as 252.227-7014, have a dot and a dash; telephone numbers one of them.
    is_other |= {".", "-"} <= separators
    has_prefix = candidate[0] == "0" and candidate[1].isdigit()
    return not is_other and bool(separators & (_GROUPING if not has_prefix else separators))


def _found(candidate: str, region: str | None, leniency: int) -> tuple[int, int] | None:
    for match in PhoneNumberMatcher(candidate, region, leniency=leniency, max_tries=8):
        return match.start, match.end
    return None
