"""Orders that space the documents of each topic evenly over the epoch; no window length is needed.

Document r of the n of a topic goes to (r + phase) / n of the epoch, each topic with a phase of its
own; the orders differ in how they rank a topic's documents first. A few sorts, O(N log N), and at
most 64 bytes of memory per document beside the input.
"""

from collections.abc import Iterator
from typing import TypedDict, Unpack

import numpy as np

from nmoe_core.base.errors import CurationError

GOLDEN = 0.6180339887498949  # 1/phi: multiples of it, modulo 1, are spread as evenly as can be
PLASTIC = 0.7548776662466927  # 1/rho, and its square: the same in two dimensions
_RADIX_SORTED = 2**16  # NumPy sorts keys of 16 bits in linear time


class Turn(TypedDict, total=False):
    """Options that turn an order into another, equally good one; both default to 0."""

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
    """Even spacing inside each topic, with lengths dealt out at golden-ratio steps.

    Inside a topic documents are ranked by length, then dealt: rank r goes to the fraction
    r/phi mod 1 of the topic, so neighbours in the ranking end up far apart, and every stretch of
    the epoch has the same mix of long and short. m neighbours are at least about 1 / (sqrt(5) m) of
    the epoch apart.

    Args:
        by: Number `[N]` to deal out evenly instead of the length, such as quality.
        groups: int `[N]`: group of near-duplicates, -1 for none. Members of a group in one topic
            become neighbours in the ranking, so they are spread over the whole epoch.
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
    """Even spacing of each topic by count, in a fixed order inside it: a curriculum.

    Args:
        by: Number `[N]` that rises along the epoch, such as length or quality; None for the
            source order.
        descending: Let it fall instead.
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
    """Even spacing by tokens: each prefix of the epoch holds every topic by its share of tokens.

    For exact mixing ratios. A topic of long documents gets wider gaps, so a window holds fewer
    topics than with `golden`. Lengths are dealt out as with `golden`; the place of a document is
    the middle of its tokens. A greedy on the deficit of tokens arrives at this order too.
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
    """An order that appended documents do not change: they are only inserted.

    Document r of a topic, in order of arrival, has the key r/phi mod 1, which later documents do
    not alter; the key of a document is its place in the epoch. Less even than `golden`. Keep
    seed and epoch, and the topics of old documents, while documents are appended.
    """
    key = np.empty(len(doc_clusters))
    shift = turn_of(**turn)
    for cluster, members in members_by_topic(doc_clusters):
        key[members] = (np.arange(len(members)) * GOLDEN + cluster * PLASTIC + shift) % 1.0
    return np.argsort(key, kind="stable")


def members_by_topic(doc_clusters: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Each topic that has documents, and their numbers in source order."""
    sizes = np.bincount(doc_clusters)
    ends = np.cumsum(sizes)
    documents = by_cluster(doc_clusters)
    for cluster in np.flatnonzero(sizes).tolist():
        yield cluster, documents[ends[cluster] - sizes[cluster] : ends[cluster]]


def turn_of(seed: int = 0, epoch: int = 0) -> float:
    """Offset of all phases by seed and epoch, in two independent directions: 0 to 1."""
    return (seed * PLASTIC + epoch * PLASTIC**2) % 1.0


def rank_in_group(sizes: np.ndarray) -> np.ndarray:
    """0..n-1 for each group in turn: int64 `[sum(sizes)]`."""
    starts = np.cumsum(sizes) - sizes
    return np.arange(int(sizes.sum())) - np.repeat(starts, sizes)


def by_cluster(doc_clusters: np.ndarray) -> np.ndarray:
    """Documents sorted by topic, then number: int64 `[N]`."""
    keys = doc_clusters
    if int(doc_clusters.max(initial=0)) < _RADIX_SORTED:
        keys = doc_clusters.astype(np.uint16)
    return np.argsort(keys, kind="stable")


def _column(name: str, values: np.ndarray, num_documents: int) -> np.ndarray:
    """`values` as an array `[N]` of numbers that can be sorted."""
    column = np.asarray(values)
    if column.shape != (num_documents,) or column.dtype.kind not in "iuf":
        expected = f"a number for each of {num_documents} documents"
        raise refusal(f"{name} is not a column", (column.dtype, column.shape), expected)
    if column.dtype.kind == "f" and np.isnan(column).any():
        raise refusal(f"{name} has no order", "NaN", "numbers")
    return column


def refusal(what: str, found: object, expected: str) -> CurationError:
    """An E-CURATION-ORDER error."""
    return CurationError(
        what, where="order", found=found, expected=expected, code="E-CURATION-ORDER"
    )


def _ranked(members: np.ndarray, column: np.ndarray, groups: np.ndarray | None) -> np.ndarray:
    """Members by group, members without one last, then by falling `column`, then by number."""
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
    """Keys that sort `values` downwards; ~v is -v - 1, and also works for unsigned integers."""
    return -values if values.dtype.kind == "f" else ~values
