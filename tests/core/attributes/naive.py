"""Definitions of words and near duplicates, written as plainly as possible, as a second opinion."""

import unicodedata
from collections.abc import Sequence
from functools import cache

SOUTH_EAST = (
    *("THAI ", "LAO ", "KHMER ", "MYANMAR ", "TAI LE ", "NEW TAI LUE ", "TAI THAM ", "TAI VIET "),
    *("AHOM ", "JAVANESE ", "BALINESE ", "YI ", "TANGUT", "NUSHU ", "BOPOMOFO "),
)
PRIME, MASK, BASE = 0x100000001B3, 2**64 - 1, 0x9E3779B97F4A7C15


def words(text: str) -> list[str]:
    """Runs of letters, marks, digits and `_`; unspaced scripts and Hangul one by one."""
    found, is_open = [], False
    for char in text:
        if unicodedata.category(char)[0] not in "LMN" and char != "_":
            is_open = False
        elif is_alone(char):
            found.append(char)
            is_open = False
        elif is_open:
            found[-1] += char.lower()[0]
        else:
            found.append(char.lower()[0])
            is_open = True
    return found


def is_alone(char: str) -> bool:
    """Whether a letter is a word."""
    scripts = ("CJK ", "IDEOGRAPHIC ", "HIRAGANA", "KATAKANA", "HANGUL", *SOUTH_EAST)
    return unicodedata.name(char, "").removeprefix("HALFWIDTH ").startswith(scripts)


def word_hash(word: str) -> int:
    """FNV-1a of code points, mixed."""
    h = 0xCBF29CE484222325
    for char in word:
        h = (h ^ ord(char)) * PRIME & MASK
    return mix(h)


def mix(h: int) -> int:
    """The last step of MurmurHash3."""
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        h = (h ^ h >> 33) * factor & MASK
    return h ^ h >> 33


@cache
def least_hashes(text: str) -> list[int]:
    """The 112 least hashes of a text's shingles; none of a text without words."""
    hashes = [word_hash(word) for word in words(text)]
    shingles = set()
    for i in range(max(1, len(hashes) - 4) if hashes else 0):
        h = 0
        for word in hashes[i : i + 5]:
            h = h * BASE + word & MASK
        shingles.add(mix(h) >> 32)
    numbers = [mix(i * BASE & MASK) >> 32 for i in range(1, 225)]
    pairs = zip(numbers[:112], numbers[112:])
    return [min((h * (a | 1) + b) % 2**32 for h in shingles) for a, b in pairs if shingles]


def survivors(documents: Sequence[tuple[int, int, str, str]]) -> dict[tuple[int, str], tuple]:
    """What each dropped (rank, length, id, text) is a copy of, by (rank, id): (rank, id) and
    similarity, None for equal texts."""
    kept, dropped = [], {}
    for rank, _, name, text in sorted(documents, key=lambda one: (one[0], -one[1], one[2])):
        least = least_hashes(text)
        copies = [key for key, other, _ in kept if other == text]
        near = [
            (-s, place, key)
            for place, (key, _, other) in enumerate(kept)
            if (s := similarity(least, other)) is not None
        ]
        if copies:
            dropped[rank, name] = (copies[0], None)
        elif near and -min(near)[0] >= 0.7:
            dropped[rank, name] = (min(near)[2], -min(near)[0])
        else:
            kept.append(((rank, name), text, least))
    return dropped


def similarity(first: list[int], second: list[int]) -> float | None:
    """Estimated Jaccard similarity where a band of seven is equal."""
    equal = [a == b for a, b in zip(first, second)]
    if not any(all(equal[i : i + 7]) for i in range(0, len(equal), 7)):
        return None
    return (sum(a == b for a, b in zip(sketch(first), sketch(second))) / 112 - 1 / 256) * 256 / 255


def sketch(least: list[int]) -> list[int]:
    """Eight bits of each least hash."""
    return [h * 0x9E3779B1 >> 24 & 255 for h in least]
