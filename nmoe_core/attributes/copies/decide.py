"""Finds documents that share keys, and decides which of them are copies."""

import numpy as np
from numba import njit

from nmoe_core.attributes.kernels.bloom import bits
from nmoe_core.attributes.minhash import NUM_HASHES

EXACT = NUM_HASHES + 1  # the value that means equal texts, in place of a number of equal bytes
_THREE = np.uint64(3)
_SEVEN = np.uint64(7)


@njit(cache=True)
def mark(bands, exact, once, twice, shift):
    """Set the bit of each key in `once`; if it was already set there, set it in `twice`."""
    for i in range(len(exact)):
        for band in range(bands.shape[1] + 1):
            key = bands[i, band] if band < bands.shape[1] else exact[i]
            place = key >> shift
            bit = np.uint8(1 << (place & _SEVEN))
            byte = place >> _THREE
            if once[byte] & bit:
                twice[byte] |= bit
            else:
                once[byte] |= bit


@njit(cache=True)
def marked(bands, exact, twice, shift):
    """The keys whose bit is set in `twice`, and the row of each."""
    keys = [np.uint64(0) for _ in range(0)]
    rows = [0 for _ in range(0)]
    for i in range(len(exact)):
        for band in range(bands.shape[1] + 1):
            key = bands[i, band] if band < bands.shape[1] else exact[i]
            place = key >> shift
            if key and twice[place >> _THREE] >> (place & _SEVEN) & 1:
                keys.append(key)
                rows.append(i)
    return np.array(keys, np.uint64), np.array(rows, np.int64)


@njit(cache=True)
def decide(rows, groups, limits, is_settled, results):
    """For each candidate four numbers: the kept candidate that it copies, or -1; the number of
    their equal bytes; the kept candidate that contains it, or -1; and the share of its text that is
    contained.

    If a candidate copies several kept ones, the most similar is chosen; on a tie, the first. `kept`
    has the kept candidates of each bucket, from the bucket's first slot on. Settled candidates are
    kept without a comparison. Buckets with few kept candidates are visited first, and at most
    `max_visits` candidates are compared: many similar documents that are all kept would otherwise
    take quadratic time. A true copy shares keys with few documents, so it is found in these small
    buckets.
    """
    sketches, digests, lengths = rows
    least_equal, least_containment, max_visits = limits
    bounds, buckets, first_slots = groups
    found, equal, container, containment = results
    kept = np.empty(len(buckets), np.int64)
    num_kept = np.zeros(len(first_slots), np.int64)
    compared_with = np.full(len(found), -1)
    for i in range(len(found)):
        best = np.int64(least_equal - 1)
        own = buckets[bounds[i] : bounds[i + 1]]
        left = 0 if is_settled[i] else max_visits
        for bucket in own[np.argsort(num_kept[own], kind="mergesort")]:
            start = first_slots[bucket]
            count_kept = min(left, num_kept[bucket])
            left -= count_kept
            for other in kept[start : start + count_kept]:
                if compared_with[other] == i:
                    continue
                compared_with[other] = i
                if _same(digests[i], digests[other]) == digests.shape[1]:
                    found[i] = other
                    best = EXACT
                    break
                count = _same(sketches[i], sketches[other])
                if count > best or (count == best and found[i] > other):
                    found[i] = other
                    best = count
                share = _containment(count, lengths[i], lengths[other])
                is_first = share > containment[i] or container[i] > other
                if share >= max(least_containment, containment[i]) and is_first:
                    container[i] = other
                    containment[i] = share
            if best == EXACT:
                break
        equal[i] = best
        if found[i] < 0:
            for bucket in own:
                kept[first_slots[bucket] + num_kept[bucket]] = i
                num_kept[bucket] += 1


@njit(cache=True, inline="always")
def _same(first, second):
    """Number of positions at which two arrays have equal values."""
    count = 0
    for k in range(len(first)):
        count += first[k] == second[k]
    return count


@njit(cache=True)
def _containment(equal, length, other_length):
    """Estimated share of a text's shingles that another text has, from `minhash.jaccard` and
    lengths."""
    similarity = max(0.0, (equal / NUM_HASHES - 1 / 256) / (1 - 1 / 256))
    shared = similarity / (1 + similarity) * (length + other_length)
    return min(1.0, shared / max(1, length))


@njit(cache=True)
def sharing(bands, exact, wanted, passes, shift):
    """Rows of the documents with a wanted key."""
    rows = [0 for _ in range(0)]
    for i in range(len(exact)):
        its_bits = bits(exact[i])
        may_share = passes[exact[i] >> shift] & its_bits == its_bits
        for band in range(bands.shape[1]):  # no early exit: it would be slower
            its_bits = bits(bands[i, band])
            may_share |= passes[bands[i, band] >> shift] & its_bits == its_bits
        if may_share and _is_wanted(bands, exact, i, wanted, passes, shift):
            rows.append(i)
    return np.array(rows, np.int64)


@njit(cache=True)
def _is_wanted(bands, exact, i, wanted, passes, shift):
    for band in range(bands.shape[1] + 1):
        key = bands[i, band] if band < bands.shape[1] else exact[i]
        its_bits = bits(key)
        if key and passes[key >> shift] & its_bits == its_bits:
            at = np.searchsorted(wanted, key)
            if at < len(wanted) and wanted[at] == key:
                return True
    return False
