"""Finds documents that are copies of other documents, over all shards of all sources.

Documents are visited in the order of (source priority, length descending, ingest id). A document is
dropped if a kept one has the same text, or shares a band key with it and has an estimated Jaccard
similarity of at least the threshold. So every dropped document is similar to the kept document that
its row names, even in a chain of small edits. Decisions depend only on the set of documents: after
documents are added or deleted, or the priority changes, the same call gives the new decisions; if a
kept document was deleted, one of its copies is kept. Grades do not exist yet at this point, so they
cannot decide which copy is kept.

On request, the row of a kept document names an earlier kept document that contains its text.

Signatures take most of the time; this step takes about one second per million documents. Two
bitmaps find the few keys that may occur more than once, and only documents with such keys are
sorted and compared.

After a change, only documents that the change can affect are decided again. The decision on a
document depends on the kept documents that share a key with it. So new documents, and dropped
documents whose kept copy may be gone, are compared with the kept documents that share a key with
them. If a decision changes, the documents that share a key are decided again too, until no decision
changes. Each round reads all keys once, in about 0.04 seconds per million documents.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nmoe_core.attributes.attribute import lengths_of
from nmoe_core.attributes.columns import SCHEMAS
from nmoe_core.attributes.copies.decide import EXACT, decide, mark, marked, sharing
from nmoe_core.attributes.kernels.bloom import bloom
from nmoe_core.attributes.minhash import NUM_HASHES, band_keys, bands, jaccard, rows_of
from nmoe_core.attributes.shared import Before, ShardRows

SCHEMA = SCHEMAS["duplicates"]
JACCARD = 0.7
MAX_VISITS = 128  # maximum number of kept documents to compare one document with
CONTAINED_JACCARD = 0.4  # minimum similarity of a text and its part for containment to be detected
PASSAGES = ("repeated_share", "repeated_of", "repeated_of_share")
"""Columns that `copies.passages` fills."""
_NAMES = ("exact_of", "near_of", "contained_in")
_KEPT, _EXACT, _NEAR, _PART = range(4)
_BITS_PER_KEY = 16


class Shard(NamedTuple):
    """One shard's documents, in shard order. Ids and sketches are read only for documents that
    share a key, in ascending order of rows."""

    source: str
    text_sha256: np.ndarray
    """uint8 `[num_documents, 32]`: hashes of the normalised texts."""
    keys: np.ndarray
    """uint64 `[num_documents, 16]`: band keys, see `minhash.signatures`."""
    ingest_ids: Callable[[np.ndarray], Sequence[str]]
    """Function from rows, int64 `[num_rows]`, to ingest ids."""
    sketches: Callable[[np.ndarray], np.ndarray]
    """Function from rows to sketches, uint8 `[num_rows, 112]`."""
    lengths: np.ndarray | None = None
    """int64 `[num_documents]`: tokens of each document; None if all count as equally long."""

    def only(self, rows: np.ndarray) -> "Shard":
        """The shard restricted to some documents, given by ascending rows."""
        return Shard(
            self.source,
            self.text_sha256[rows],
            self.keys[rows],
            lambda chosen: self.ingest_ids(rows[chosen]),
            lambda chosen: self.sketches(rows[chosen]),
            None if self.lengths is None else self.lengths[rows],
        )

    def banded(self, threshold: float) -> "Shard":
        """The shard with band keys for this similarity threshold, see `minhash.bands`."""
        hashes = bands(threshold)
        if len(hashes) == self.keys.shape[1]:
            return self
        sketches = self.sketches(np.arange(len(self.keys)))
        return self._replace(keys=band_keys(sketches, self.keys[:, 0] != 0, hashes))

    @property
    def text_keys(self) -> np.ndarray:
        """uint64 `[num_documents]`: equal for equal texts."""
        return self.text_sha256.view(np.uint64)[:, 0]


def open_shard(rows: ShardRows) -> Shard:
    """Open a shard from its file of signatures."""
    return Shard(
        rows.source,
        rows_of(rows.column("text_sha256")),
        rows_of(rows.column("keys")).view(np.uint64),
        rows.ingest_ids,
        lambda chosen: rows_of(rows.column("sketch"))[chosen],
        lengths_of(rows.column("doc_id")),
    )


class _Candidates(NamedTuple):
    """Documents that share a key with another document, in the order of decision."""

    documents: np.ndarray
    """int64 `[C]`: index of each document, counted over all shards."""
    names: pa.Array
    """string `[C]`: {source}//{ingest id}."""
    sketches: np.ndarray
    """uint8 `[C, 112]`."""
    digests: np.ndarray
    """uint8 `[C, 32]`."""
    lengths: np.ndarray
    """int64 `[C]`."""
    bounds: np.ndarray
    """int64 `[C + 1]`: buckets of candidate `i` are `buckets[bounds[i] : bounds[i + 1]]`."""
    buckets: np.ndarray
    """int64: bucket numbers; documents that share a key share a bucket."""


