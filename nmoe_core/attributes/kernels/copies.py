"""Which documents share keys, and which of these are copies of which."""

import numpy as np
from numba import njit

from nmoe_core.attributes.kernels.bloom import bits
from nmoe_core.attributes.minhash import NUM_BANDS, NUM_HASHES

EXACT = NUM_HASHES + 1  # "bytes that are equal" where the texts are
_THREE, _SEVEN = np.uint64(3), np.uint64(7)


@njit(cache=True)
def mark(bands, exact, once, twice, shift):
    """Set the bit of each key in `once`, and in `twice` where it was set before."""
    for i in range(len(exact)):
        for band in range(NUM_BANDS + 1):
            key = bands[i, band] if band < NUM_BANDS else exact[i]
            place = key >> shift
            bit = np.uint8(1 << (place & _SEVEN))
            byte = place >> _THREE
            if once[byte] & bit:
                twice[byte] |= bit
            else:
                once[byte] |= bit


@njit(cache=True)
def marked(bands, exact, twice, shift):
    """Keys whose bit is set in `twice`, and the row of each."""
    keys, rows = [np.uint64(0) for _ in range(0)], [0 for _ in range(0)]
    for i in range(len(exact)):
        for band in range(NUM_BANDS + 1):
            key = bands[i, band] if band < NUM_BANDS else exact[i]
            place = key >> shift
            if key and twice[place >> _THREE] >> (place & _SEVEN) & 1:
                keys.append(key)
                rows.append(i)
    return np.array(keys, np.uint64), np.array(rows, np.int64)


@njit(cache=True)
def decide(sketches, digests, groups, least_equal, found, equal):
    """Which kept candidate each one is a copy of, or -1, and how many bytes of the two are equal.

    Of several, the most similar counts, and of equally similar ones the first. `kept` holds the
    candidates of each bucket from its first slot on.
    """
    bounds, buckets, first_slots = groups
    kept = np.empty(len(buckets), np.int64)
    num_kept = np.zeros(len(first_slots), np.int64)
    for i in range(len(found)):
        best = np.int64(least_equal - 1)
        for bucket in buckets[bounds[i] : bounds[i + 1]]:
            start = first_slots[bucket]
            for other in kept[start : start + num_kept[bucket]]:
                if (digests[i] == digests[other]).all():
                    found[i], best = other, EXACT
                    break
                count = (sketches[i] == sketches[other]).sum()
                if count > best or (count == best and found[i] > other):
                    found[i], best = other, count
            if best == EXACT:
                break
        equal[i] = best
        if found[i] < 0:
            for bucket in buckets[bounds[i] : bounds[i + 1]]:
                kept[first_slots[bucket] + num_kept[bucket]] = i
                num_kept[bucket] += 1


@njit(cache=True)
def reached(all_keys, wanted, passes, shift, touched):
    """Mark the documents with a wanted key in `touched`; the rows of those that were not."""
    bands, texts = all_keys
    rows = [0 for _ in range(0)]
    for i in range(len(texts)):
        if touched[i]:
            continue
        for band in range(NUM_BANDS + 1):
            key = bands[i, band] if band < NUM_BANDS else texts[i]
            its_bits = bits(key)
            if key and passes[key >> shift] & its_bits == its_bits:
                at = np.searchsorted(wanted, key)
                if at < len(wanted) and wanted[at] == key:
                    touched[i] = True
                    rows.append(i)
                    break
    return np.array(rows, np.int64)
