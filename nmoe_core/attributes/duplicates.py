"""Which documents are copies of others, over all shards of all sources.

Documents are visited in the order of (source priority, ingest id). A document is dropped if a kept
one has the same text, or shares a band's key with it and an estimated Jaccard similarity of at
least the threshold. So every dropped document is near to the kept one that it names, also in a
chain of small edits. What is kept depends on the set of documents alone: after an addition, a
deletion or a change of priority the same call is made again, and copies of a deleted survivor come
back.

Signatures take most of the time; this step takes about a second per million documents. Most keys
occur once. Two bitmaps find the keys that may occur again, and only documents with these are sorted
and compared.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numba import njit

from nmoe_core.attributes.minhash import NUM_BANDS, NUM_HASHES, jaccard, rows_of, unpack

SCHEMA = pa.schema(
    [
        pa.field("is_survivor", pa.bool_(), nullable=False),
        pa.field("exact_of", pa.string()),  # {source}//{ingest id} of the kept document
        pa.field("near_of", pa.string()),
        pa.field("near_jaccard", pa.float32()),
    ]
)
JACCARD = 0.7
_BITS_PER_KEY = 16
_EXACT = NUM_HASHES + 1  # "bytes that are equal" where the texts are
_THREE, _SEVEN = np.uint64(3), np.uint64(7)


class Shard(NamedTuple):
    """One shard's documents, in shard order."""

    source: str
    ingest_ids: pa.Array
    """string `[num_documents]`."""
    text_sha256: pa.Array
    """fixed_size_binary[32] `[num_documents]`: of the normalised texts."""
    signatures: pa.Table
    """As `minhash.signatures` made them."""


class _Candidates(NamedTuple):
    """Documents that share a key with another, in the order in which they are decided."""

    documents: np.ndarray
    """int64 `[C]`: number of each over all shards."""
    names: pa.Array
    """string `[C]`: {source}//{ingest id}."""
    sketches: np.ndarray
    """uint8 `[C, 112]`."""
    digests: np.ndarray
    """uint8 `[C, 32]`."""
    bounds: np.ndarray
    """int64 `[C + 1]`: buckets of candidate `i` are `buckets[bounds[i] : bounds[i + 1]]`."""
    buckets: np.ndarray
    """int64: documents that share a key share a bucket."""


def resolve(
    shards: Sequence[Shard], priority: Sequence[str] = (), threshold: float = JACCARD
) -> list[pa.Table]:
    """What is kept, and what each dropped document is a copy of: a table by `SCHEMA` per shard.

    Sources of `priority` come first, in its order, then the others by name.
    """
    candidates = _candidates(shards, priority)
    sizes = np.bincount(candidates.buckets) if len(candidates.buckets) else np.zeros(0, np.int64)
    first_slots = np.cumsum(sizes) - sizes
    found = np.full(len(candidates.documents), -1)
    equal = np.zeros(len(candidates.documents), np.int64)
    _decide(
        candidates.sketches,
        candidates.digests.view(np.uint64),
        (candidates.bounds, candidates.buckets, first_slots),
        np.count_nonzero(jaccard(np.arange(NUM_HASHES + 1)) < threshold),
        found,
        equal,
    )
    return list(_tables(shards, candidates, found, equal))


def _candidates(shards: Sequence[Shard], priority: Sequence[str]) -> _Candidates:
    num_documents = sum(len(shard.ingest_ids) for shard in shards)
    num_bits = max(10, int(num_documents * (NUM_BANDS + 1) * _BITS_PER_KEY - 1).bit_length())
    once, twice = np.zeros((2, 2 ** (num_bits - 3)), np.uint8)
    for shard in shards:
        _mark(*_keys(shard), once, twice, np.uint64(64 - num_bits))
    keys, documents = [np.empty(0, np.uint64)], [np.empty(0, np.int64)]
    first = 0
    for shard in shards:
        found = _marked(*_keys(shard), twice, np.uint64(64 - num_bits))
        keys.append(found[0])
        documents.append(found[1] + first)
        first += len(shard.ingest_ids)
    return _ordered(shards, priority, *_shared(np.concatenate(keys), np.concatenate(documents)))


def _keys(shard: Shard) -> tuple[np.ndarray, np.ndarray]:
    """Keys of bands, uint64 `[N, 14]`, and of the whole text, uint64 `[N]`."""
    return unpack(shard.signatures).keys, _digests(shard)[:, :8].copy().view(np.uint64)[:, 0]


def _digests(shard: Shard) -> np.ndarray:
    return rows_of(shard.text_sha256)


