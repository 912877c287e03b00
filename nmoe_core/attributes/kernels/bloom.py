"""Membership of 64-bit hashes in a sorted set of hashes.

A Bloom filter that reads one word of memory per hash rejects most hashes that are not in the set.
The high bits of a hash choose the word, and its low 18 bits choose three bits of it. With 16 bits
per hash, about 1 % of foreign hashes pass by chance. A table of the start of each group of hashes
with equal high bits checks the hashes that pass: this takes one more memory access, instead of
about twenty for a binary search.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

_HASHES_PER_WORD = 4
_HASHES_PER_PART = 4
_ONE = np.uint64(1)
_SIX = np.uint64(6)
_12 = np.uint64(12)
_LOW = np.uint64(63)


def bloom(hashes: np.ndarray) -> tuple[np.ndarray, np.uint64]:
    """The words of the filter, uint64, and the shift from a hash to the index of its word."""
    shift = np.uint64(64 - max(4, (len(hashes) // _HASHES_PER_WORD).bit_length()))
    return _filled(hashes, shift), shift


class Parts(NamedTuple):
    """A sorted set of hashes, partitioned by their high bits."""

    hashes: np.ndarray
    """uint64 `[num_hashes]`, ascending."""
    begins: np.ndarray
    """int64 `[num_parts + 1]`: part `i` is `begins[i]` to `begins[i + 1]`."""
    shift: np.uint64
    """Shift from a hash to the number of its part."""


def parts(hashes: np.ndarray) -> Parts:
    """The parts of ascending hashes."""
    num_bits = max(1, (len(hashes) // _HASHES_PER_PART).bit_length())
    shift = np.uint64(64 - num_bits)
    begins = np.searchsorted(hashes, np.arange(2**num_bits, dtype=np.uint64) << shift)
    return Parts(hashes, np.append(begins, len(hashes)), shift)


@njit(cache=True, inline="always")
def place(value, hashes, begins, shift):
    """The index of the first equal hash in `Parts`, or -1."""
    part = value >> shift
    at = begins[part]
    end = begins[part + _ONE]
    while at < end and hashes[at] < value:
        at += 1
    return at if at < end and hashes[at] == value else -1


@njit(cache=True, inline="always")
def bits(value):
    """The bits that a hash sets in its word of the filter."""
    return _ONE << (value & _LOW) | _ONE << (value >> _SIX & _LOW) | _ONE << (value >> _12 & _LOW)


@njit(cache=True)
def _filled(hashes, shift):
    found = np.zeros(1 << (64 - np.int64(shift)), np.uint64)
    for value in hashes:
        found[value >> shift] |= bits(value)
    return found
