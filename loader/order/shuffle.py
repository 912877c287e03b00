"""Counter-based randomness: hashes of a key and a counter, and permutations that store nothing.

`Permutation` is a Feistel network over the smallest sufficient even number of bits, applied again
until the result is in range (cycle walking: Black and Rogaway 2002, "Ciphers with arbitrary finite
domains"). So any element of any epoch is computed alone, in a few hundred nanoseconds. Only
integers are used, so results are equal on every machine and with every numpy.
"""

import numpy as np

_MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15
_ROUNDS = 6


def mix64(x: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014): a bijection of 64-bit integers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def mix64_array(x: np.ndarray) -> np.ndarray:
    """`mix64` of every number of an array of uint64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def key_of(*parts: int) -> int:
    """A 64-bit key from a seed and its purpose; the order of the parts matters."""
    key = 0
    for part in parts:
        key = mix64((key + GOLDEN + part) & _MASK)
    return key


def hashes(key: int, counters: np.ndarray) -> np.ndarray:
    """A uniform hash of each counter with a key: uint64, in the shape of `counters` (int64)."""
    return mix64_array(
        np.uint64(key) + (counters.astype(np.uint64) + np.uint64(1)) * np.uint64(GOLDEN)
    )


class Permutation:
    """A pseudo-random permutation of `range(size)`, with 1 to 2^62 elements; `key` is the seed."""

    def __init__(self, size: int, key: int) -> None:
        self._size = size
        self._half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
        self._low = np.uint64((1 << int(self._half)) - 1)
        self._keys = [np.uint64(key_of(key, i)) for i in range(_ROUNDS)]

    def __call__(self, elements: np.ndarray) -> np.ndarray:
        """New position of each element: int64, shaped as `elements` (int64 in `range(size)`)."""
        out = self._network(elements.astype(np.uint64))
        outside = np.flatnonzero(out >= self._size)
        while len(outside):
            out[outside] = self._network(out[outside])
            outside = outside[out[outside] >= self._size]
        return out.astype(np.int64)

    def _network(self, x: np.ndarray) -> np.ndarray:
        left = x >> self._half
        right = x & self._low
        for key in self._keys:
            left, right = right, left ^ (mix64_array(right + key) & self._low)
        return (left << self._half) | right


class BlockPermutation:
    """A pseudo-random permutation of `range(size)` in blocks: it shuffles the blocks of `block`
    elements, and the elements within each block. A short last block stays last.
    """

    def __init__(self, size: int, block: int, key: int) -> None:
        self._size = size
        self._block = block
        self._key = key

    def __call__(self, elements: np.ndarray) -> np.ndarray:
        """New position of each element: int64, shaped as `elements` (int64 in `range(size)`)."""
        blocks, places = np.divmod(elements, self._block)
        num_whole = self._size // self._block
        is_whole = blocks < num_whole
        if num_whole:
            order = Permutation(num_whole, key_of(self._key, 0))
            blocks[is_whole] = order(blocks[is_whole])
        for number in np.unique(blocks).tolist():
            rows = blocks == number
            first = number * self._block
            order = Permutation(min(self._block, self._size - first), key_of(self._key, 1, number))
            places[rows] = first + order(places[rows])
        return places
