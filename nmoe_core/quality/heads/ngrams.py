"""Features of documents for the student: hashed 1- and 2-grams of token bytes, and four scalars.

A token is identified by the BLAKE2b of its bytes, not by its id, so a student fitted with one
tokenizer can score documents of another. The first 2**18 columns are the square roots of n-gram
counts, normalised to length one; the last four are the standardised scalars. The features of a
document do not depend on other documents.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from loader.order.shuffle import GOLDEN, mix64_array

NUM_COLUMNS = 1 << 18
NUM_SCALARS = 4
SCALAR_WEIGHT = 0.25
MAX_DEVIATIONS = 3.0
_PAIR = np.uint64(0xD1342543DE82EF95)  # odd factor: (a, b) and (b, a) get different hashes


class TokenTable(NamedTuple):
    """The tokens of a vocabulary, by id: 64 bits of the BLAKE2b of the token's bytes, uint64 `[V]`,
    and the log of its length in bytes, float64 `[V]`."""

    hashes: np.ndarray
    log_bytes: np.ndarray

    @classmethod
    def of(cls, spellings: Mapping[int, bytes], vocab_size: int) -> "TokenTable":
        """Build the table; an id without a spelling counts as an empty token."""
        tokens = [spellings.get(i, b"") for i in range(vocab_size)]
        digests = b"".join(hashlib.blake2b(token, digest_size=8).digest() for token in tokens)
        sizes = np.fromiter(map(len, tokens), np.float64, vocab_size)
        return cls(np.frombuffer(digests, "<u8"), np.log(np.maximum(sizes, 1.0)))


class _Joined(NamedTuple):
    """Concatenated documents: token ids int64 `[T]`, the document of each token `[T]`, and the
    number of documents."""

    ids: np.ndarray
    rows: np.ndarray
    num: int

    @classmethod
    def of(cls, documents: Sequence[np.ndarray]) -> "_Joined":
        lengths = np.fromiter(map(len, documents), np.int64, len(documents))
        ids = np.concatenate([np.empty(0, np.int64), *documents]).astype(np.int64)
        return cls(ids, np.repeat(np.arange(len(documents)), lengths), len(documents))


def scalars(documents: Sequence[np.ndarray], table: TokenTable) -> np.ndarray:
    """Four scalars per document, float64 `[N, 4]`: log of the number of tokens, share of distinct
    tokens, share of one-byte tokens, mean log of a token's number of bytes. All are 0 for an empty
    document."""
    ids, rows, num = _Joined.of(documents)
    lengths = np.maximum(np.bincount(rows, minlength=num), 1)
    ordered = np.sort(rows << 32 | ids)
    is_first = np.ones(len(ordered), np.bool_)
    is_first[1:] = ordered[1:] != ordered[:-1]
    logs = table.log_bytes[ids]
    sums = [is_first.astype(np.float64), (logs == 0).astype(np.float64), logs]
    shares = [np.bincount(rows, values, num) / lengths for values in sums]
    return np.stack([np.log(lengths), *shares], axis=1)


def standardised(values: np.ndarray, mean: np.ndarray, deviation: np.ndarray) -> np.ndarray:
    """Standardise scalars `[N, 4]` and clip them, because few training documents have extreme
    values."""
    return np.clip((values - mean) / deviation, -MAX_DEVIATIONS, MAX_DEVIATIONS) * SCALAR_WEIGHT


def ngrams(documents: Sequence[np.ndarray], table: TokenTable) -> Any:
    """Normalised square roots of the counts of hashed 1- and 2-grams: a scipy CSR matrix, float64
    `[N, 2**18]`."""
    from scipy.sparse import csr_array

    ids, rows, num = _Joined.of(documents)
    tokens = _mixed(table.hashes[ids])
    is_pair = rows[1:] == rows[:-1]
    pairs = _mixed(tokens[:-1] * _PAIR + tokens[1:])
    columns = np.concatenate([tokens, pairs[is_pair]]) >> np.uint64(64 - 18)
    places = np.concatenate([rows, rows[1:][is_pair]]) * NUM_COLUMNS + columns.astype(np.int64)
    places, counts = np.unique(places, return_counts=True)
    rows = places // NUM_COLUMNS
    columns = places % NUM_COLUMNS
    totals = np.bincount(rows, counts, num)  # the squared norm of a row of square roots
    data = np.sqrt(counts / totals[rows])
    bounds = np.searchsorted(rows, np.arange(num + 1))
    at = (columns.astype(np.int32), bounds.astype(np.int32))  # the solver needs int32
    return csr_array((data, *at), shape=(num, NUM_COLUMNS))


def _mixed(values: np.ndarray) -> np.ndarray:
    """The SplitMix64 hash of each uint64."""
    return mix64_array(values + np.uint64(GOLDEN))
