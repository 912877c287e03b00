"""Best-fit packing: whole documents into rows of `seq_len` tokens, from the index alone.

Best fit decreasing (Johnson 1973; for pre-training: Ding et al. 2024, "Fewer Truncations Improve
Language Modeling") over blocks of `BLOCK_DOCUMENTS` consecutive documents of a source, so memory is
that of one block and the order of the data survives but for its block. A document of at
most `seq_len` tokens (its EOS counted) is never cut; a longer one fills whole rows and its rest is
packed. Bins of a block come in the order of their first document. Costs about a microsecond a
document: once when the data is opened, to count, and again for each block as it is reached.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

BLOCK_DOCUMENTS = 1 << 14


class Bins(NamedTuple):
    """Packed rows of one block of documents.

    starts, lengths: int64 [num_pieces], the pieces of documents in the order of rows; starts count
    from where the document spans count. is_end: bool [num_pieces], whether the piece ends its
    document. rows: int64 [num_bins + 1], where each row's pieces start, and their end.
    """

    starts: np.ndarray
    lengths: np.ndarray
    is_end: np.ndarray
    rows: np.ndarray

    @property
    def num_bins(self) -> int:
        """Number of rows."""
        return len(self.rows) - 1


def pack(spans: np.ndarray, seq_len: int) -> Bins:
    """Pack a block of documents into rows of `seq_len` tokens.

    Args:
        spans: int64 `[num_documents, 2]`, start and end of each document, end exclusive.
        seq_len: Tokens of a row.
    """
    document, starts, lengths = _pieces(spans, seq_len)
    bins = best_fit_decreasing(lengths, seq_len)
    num_bins = int(bins.max()) + 1 if len(bins) else 0
    # Rows in the order of their first piece; pieces in the order of the data within a row.
    _, first = np.unique(bins, return_index=True)
    rank = np.empty(num_bins, np.int64)
    rank[np.argsort(first, kind="stable")] = np.arange(num_bins)
    order = np.argsort(rank[bins], kind="stable")
    counts = np.bincount(rank[bins], minlength=num_bins)
    return Bins(
        starts=starts[order],
        lengths=lengths[order],
        is_end=(starts + lengths == spans[document, 1])[order],
        rows=np.concatenate([[0], np.cumsum(counts)]),
    )


def best_fit_decreasing(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """The bin of each item: int64, numbered in the order of opening.

    Items are taken from the longest to the shortest (ties: the earlier one); each goes to the
    fullest bin that has room for it (ties: the one that came to that room last), or opens one.

    Args:
        lengths: Positive integers, none above `capacity`.
        capacity: Room of a bin.
    """
    found = [0] * len(lengths)
    order = np.argsort(-lengths, kind="stable")
    # with_room[r] holds the bins with room for r; bit r of `occupied` says whether it holds any, so
    # that the smallest sufficient room is the lowest set bit of a shifted integer.
    with_room: dict[int, list[int]] = {}
    occupied = num_bins = 0
    for item, length in zip(order.tolist(), lengths[order].tolist()):
        above = occupied >> length
        if above:
            room = length + (above & -above).bit_length() - 1
            stack = with_room[room]
            chosen = stack.pop()
            if not stack:
                occupied ^= 1 << room
        else:
            room, chosen = capacity, num_bins
            num_bins += 1
        found[item] = chosen
        left = room - length
        if left:
            stack = with_room.setdefault(left, [])
            if not stack:
                occupied |= 1 << left
            stack.append(chosen)
    return np.array(found, np.int64)


def _pieces(spans: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Document, start and length of each piece of at most `seq_len` tokens, in order."""
    sizes = spans[:, 1] - spans[:, 0]
    counts = -(-sizes // seq_len)
    document = np.repeat(np.arange(len(spans)), counts)
    nth = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = spans[document, 0] + nth * seq_len
    return document, starts, np.minimum(seq_len, spans[document, 1] - starts)
