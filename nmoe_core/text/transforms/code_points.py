"""Code points of UTF-8 bytes in compiled loops: decoding, a table of lower case and character
classes, and a hash.

The table is in this package (Unicode 15.1), so results do not depend on the version of Python.
"""

from functools import cache
from pathlib import Path

import numpy as np
from numba import njit

WORD, ALONE, UNSPACED, SPACE, ALPHA, UPPER, DIGIT = (1 << bit for bit in range(7))
CODE_BITS = 21
CODE_MASK = (1 << CODE_BITS) - 1
SEED = np.uint64(0xCBF29CE484222325)
PRIME = np.uint64(0x100000001B3)
_MIX_1 = np.uint64(0xFF51AFD7ED558CCD)
_MIX_2 = np.uint64(0xC4CEB9FE1A85EC53)
_HALF = np.uint64(33)


@cache
def code_points() -> np.ndarray:
    """uint32 per code point: lower case in the low 21 bits, character class above them."""
    with np.load(Path(__file__).with_name("unicode.npz")) as table:
        lower = np.arange(len(table["shift"])) + table["shift"]
        bits = table["bits"].astype(np.uint32)
    return (bits << CODE_BITS | lower.astype(np.uint32)).astype(np.uint32)


@njit(cache=True, inline="always")
def decode(payload, i):
    """The code point at byte `i`, and the index of the byte after it; `payload` is valid UTF-8."""
    first = np.uint32(payload[i])
    if first < 0x80:
        return first, i + 1
    second = np.uint32(payload[i + 1] & 0x3F)
    if first < 0xE0:
        return (first & 0x1F) << 6 | second, i + 2
    third = np.uint32(payload[i + 2] & 0x3F)
    if first < 0xF0:
        return (first & 0x0F) << 12 | second << 6 | third, i + 3
    fourth = np.uint32(payload[i + 3] & 0x3F)
    return (first & 0x07) << 18 | second << 12 | third << 6 | fourth, i + 4


@njit(cache=True, inline="always")
def mix(h):
    """Mix the bits of a uint64 (finaliser of MurmurHash3)."""
    h = (h ^ (h >> _HALF)) * _MIX_1
    h = (h ^ (h >> _HALF)) * _MIX_2
    return h ^ (h >> _HALF)
