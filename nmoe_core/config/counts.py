"""Numbers of tokens with a suffix: `100M`, `1.5T`."""

from __future__ import annotations

import re
from decimal import Decimal

from nmoe_core.base.errors import ConfigError

_MAX_TOKENS = 10**15
_SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def parse_count(value: str | int) -> int:
    """A number of tokens: `1000`, `100M`, `1B`, `1.5T` (K, M, B, T are powers of 1,000).

    >>> parse_count("1.5T")
    1500000000000
    """
    match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,18})?)([KMBT]?)", str(value).strip().upper())
    if match is None:
        raise ConfigError("not a number of tokens", found=repr(value), expected="100M, 1B or 1.5T")
    tokens = round(Decimal(match[1]) * _SUFFIXES[match[2]])
    if not 1 <= tokens <= _MAX_TOKENS:
        raise ConfigError("number of tokens is out of range", found=value, expected="1 to 1000T")
    return tokens
