"""MinHash signatures of texts: 16 bands of 7 rows over shingles of five words.

Two texts are compared if they share the key of a band. In theory, a pair with Jaccard similarity .8
shares a key with probability .977; a pair with similarity .9, with .99997; a pair with similarity
.5, with .118. Bands only choose the pairs to compare; all 112 hashes then estimate the similarity.
A text of fewer than five words is one shingle; a text without words shares no key. For a threshold
below .7, keys of shorter bands are computed from the sketches (`bands`), so texts do not need new
signatures.
"""

import math
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numba import njit

from nmoe_core.attributes.columns import NUM_BANDS, NUM_HASHES, SCHEMAS
from nmoe_core.text.transforms.code_points import mix
from nmoe_core.text.transforms.words.hashes import Words, words

NUM_ROWS = NUM_HASHES // NUM_BANDS
SHINGLE_WORDS = 5
MARGIN = 0.1
LEAST_SHARED = 0.976
LEAST_ROWS = 3
SCHEMA = SCHEMAS["signatures"]
_BATCH_BYTES = 1 << 22  # the words of a batch fit into the CPU cache
_BASE = np.uint64(0x9E3779B97F4A7C15)
_HALF = np.uint64(32)
_SPREAD = np.uint32(0x9E3779B1)
_LOW_BYTE = np.uint32(24)


class Signatures(NamedTuple):
    """MinHash signatures of texts."""

    keys: np.ndarray
    """uint64 `[num_texts, 16]`: one key per band; all are 0 for a text without words."""
    sketch: np.ndarray
    """uint8 `[num_texts, 112]`: 8 bits of each minimum hash."""


def signatures(texts: pa.Array) -> pa.Table:
    """The signature of each text, with columns as in `SCHEMA`; about 100 MB/s on one core."""
    keys = np.zeros((len(texts), NUM_BANDS), np.uint64)
    sketch = np.zeros((len(texts), NUM_HASHES), np.uint8)
    for start, stop in batches(texts):
        found = words(texts.slice(start, stop - start))
        _sign(found, Signatures(keys[start:stop], sketch[start:stop]))
    columns = [
        pa.Array.from_buffers(field.type, len(texts), [None, pa.py_buffer(rows)])
        for field, rows in zip(SCHEMA, (keys, sketch))
    ]
    return pa.Table.from_arrays(columns, schema=SCHEMA)


def unpack(table: pa.Table) -> Signatures:
    """The arrays of a table from `signatures`; not copied if its columns have one chunk."""
    return Signatures(rows_of(table["keys"]).view(np.uint64), rows_of(table["sketch"]))


def rows_of(column: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """The values of a fixed-width column without nulls: uint8 `[num_rows, width]`."""
    if isinstance(column, pa.ChunkedArray):
        column = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    width = column.type.byte_width
    payload = np.frombuffer(column.buffers()[1] or b"", np.uint8)
    return payload[column.offset * width :][: len(column) * width].reshape(-1, width)


def batches(texts: pa.Array) -> list[tuple[int, int]]:
    """Index ranges of batches of texts, a few megabytes each."""
    sizes = pc.call_function("binary_length", [texts]).to_numpy(zero_copy_only=False)
    offsets = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    cuts = np.searchsorted(offsets, np.arange(offsets[0], offsets[-1], _BATCH_BYTES)[1:])
    edges = np.unique([0, *cuts.tolist(), len(texts)]).tolist()
    return list(pairwise(edges))


def jaccard(equal: np.ndarray | int) -> np.ndarray | float:
    """Estimated Jaccard similarity from the number of equal bytes (of 112), corrected for chance:
    the bytes of unequal hashes are equal with probability 1/256."""
    return (equal / NUM_HASHES - 1 / 256) / (1 - 1 / 256)


def bands(threshold: float) -> np.ndarray:
    """The hashes of each band for a similarity threshold: int64 `[num_bands, num_rows]`.

    Bands have as many rows as possible, at most 7, such that a pair .1 above the threshold shares a
    key with probability .976. With fewer than 3 rows even dissimilar texts would share keys; so if
    3 rows are not enough, more bands of 3 rows are made from several permutations of the hashes.
    """
    similarity = min(1.0, threshold + MARGIN)
    for num_rows in range(NUM_ROWS, LEAST_ROWS - 1, -1):
        num_bands = NUM_HASHES // num_rows
        if (1 - similarity**num_rows) ** num_bands <= 1 - LEAST_SHARED:
            return np.arange(num_bands * num_rows).reshape(-1, num_rows)
    num_bands = math.ceil(math.log(1 - LEAST_SHARED) / math.log(1 - similarity**LEAST_ROWS))
    per_round = NUM_HASHES // LEAST_ROWS
    numbers = np.arange(math.ceil(num_bands / per_round) * NUM_HASHES, dtype=np.uint64)
    order = np.argsort(mix(numbers).reshape(-1, NUM_HASHES), axis=1)
    return order[:, : per_round * LEAST_ROWS].reshape(-1, LEAST_ROWS)[:num_bands]


@njit(cache=True)
def band_keys(sketch, has_words, hashes):
    """One key per band of `bands`, computed from the sketches: uint64 `[num_texts, num_bands]`; all
    are 0 for a text without words."""
    keys = np.zeros((len(sketch), len(hashes)), np.uint64)
    for text in range(len(sketch)):
        for band in range(len(hashes) if has_words[text] else 0):
            h = np.uint64(band)
            for row in hashes[band]:
                h = mix(h * _BASE + np.uint64(sketch[text, row]))
            keys[text, band] = h | np.uint64(1)
    return keys


def _sign(found: Words, into: Signatures) -> None:
    room = np.empty(int(np.diff(found.bounds).max(initial=0)) + 1, np.uint32)
    _sign_texts(found.hashes, found.bounds, room, into.keys, into.sketch)


@njit(cache=True)
def _sign_texts(hashes, bounds, room, keys, sketch):
    """Minimum of `factor * shingle + term` over each text's shingles, per hash; in 32 bits, so that
    one SIMD instruction handles 16."""
    numbers = mix(np.arange(1, 2 * NUM_HASHES + 1).astype(np.uint64) * _BASE)
    numbers = (numbers >> _HALF).astype(np.uint32)
    factors = numbers[:NUM_HASHES] | np.uint32(1)
    terms = numbers[NUM_HASHES:]
    least = np.empty(NUM_HASHES, np.uint32)
    for text in range(len(bounds) - 1):
        start = bounds[text]
        stop = bounds[text + 1]
        if start == stop:
            continue
        width = min(SHINGLE_WORDS, stop - start)
        count = stop - start - width + 1
        for i in range(count):
            h = hashes[start + i]
            for k in range(1, width):
                h = h * _BASE + hashes[start + i + k]
            room[i] = np.uint32(mix(h) >> _HALF)
        for j in range(NUM_HASHES):
            low = np.uint32(0xFFFFFFFF)
            factor = factors[j]
            term = terms[j]
            for i in range(count):
                low = min(low, np.uint32(room[i] * factor + term))
            least[j] = low
            sketch[text, j] = np.uint32(low * _SPREAD) >> _LOW_BYTE
        for band in range(NUM_BANDS):
            h = np.uint64(band)
            for row in range(NUM_ROWS):
                h = mix(h * _BASE + np.uint64(least[band * NUM_ROWS + row]))
            # a key is never 0, since 0 means that the text has no key
            keys[text, band] = h | np.uint64(1)
