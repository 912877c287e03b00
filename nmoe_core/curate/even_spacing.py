"""Orders that space the documents of each topic evenly over the epoch. They need no window length.

A topic's document with rank r of n is placed at (r + phase) / n of the epoch; each topic has a
different phase. The orders differ in how they rank the documents of a topic. The cost is a few
sorts, O(N log N), and at most 64 bytes of memory per document besides the input.
"""

from collections.abc import Iterator
from typing import TypedDict, Unpack

import numpy as np

from nmoe_core.base.errors import CurationError

GOLDEN = 0.6180339887498949  # 1/phi: its multiples modulo 1 are spread most evenly
PLASTIC = 0.7548776662466927  # 1/rho: with its square, the same in two dimensions
_RADIX_SORTED = 2**16  # NumPy sorts keys of 16 bits in linear time


class Turn(TypedDict, total=False):
    """`seed` and `epoch`: options that change an order into a different, equally good order; both
    default to 0."""

    seed: int
    epoch: int


def golden(
    doc_clusters: np.ndarray,
    doc_tokens: np.ndarray,
    *,
    by: np.ndarray | None = None,
    groups: np.ndarray | None = None,
    **turn: Unpack[Turn],
) -> np.ndarray:
    """Space the documents of each topic evenly, and spread their lengths by golden-ratio steps.

    The documents of a topic are ranked by length; rank r is placed at the fraction r/phi mod 1 of
    the topic. Neighbours in the ranking are therefore far apart, and every part of the epoch has
    the same mix of long and short documents. Two of m consecutive documents in the ranking are at
    least about 1 / (sqrt(5) m) of the epoch apart.

    Args:
        by: Numbers `[N]` to spread evenly instead of the length, such as quality.
        groups: int `[N]`: group of near-duplicates, -1 for none. Members of a group in the same
            topic become neighbours in the ranking, so they are spread over the whole epoch.
    """
    column = doc_tokens if by is None else _column("by", by, len(doc_clusters))
    if groups is not None:
        groups = _column("groups", groups, len(doc_clusters))
    num_clusters = int(doc_clusters.max(initial=-1)) + 1
    key = np.empty(len(doc_clusters))
    shift = turn_of(**turn)
    for cluster, members in members_by_topic(doc_clusters):
        ranked = _ranked(members, column, groups)
        rank = np.arange(len(members))
        place = (rank * GOLDEN + (cluster + 0.5) / num_clusters + shift) % 1.0
        phase = (cluster * GOLDEN + shift) % 1.0
        key[ranked[np.argsort(place, kind="stable")]] = (rank + phase) / len(members)
    return np.argsort(key, kind="stable")


def count_stride(
    doc_clusters: np.ndarray,
    doc_tokens: np.ndarray,
    *,
    by: np.ndarray | None = None,
    descending: bool = False,
    **turn: Unpack[Turn],
) -> np.ndarray:
    """Space each topic evenly by number of documents, and sort the documents within the topic: a
    curriculum.

    Args:
        by: Sort key `[N]`, which rises along the epoch, such as length or quality; None for the
            source order.
        descending: Sort by falling `by` instead.
    """
    column = None if by is None else _column("by", by, len(doc_clusters))
    key = np.empty(len(doc_clusters))
    shift = turn_of(**turn)
    for cluster, members in members_by_topic(doc_clusters):
        phase = (cluster * GOLDEN + shift) % 1.0
        key[_sorted(members, column, descending)] = (np.arange(len(members)) + phase) / len(members)
    return np.argsort(key, kind="stable")


def balance_tokens(
    doc_clusters: np.ndarray, doc_tokens: np.ndarray, **turn: Unpack[Turn]
) -> np.ndarray:
    """Space each topic evenly by tokens: at every position of the epoch, each topic has had nearly
    its share of the tokens so far.

    Use this order for exact mixing ratios. Long documents have wider gaps around them, so a window
    holds fewer topics than with `golden`. Lengths are spread as with `golden`. A document's
    position is that of its middle token. A greedy algorithm on the token deficit gives the same
    order.
    """
    key = np.empty(len(doc_clusters))
    shift = turn_of(**turn)
    for cluster, members in members_by_topic(doc_clusters):
        place = (np.arange(len(members)) * GOLDEN + cluster * PLASTIC + shift) % 1.0
        dealt = _ranked(members, doc_tokens, None)[np.argsort(place, kind="stable")]
        ends = np.cumsum(doc_tokens[dealt])
        key[dealt] = (ends - doc_tokens[dealt] / 2) / max(int(ends[-1]), 1)
    return np.argsort(key, kind="stable")


