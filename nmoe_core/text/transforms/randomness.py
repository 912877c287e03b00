"""Tells random characters, as in keys and encoded bytes, from words and identifiers."""

from collections import Counter
from math import log2

import numpy as np

_LOWER = 1
_UPPER = 2
_DIGIT = 3
_CLASSES = bytes(
    _LOWER * (97 <= byte <= 122) + _UPPER * (65 <= byte <= 90) + _DIGIT * (48 <= byte <= 57)
    for byte in range(256)
)
_OTHERS = bytes(byte for byte, kind in enumerate(_CLASSES) if not kind)


def class_changes(text: str) -> float:
    """Share of neighbours of different classes (lower case, upper case, digit) among the ASCII
    letters and digits of a text. A capital letter before a small one is no change, as in names such
    as `BlockReader`. Random letters and digits have .45, random hexadecimal digits .47; words and
    identifiers have less than .2."""
    alphanumeric = text.encode().translate(None, _OTHERS)
    classes = np.frombuffer(alphanumeric.translate(_CLASSES), np.uint8)
    if len(classes) < 2:
        return 0.0
    before = classes[:-1]
    after = classes[1:]
    is_capital = (before == _UPPER) & (after == _LOWER)
    return float(np.count_nonzero((before != after) & ~is_capital) / len(before))


def entropy_bits(text: str) -> float:
    """Shannon entropy of the text's own characters, in bits per character."""
    shares = [count / len(text) for count in Counter(text).values()]
    return -sum(share * log2(share) for share in shares)


def is_random(text: str) -> bool:
    """Whether a text of 16 characters or more looks drawn at random: digits and letters, at least 3
    bits of entropy per character, and a change of class at every fourth place or more."""
    has_both = any(map(str.isdigit, text)) and any(map(str.isalpha, text))
    return len(text) >= 16 and has_both and class_changes(text) >= 0.25 and entropy_bits(text) >= 3