def resolve(
    shards: Sequence[Shard],
    priority: Sequence[str] = (),
    threshold: float = JACCARD,
    settled: Sequence[np.ndarray] = (),
    contained: float | None = None,
) -> list[pa.Table]:
    """The decision on each document, and for each dropped document the kept document that it
    copies: one table per shard, with columns as in `SCHEMA`.

    Sources in `priority` come first, in this order, then the others by name. `settled` marks
    documents that are always kept, bool `[num_documents]` per shard. With `contained`, the row of a
    kept document names an earlier kept document that has at least this share of its shingles.
    """
    shards = _banded(shards, threshold, contained)
    candidates = _candidates(shards, priority)
    sizes = np.bincount(candidates.buckets) if len(candidates.buckets) else np.zeros(0, np.int64)
    first_slots = np.cumsum(sizes) - sizes
    count = len(candidates.documents)
    least_equal = np.count_nonzero(jaccard(np.arange(NUM_HASHES + 1)) < threshold)
    copies = np.full(count, -1), np.zeros(count, np.int64)
    parts = np.full(count, -1), np.zeros(count)
    is_settled = (
        np.concatenate(settled)
        if settled
        else np.zeros(sum(len(shard.keys) for shard in shards), bool)
    )
    decide(
        (candidates.sketches, candidates.digests.view(np.uint64), candidates.lengths),
        (candidates.bounds, candidates.buckets, first_slots),
        (least_equal, math.inf if contained is None else contained, MAX_VISITS),
        is_settled[candidates.documents],
        (*copies, *parts),
    )
    return list(_tables(shards, candidates, copies, parts))


def _banded(shards: Sequence[Shard], threshold: float, contained: float | None) -> list[Shard]:
    least = threshold if contained is None else min(threshold, CONTAINED_JACCARD)
    return [shard.banded(least) for shard in shards]


def resolve_incremental(
    shards: Sequence[Shard],
    known: Before,
    priority: Sequence[str] = (),
    threshold: float = JACCARD,
    contained: float | None = None,
) -> list[pa.Table]:
    """Like `resolve`, but starts from the tables of the last run with the same settings; a table
    that is still correct is returned unchanged."""
    shards = _banded(shards, threshold, contained)
    was_kept = [_was_kept(*pair) for pair in zip(shards, known.tables)]
    again = [_seeds(*pair, known.moved) for pair in zip(shards, known.tables)]
    near = [np.zeros(len(one), bool) for one in again]
    new = again
    while True:
        # With so many documents to decide again, deciding all is little more work.
        if 2 * sum(map(np.count_nonzero, again)) >= sum(len(shard.keys) for shard in shards):
            return resolve(shards, priority, threshold, (), contained)
        near = list(map(np.logical_or, near, _sharing(shards, new)))
        part = [one | seen & kept for one, seen, kept in zip(again, near, was_kept)]
        # Kept documents that share a key are compared with, but not decided again.
        settled = [~one[chosen] for one, chosen in zip(again, part)]
        found = resolve(_only(shards, part), priority, threshold, settled, contained)
        # Only a document whose decision changed can change those of documents near it.
        flipped = [np.zeros(len(one), bool) for one in again]
        for one, chosen, kept, table in zip(flipped, part, was_kept, found):
            one[chosen] = table["is_survivor"].to_numpy() != kept[chosen]
        new = _sharing(shards, flipped, [seen & ~one for seen, one in zip(near, again)])
        if not any(map(np.any, new)):
            break
        again = list(map(np.logical_or, again, new))
    decided = [table.filter(pa.array(~one)) for table, one in zip(found, settled)]
    return [_replaced(*each) for each in zip(known.tables, map(np.flatnonzero, again), decided)]


def _only(shards: Sequence[Shard], chosen: Sequence[np.ndarray]) -> list[Shard]:
    return [shard.only(np.flatnonzero(one)) for shard, one in zip(shards, chosen)]