def _shared(keys: np.ndarray, documents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Document and bucket of every key that occurs twice or more; keys of bitmap collisions go."""
    order = np.argsort(keys)
    keys, documents = keys[order], documents[order]
    is_new = np.ones(len(keys), bool)
    is_new[1:] = keys[1:] != keys[:-1]
    buckets = np.cumsum(is_new) - 1
    is_shared = np.bincount(buckets, minlength=1)[buckets] > 1
    _, buckets = np.unique(buckets[is_shared], return_inverse=True)
    return documents[is_shared], buckets


def _ordered(
    shards: Sequence[Shard], priority: Sequence[str], documents: np.ndarray, buckets: np.ndarray
) -> _Candidates:
    """Candidates by (source priority, ingest id, number) and the buckets of each."""
    unique, places = np.unique(documents, return_inverse=True)
    sources = sorted({shard.source for shard in shards} - set(priority))
    ranks = {source: i for i, source in enumerate([*priority, *sources])}
    rank, ids, names, sketches, digests = [], [], [], [], []
    for shard, rows in _by_shard(shards, unique):
        chosen = shard.ingest_ids.take(pa.array(rows)).cast(pa.string())
        rank.append(np.full(len(rows), ranks[shard.source]))
        ids.append(chosen)
        names += [f"{shard.source}//{name}" for name in chosen.to_pylist()]
        sketches.append(unpack(shard.signatures).sketch[rows])
        digests.append(_digests(shard)[rows])
    if not len(unique):
        none = np.empty(0, np.int64)
        rows = np.empty((0, NUM_HASHES), np.uint8), np.empty((0, 32), np.uint8)
        return _Candidates(none, pa.array([], pa.string()), *rows, np.zeros(1, np.int64), none)
    table = pa.table(
        {"rank": np.concatenate(rank), "id": pa.chunked_array(ids), "document": unique}
    )
    ordered = table.sort_by([(name, "ascending") for name in table.column_names])
    order = np.searchsorted(unique, ordered["document"].to_numpy())
    position = np.empty(len(order), np.int64)
    position[order] = np.arange(len(order))
    places = position[places]
    by_place = np.argsort(places, kind="stable")
    bounds = np.concatenate([[0], np.cumsum(np.bincount(places, minlength=len(order)))])
    return _Candidates(
        unique[order],
        pa.array(names).take(pa.array(order)),
        np.concatenate(sketches)[order],
        np.concatenate(digests)[order],
        bounds,
        buckets[by_place],
    )


def _by_shard(shards: Sequence[Shard], documents: np.ndarray) -> Iterator[tuple[Shard, np.ndarray]]:
    """Rows of each shard among ascending document numbers."""
    ends = np.cumsum([len(shard.ingest_ids) for shard in shards])
    cuts = np.searchsorted(documents, ends).tolist()
    for shard, end, start, stop in zip(shards, ends, [0, *cuts], cuts):
        yield shard, documents[start:stop] - (end - len(shard.ingest_ids))


def _tables(
    shards: Sequence[Shard], candidates: _Candidates, found: np.ndarray, equal: np.ndarray
) -> Iterator[pa.Table]:
    dropped = np.flatnonzero(found >= 0)
    dropped = dropped[np.argsort(candidates.documents[dropped])]
    names = candidates.names.take(pa.array(found[dropped]))
    similarity = pa.array(np.asarray(jaccard(equal[dropped]), np.float32))
    first = 0
    for shard, rows in _by_shard(shards, candidates.documents[dropped]):
        numbers = np.full(len(shard.ingest_ids), -1)
        numbers[rows] = np.arange(first, first + len(rows))
        first += len(rows)
        is_exact = np.zeros(len(numbers), bool)
        is_exact[rows] = equal[dropped][numbers[rows]] == _EXACT
        exact = pa.array(numbers, mask=~is_exact)
        near = pa.array(numbers, mask=is_exact | (numbers < 0))
        columns = [pa.array(numbers < 0), names.take(exact), names.take(near)]
        yield pa.table([*columns, similarity.take(near)], schema=SCHEMA)


@njit(cache=True)
def _mark(bands, exact, once, twice, shift):
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
def _marked(bands, exact, twice, shift):
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
def _decide(sketches, digests, groups, least_equal, found, equal):
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
                    found[i], best = other, _EXACT
                    break
                count = (sketches[i] == sketches[other]).sum()
                if count > best or (count == best and found[i] > other):
                    found[i], best = other, count
            if best == _EXACT:
                break
        equal[i] = best
        if found[i] < 0:
            for bucket in buckets[bounds[i] : bounds[i + 1]]:
                kept[first_slots[bucket] + num_kept[bucket]] = i
                num_kept[bucket] += 1