def insert_only(
    doc_clusters: np.ndarray, doc_tokens: np.ndarray, **turn: Unpack[Turn]
) -> np.ndarray:
    """Insert appended documents between old ones; old documents keep their relative order.

    The r-th document of a topic, in order of arrival, is placed at r/phi mod 1 of the epoch; later
    documents do not change this place. Less even than `golden`. Keep the seed, the epoch and the
    topics of old documents while documents are appended.
    """
    key = np.empty(len(doc_clusters))
    shift = turn_of(**turn)
    for cluster, members in members_by_topic(doc_clusters):
        key[members] = (np.arange(len(members)) * GOLDEN + cluster * PLASTIC + shift) % 1.0
    return np.argsort(key, kind="stable")


def spread_repeats(numbers: np.ndarray) -> np.ndarray:
    """Lists documents that are read several times so that equal distances separate the readings,
    for orders that follow the list: int64 `[N]`, positions in `numbers`.

    `numbers`, int64 `[N]`, ascending, names each document as often as it is read. Documents are
    spaced evenly over the list, and reading j of r is j/r of the list further, modulo the list.
    Without repeats, the list stays as it is.
    """
    _, sizes = np.unique(numbers, return_counts=True)
    fraction = np.repeat(np.arange(len(sizes)) / max(len(sizes), 1), sizes)
    step = rank_in_group(sizes) / np.repeat(sizes, sizes)
    return np.argsort((fraction + step) % 1.0, kind="stable")


def members_by_topic(doc_clusters: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield each topic that has documents, with their numbers in source order."""
    sizes = np.bincount(doc_clusters)
    ends = np.cumsum(sizes)
    documents = by_cluster(doc_clusters)
    for cluster in np.flatnonzero(sizes).tolist():
        yield cluster, documents[ends[cluster] - sizes[cluster] : ends[cluster]]


def turn_of(seed: int = 0, epoch: int = 0) -> float:
    """The offset of all phases, 0 to 1, from seed and epoch, in two independent directions."""
    return (seed * PLASTIC + epoch * PLASTIC**2) % 1.0


def rank_in_group(sizes: np.ndarray) -> np.ndarray:
    """0, ..., n - 1 for each group of size n, concatenated: int64 `[sum(sizes)]`."""
    starts = np.cumsum(sizes) - sizes
    return np.arange(int(sizes.sum())) - np.repeat(starts, sizes)


def by_cluster(doc_clusters: np.ndarray) -> np.ndarray:
    """Documents sorted by topic, then number: int64 `[N]`."""
    keys = doc_clusters
    if int(doc_clusters.max(initial=0)) < _RADIX_SORTED:
        keys = doc_clusters.astype(np.uint16)
    return np.argsort(keys, kind="stable")


def _column(name: str, values: np.ndarray, num_documents: int) -> np.ndarray:
    """Check that `values` are `[N]` sortable numbers; return them as an array."""
    column = np.asarray(values)
    if column.shape != (num_documents,) or column.dtype.kind not in "iuf":
        expected = f"one number per document, {num_documents} in all"
        raise refusal(
            f"{name} does not hold one number per document", (column.dtype, column.shape), expected
        )
    if column.dtype.kind == "f" and np.isnan(column).any():
        raise refusal(f"{name} cannot be sorted", "NaN", "numbers")
    return column


def refusal(what: str, found: object, expected: str) -> CurationError:
    """Make an E-CURATION-ORDER error."""
    return CurationError(
        what, where="order", found=found, expected=expected, code="E-CURATION-ORDER"
    )


def _ranked(members: np.ndarray, column: np.ndarray, groups: np.ndarray | None) -> np.ndarray:
    """Sort members by group (members without a group last), then by falling `column`, then by
    number."""
    if groups is None:
        return _sorted(members, column, descending=True)
    group = groups[members]
    value = _falling(column[members])
    return members[np.lexsort((value, group, group < 0))]


def _sorted(members: np.ndarray, column: np.ndarray | None, descending: bool) -> np.ndarray:
    if column is None:
        return members[::-1] if descending else members
    value = column[members]
    return members[np.argsort(_falling(value) if descending else value, kind="stable")]


def _falling(values: np.ndarray) -> np.ndarray:
    """Keys that sort `values` in descending order; ~v is -v - 1 and also works for unsigned
    integers."""
    return -values if values.dtype.kind == "f" else ~values