def _candidates(shards: Sequence[Shard], priority: Sequence[str]) -> _Candidates:
    num_keys = sum(shard.keys.size + len(shard.keys) for shard in shards)
    num_bits = max(10, int(num_keys * _BITS_PER_KEY - 1).bit_length())
    # Most keys occur once: two bitmaps find the others without sorting all keys.
    once, twice = np.zeros((2, 2 ** (num_bits - 3)), np.uint8)
    for shard in shards:
        mark(shard.keys, shard.text_keys, once, twice, np.uint64(64 - num_bits))
    keys = [np.empty(0, np.uint64)]
    documents = [np.empty(0, np.int64)]
    first = 0
    for shard in shards:
        found = marked(shard.keys, shard.text_keys, twice, np.uint64(64 - num_bits))
        keys.append(found[0])
        documents.append(found[1] + first)
        first += len(shard.keys)
    return _ordered(shards, priority, *_shared(np.concatenate(keys), np.concatenate(documents)))


def _shared(keys: np.ndarray, documents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Document and bucket of every key that occurs at least twice; keys that only collide in the
    bitmap are dropped."""
    order = np.argsort(keys)
    keys = keys[order]
    documents = documents[order]
    is_new = np.ones(len(keys), bool)
    is_new[1:] = keys[1:] != keys[:-1]
    buckets = np.cumsum(is_new) - 1
    is_shared = np.bincount(buckets, minlength=1)[buckets] > 1
    return documents[is_shared], np.cumsum(is_new[is_shared]) - 1


def _ordered(
    shards: Sequence[Shard], priority: Sequence[str], documents: np.ndarray, buckets: np.ndarray
) -> _Candidates:
    """Candidates sorted by (source priority, length descending, ingest id, number), and the buckets
    of each."""
    unique, places = np.unique(documents, return_inverse=True)
    source_ranks = _source_ranks(shards, priority)
    rank = []
    ids = []
    names = []
    sketches = []
    digests = []
    lengths = []
    for shard, rows in by_shard(shards, unique):
        if not len(rows):
            continue
        chosen = shard.ingest_ids(rows)
        rank.append(np.full(len(rows), source_ranks[shard.source]))
        ids.append(pa.array(chosen, pa.string()))
        names += [f"{shard.source}//{name}" for name in chosen]
        sketches.append(shard.sketches(rows))
        digests.append(shard.text_sha256[rows])
        lengths.append(
            np.zeros(len(rows), np.int64) if shard.lengths is None else shard.lengths[rows]
        )
    if not len(unique):
        none = np.empty(0, np.int64)
        rows = np.empty((0, NUM_HASHES), np.uint8), np.empty((0, 32), np.uint8)
        bounds = np.zeros(1, np.int64)
        return _Candidates(none, pa.array([], pa.string()), *rows, none, bounds, none)
    size = np.concatenate(lengths)
    ordered = _in_order(np.concatenate(rank), size, pa.chunked_array(ids), unique)
    order = np.searchsorted(unique, ordered)
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
        size[order],
        bounds,
        buckets[by_place],
    )


def _source_ranks(shards: Sequence[Shard], priority: Sequence[str]) -> dict[str, int]:
    sources = sorted({shard.source for shard in shards} - set(priority))
    return {source: i for i, source in enumerate([*priority, *sources])}


def _in_order(
    rank: np.ndarray, size: np.ndarray, ids: pa.ChunkedArray, documents: np.ndarray
) -> np.ndarray:
    """The numbers of documents, in the order of decision."""
    table = pa.table([rank, -size, ids, documents], names=["rank", "longest", "id", "document"])
    ordered = table.sort_by([(name, "ascending") for name in table.column_names])
    return ordered["document"].to_numpy()


def ranks(
    shards: Sequence[Shard], tables: Sequence[pa.Table], priority: Sequence[str]
) -> np.ndarray:
    """The place of each kept document in the order of decision, -1 for others: int64 over all
    shards. Memory: about 100 bytes per document."""
    source_ranks = _source_ranks(shards, priority)
    rank = [np.zeros(0, np.int64)]
    sizes = [np.zeros(0, np.int64)]
    ids = [pa.array([], pa.string())]
    for shard in shards:
        rows = np.arange(len(shard.keys))
        rank.append(np.full(len(rows), source_ranks[shard.source]))
        sizes.append(np.zeros(len(rows), np.int64) if shard.lengths is None else shard.lengths)
        ids.append(pa.array(shard.ingest_ids(rows), pa.string()))
    is_kept = np.concatenate([np.zeros(0, bool), *(t["is_survivor"].to_numpy() for t in tables)])
    numbers = np.arange(len(is_kept))
    columns = np.concatenate(rank), np.concatenate(sizes), pa.chunked_array(ids), numbers
    ordered = _in_order(*columns)
    found = np.empty(len(numbers), np.int64)
    found[ordered] = numbers
    return np.where(is_kept, found, -1)


def by_shard(shards: Sequence[Shard], documents: np.ndarray) -> Iterator[tuple[Shard, np.ndarray]]:
    """Split ascending document numbers into rows per shard."""
    ends = np.cumsum([len(shard.keys) for shard in shards])
    cuts = np.searchsorted(documents, ends).tolist()
    for shard, end, start, stop in zip(shards, ends, [0, *cuts], cuts):
        yield shard, documents[start:stop] - (end - len(shard.keys))


def _tables(
    shards: Sequence[Shard],
    candidates: _Candidates,
    copies: tuple[np.ndarray, np.ndarray],
    parts: tuple[np.ndarray, np.ndarray],
) -> Iterator[pa.Table]:
    of, equal = copies
    container, share = parts
    of_kept = np.where(container < 0, _KEPT, _PART)
    kinds = np.where(of < 0, of_kept, np.where(equal == EXACT, _EXACT, _NEAR))
    named = np.flatnonzero(kinds)
    named = named[np.argsort(candidates.documents[named])]
    names = candidates.names.take(pa.array(np.where(of < 0, container, of)[named]))
    kinds = kinds[named]
    similarity = pa.array(np.asarray(jaccard(equal[named]), np.float32))
    containment = pa.array(share[named].astype(np.float32))
    first = 0
    for shard, rows in by_shard(shards, candidates.documents[named]):
        numbers = np.full(len(shard.keys), -1)
        kind = np.zeros(len(shard.keys), np.int64)
        numbers[rows] = np.arange(first, first + len(rows))
        kind[rows] = kinds[numbers[rows]]
        first += len(rows)
        exact, near, part = (pa.array(numbers, mask=kind != k) for k in (_EXACT, _NEAR, _PART))
        columns = [pa.array(np.isin(kind, (_KEPT, _PART))), names.take(exact), names.take(near)]
        of_parts = names.take(part), containment.take(part)
        passages = (pa.nulls(len(kind), SCHEMA.field(name).type) for name in PASSAGES)
        yield pa.table([*columns, similarity.take(near), *of_parts, *passages], schema=SCHEMA)


def _was_kept(shard: Shard, table: pa.Table | None) -> np.ndarray:
    """Whether the last run kept each document of a shard: bool `[num_documents]`."""
    return np.zeros(len(shard.keys), bool) if table is None else table["is_survivor"].to_numpy()


def _seeds(shard: Shard, table: pa.Table | None, moved: set[str]) -> np.ndarray:
    """Whether each document of a shard must be decided again: bool `[num_documents]`."""
    found = np.full(len(shard.keys), table is None)
    for column in () if table is None else map(table.column, _NAMES):
        rows = np.flatnonzero(column.is_valid())
        names = column.drop_null()
        for source in moved:
            options = pc.MatchSubstringOptions(f"{source}//")
            found[rows] |= pc.call_function("starts_with", [names], options).to_numpy()
    return found


def _sharing(
    shards: Sequence[Shard], chosen: Sequence[np.ndarray], among: Sequence[np.ndarray] = ()
) -> list[np.ndarray]:
    """Whether each document (of `among`, if given) shares a key with a chosen document: bool
    `[num_documents]` per shard."""
    keys = [(shard.keys.ravel(), shard.text_keys) for shard in _only(shards, chosen)]
    wanted = np.sort(np.concatenate([part for pair in keys for part in pair]))
    passes = bloom(wanted)
    found = [np.zeros(len(one), bool) for one in chosen]
    for i, shard in enumerate(_only(shards, among) if among else shards):
        rows = sharing(shard.keys, shard.text_keys, wanted, *passes) if len(wanted) else []
        found[i][np.flatnonzero(among[i])[rows] if among else rows] = True
    return found


def _replaced(table: pa.Table | None, rows: np.ndarray, found: pa.Table) -> pa.Table:
    """A table with some rows replaced; the same object if the rows are equal."""
    if table is None:
        return found
    if table.take(pa.array(rows)).equals(found):
        return table
    order = np.arange(len(table))
    order[rows] = len(table) + np.arange(len(rows))
    return pa.concat_tables([table.cast(SCHEMA), found]).take(pa.array(order))
