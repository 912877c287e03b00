"""A Bloom filter over hashes of 64 bits that looks at one word of memory per hash.

The high bits of a hash choose the word, its low 18 bits choose three bits of it. With 16 bits per
hash, about one in a hundred others passes by chance.
"""

import numpy as np
from numba import njit

_HASHES_PER_WORD = 4
_ONE, _SIX, _12, _LOW = np.uint64(1), np.uint64(6), np.uint64(12), np.uint64(63)


def bloom(hashes: np.ndarray) -> tuple[np.ndarray, np.uint64]:
    """The words of the filter, uint64, and the shift that gives a hash its word."""
    shift = np.uint64(64 - max(4, (len(hashes) // _HASHES_PER_WORD).bit_length()))
    return _filled(hashes, shift), shift


@njit(cache=True, inline="always")
def bits(value):
    """The bits of its word that are set where a hash is in the filter."""
    return _ONE << (value & _LOW) | _ONE << (value >> _SIX & _LOW) | _ONE << (value >> _12 & _LOW)


@njit(cache=True)
def _filled(hashes, shift):
    found = np.zeros(1 << (64 - np.int64(shift)), np.uint64)
    for value in hashes:
        found[value >> shift] |= bits(value)
    return found
