"""Measures repetition in a document: lines, paragraphs and n-grams, as Gopher counts them.

The kernels take hashes of elements and their lengths in characters. All sets share one hash table
whose slots carry the number of their set, so that the table is never cleared.
"""

import numpy as np
from numba import njit

from nmoe_core.attributes.columns import NGRAMS

_BASE = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(29)


@njit(cache=True)
def new_set(size):
    """A hash table for up to `size` elements; each slot has hash, set number, count and first
    index."""
    slots = 16
    while slots < 2 * size:
        slots *= 2
    return (
        np.empty(slots, np.uint64),
        np.zeros(slots, np.int64),
        np.empty(slots, np.int64),
        np.empty(slots, np.int64),
        np.zeros(1, np.int64),
    )


@njit(cache=True, inline="always")
def slot_of(table, element, mask):
    """The slot of an element in the current set, and whether the set had it already."""
    hashes, marks, _, _, current = table
    place = np.int64((element ^ (element >> _SHIFT)) & np.uint64(mask))
    while marks[place] == current[0] and hashes[place] != element:
        place = (place + 1) & mask
    is_known = marks[place] == current[0]
    hashes[place] = element
    marks[place] = current[0]
    return place, is_known


@njit(cache=True, inline="always")
def begin(table, size):
    """Start a new set of up to `size` elements; return the bit mask of its slots."""
    table[4][0] += 1
    slots = 16
    while slots < 2 * size:
        slots *= 2
    return slots - 1


@njit(cache=True)
def repeated(table, elements, lengths):
    """Number of elements that are repetitions of an earlier element, and the sum of their
    characters."""
    mask = begin(table, len(elements))
    count = 0
    chars = 0
    for i in range(len(elements)):
        _, is_known = slot_of(table, elements[i], mask)
        if is_known:
            count += 1
            chars += lengths[i]
    return count, chars


@njit(cache=True)
def ngram_chars(table, elements, ends):
    """Characters covered by the most frequent 2-, 3- and 4-gram, and by repeated 5- to 10-grams.

    `ends` has the number of characters before each word and after the last: int64 `[num_words +
    1]`. On a tie, the most frequent n-gram that occurs first is taken; the spaces in it count. A
    word in several repeated n-grams counts once.
    """
    found = np.zeros(len(NGRAMS), np.int64)
    window = elements.copy()
    for k in range(len(NGRAMS)):
        n = k + 2
        count = len(elements) - n + 1
        if count < 1:
            break
        for i in range(count):
            window[i] = window[i] * _BASE + elements[i + n - 1]
        mask = begin(table, count)
        if n < 5:
            found[k] = _top(table, window[:count], mask, ends, n)
            continue
        i = 0
        while i < count:
            _, is_known = slot_of(table, window[i], mask)
            if is_known:
                found[k] += ends[i + n] - ends[i]
                i += n
            else:
                i += 1
    return found


@njit(cache=True)
def _top(table, window, mask, ends, n):
    best = 0
    best_first = 0
    for i in range(len(window)):
        place, is_known = slot_of(table, window[i], mask)
        if not is_known:
            table[2][place] = 0
            table[3][place] = i
        table[2][place] += 1
        count = table[2][place]
        first = table[3][place]
        if count > best or (count == best and first < best_first):
            best = count
            best_first = first
    return best * (ends[best_first + n] - ends[best_first] + n - 1)
