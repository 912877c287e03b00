"""Merges sorted suffixes of parts of a corpus, to find windows of tokens that documents share.

The suffixes of each part are in order, so a merge of all parts visits equal windows one after the
other. It reads each window once, and holds one window per part.
"""

import numpy as np
from numba import njit

MAX_HOLDERS = 4
_COLUMNS = 3  # of a found window: document, place in the document, and the document that holds it


@njit(cache=True)
def shared_windows(parts, first_documents, ranks, size, marks):
    """Windows of `size` tokens that a document of a lower rank has, too.

    parts: tokens, suffixes and starts of documents (with the end of the last one) of each part, as
    three lists of arrays. first_documents: number of the first document of each part. ranks: int64
    `[documents]`; documents below 0 do not count. marks: ids that no window has (EOS, BOS).

    Returns int64 `[found, 3]`: document, place of the window in it, and another document that has
    the window; at most `MAX_HOLDERS` others per window, those with the lowest ranks.
    """
    tokens, suffixes, _ = parts
    heads = np.zeros((len(tokens), size), np.int64)
    places = np.zeros(len(tokens), np.int64)
    heap = np.zeros(len(tokens), np.int64)
    live = 0
    for part in range(len(tokens)):
        places[part] = _next(tokens[part], suffixes[part], 0, heads[part], marks)
        if places[part] < len(suffixes[part]):
            heap[live] = part
            live += 1
    for node in range(live // 2 - 1, -1, -1):
        _sift(heap, live, node, heads)
    window = np.full(size, -1, np.int64)
    group = np.empty((16, 2), np.int64)
    count = 0
    found = np.empty((1024, _COLUMNS), np.int64)
    num_found = 0
    while live:
        part = heap[0]
        if _compared(heads[part], window):
            if count > 1:
                found, num_found = _add(
                    parts, first_documents, ranks, group[:count], found, num_found
                )
            window[:] = heads[part]
            count = 0
        if count == len(group):
            group = _grown(group)
        group[count, 0] = part
        group[count, 1] = suffixes[part][places[part]]
        count += 1
        places[part] = _next(tokens[part], suffixes[part], places[part] + 1, heads[part], marks)
        if places[part] == len(suffixes[part]):
            live -= 1
            heap[0] = heap[live]
        _sift(heap, live, 0, heads)
    if count > 1:
        found, num_found = _add(parts, first_documents, ranks, group[:count], found, num_found)
    return found[:num_found]


@njit(cache=True)
def _next(tokens, suffixes, place, head, marks):
    """Read the next window without a mark; returns the place of its suffix, or the end."""
    size = len(head)
    while place < len(suffixes):
        start = np.int64(suffixes[place])
        k = 0
        if start + size <= len(tokens):
            while k < size:
                token = np.int64(tokens[start + k])
                if token == marks[0] or token == marks[1]:
                    break
                head[k] = token
                k += 1
        if k == size:
            return place
        place += 1
    return place


@njit(cache=True)
def _compared(first, second):
    """Negative, 0 or positive, as the first window stands before, at or after the second."""
    for k in range(len(first)):
        if first[k] != second[k]:
            return first[k] - second[k]
    return 0


@njit(cache=True)
def _sift(heap, live, node, heads):
    """Move a part down to its place, by its window."""
    while True:
        least = 2 * node + 1
        if least >= live:
            return
        if least + 1 < live and _compared(heads[heap[least + 1]], heads[heap[least]]) < 0:
            least += 1
        if _compared(heads[heap[node]], heads[heap[least]]) <= 0:
            return
        part = heap[node]
        heap[node] = heap[least]
        heap[least] = part
        node = least


@njit(cache=True)
def _grown(rows):
    larger = np.empty((2 * len(rows), rows.shape[1]), np.int64)
    larger[: len(rows)] = rows
    return larger


@njit(cache=True)
def _add(parts, first_documents, ranks, group, found, num_found):
    """Add the windows of a group of equal ones, except those of the document of the lowest rank."""
    _, _, starts = parts
    documents = np.empty(len(group), np.int64)
    places = np.empty(len(group), np.int64)
    holders = np.full(MAX_HOLDERS, -1, np.int64)
    num_holders = 0
    for i in range(len(group)):
        part = group[i, 0]
        of_part = np.searchsorted(starts[part], group[i, 1], "right") - 1
        document = first_documents[part] + of_part
        documents[i] = document
        places[i] = group[i, 1] - starts[part][of_part]
        rank = ranks[document]
        if rank < 0:
            continue
        at = num_holders
        is_new = True
        for k in range(num_holders - 1, -1, -1):
            if ranks[holders[k]] == rank:
                is_new = False
            if ranks[holders[k]] > rank:
                at = k
        if not is_new or at == MAX_HOLDERS:
            continue
        num_holders = min(num_holders + 1, MAX_HOLDERS)
        for k in range(num_holders - 1, at, -1):
            holders[k] = holders[k - 1]
        holders[at] = document
    for i in range(len(group)):
        for k in range(num_holders):
            if ranks[holders[k]] >= ranks[documents[i]]:
                break
            if num_found == len(found):
                found = _grown(found)
            found[num_found, 0] = documents[i]
            found[num_found, 1] = places[i]
            found[num_found, 2] = holders[k]
            num_found += 1
    return found, num_found
