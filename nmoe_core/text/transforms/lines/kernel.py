"""Measures the lines of texts in one compiled loop over their UTF-8 bytes."""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from numba import njit

from nmoe_core.text.transforms.code_points import (
    CODE_BITS,
    DIGIT,
    PRIME,
    SEED,
    SPACE,
    UNSPACED,
    UPPER,
    code_points,
    decode,
    mix,
)
from nmoe_core.text.transforms.lines.patterns import LINE_ENDS

_SPACE = SPACE << CODE_BITS
_UNSPACED = UNSPACED << CODE_BITS
_UPPER = UPPER << CODE_BITS
_DIGIT = DIGIT << CODE_BITS
_BLANK = np.uint64(32)


class Lines(NamedTuple):
    """The lines of all texts, also blank ones: int64, except the hashes. A word is as in
    `attributes.signals`."""

    bounds: np.ndarray
    """`[num_texts + 1]`: lines of text `i` are `bounds[i]` to `bounds[i + 1]`."""
    starts: np.ndarray
    """Offset in the text, in characters."""
    chars: np.ndarray
    """Characters without the line end."""
    solid: np.ndarray
    """Characters other than white space; 0 for a blank line."""
    words: np.ndarray
    longest: np.ndarray
    """Characters of the longest word."""
    upper: np.ndarray
    digits: np.ndarray
    ends: np.ndarray
    """1 if the line ends a sentence or a quotation, and not with an ellipsis."""
    hashes: np.ndarray
    """uint64: hash of the words, with one space between them."""

    def texts_of(self, lines: np.ndarray) -> np.ndarray:
        """Number of the text of each of these lines."""
        return np.searchsorted(self.bounds, lines, "right") - 1


def measure(payloads: Sequence[bytes]) -> Lines:
    """The lines of texts in UTF-8; a text has one line more than line ends."""
    payload = np.frombuffer(b"".join(payloads), np.uint8)
    offsets = np.zeros(len(payloads) + 1, np.int64)
    np.cumsum([len(one) for one in payloads], out=offsets[1:])
    num_lines = int(np.count_nonzero(payload == 10)) + len(payloads)
    bounds = np.zeros(len(offsets), np.int64)
    found = np.zeros((8, num_lines), np.int64)
    hashes = np.empty(num_lines, np.uint64)
    _measure(payload, offsets, code_points(), _line_ends(), bounds, found, hashes)
    starts, chars, solid, words, longest, upper, digits, ends = found
    return Lines(bounds, starts, chars, solid, words, longest, upper, digits, ends, hashes)


@cache
def _line_ends() -> np.ndarray:
    """bool per code point of the basic plane."""
    found = np.zeros(2**16, np.bool_)
    found[[ord(char) for char in LINE_ENDS]] = True
    return found


@njit(cache=True)
def _measure(payload, offsets, table, line_ends, bounds, found, hashes):
    line = 0
    for text in range(len(offsets) - 1):
        i = offsets[text]
        end = offsets[text + 1]
        place = 0
        start = 0
        solid = words = longest = upper = digits = dots = tail = 0
        word_chars = 0
        last = np.uint32(0)
        was_unspaced = False
        h = SEED
        while i <= end:
            if i < end:
                code, i = decode(payload, i)
            else:  # the end of the text also ends a line
                code = np.uint32(10)
                i = end + 1
            entry = table[code]
            if code == 10:
                found[0, line] = start
                found[1, line] = place - start
                found[2, line] = solid
                found[3, line] = words
                found[4, line] = max(longest, word_chars)
                found[5, line] = upper
                found[6, line] = digits
                found[7, line] = last < 65536 and line_ends[last] and tail < 3
                hashes[line] = mix(h)
                line += 1
                place += 1
                start = place
                solid = words = longest = upper = digits = dots = tail = 0
                word_chars = 0
                last = np.uint32(0)
                was_unspaced = False
                h = SEED
                continue
            place += 1
            dots = dots + 1 if code == 46 else 0
            if entry & _SPACE:
                longest = max(longest, word_chars)
                word_chars = 0
                continue
            if word_chars == 0 and solid:
                h = (h ^ _BLANK) * PRIME
            is_unspaced = entry & _UNSPACED != 0
            if word_chars == 0 or is_unspaced or was_unspaced:
                words += 1
                longest = max(longest, word_chars)
                word_chars = 0
            was_unspaced = is_unspaced
            word_chars += 1
            h = (h ^ np.uint64(code)) * PRIME
            tail = 3 if code == 0x2026 else dots
            last = code
            solid += 1
            upper += entry & _UPPER != 0
            digits += entry & _DIGIT != 0
        bounds[text + 1] = line
