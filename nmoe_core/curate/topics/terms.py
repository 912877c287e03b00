"""Terms as an embedding table: tf-idf of tokens, reduced by a truncated SVD.

The reduced tf-idf of a document is, up to its length, the sum of one row per token: the inverse
document frequency of the token times its singular vector. So these rows are an embedding table,
and documents are embedded with them as with a backbone's table, without a model. On eight sources
with 30 topics, the mutual information with the source is .76, against .71 for random and .73 for
real embeddings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

METHOD = "tfidf-svd-100/1"
WIDTH = 100
DOCUMENTS = 16_384  # of the sample: more change the vectors by less than they cost
TOKENS = 1024  # of a document


def fit_terms(texts: Sequence[np.ndarray], seed: int) -> np.ndarray:
    """Fit the rows on the ids of documents: float32 `[terms, 1 + width]`, the token id and its row,
    in the order of ids. The width is `WIDTH`, or less if there are fewer documents or terms.
    Time and memory grow with the number of tokens."""
    from scipy import sparse
    from sklearn.preprocessing import normalize
    from sklearn.utils.extmath import randomized_svd
    from threadpoolctl import threadpool_limits

    lengths = [len(text) for text in texts]
    terms, columns = np.unique(np.concatenate([np.empty(0, np.int64), *texts]), return_inverse=True)
    width = min(WIDTH, len(texts), len(terms))
    if not width:
        return np.empty((0, 1 + WIDTH), np.float32)
    rows = np.repeat(np.arange(len(texts)), lengths)
    shape = (len(texts), len(terms))
    ones = np.ones(len(rows), np.float32)
    counts: Any = sparse.csr_matrix((ones, (rows, columns)), shape=shape)
    counts.sum_duplicates()
    frequencies = np.bincount(counts.indices, minlength=len(terms))
    weights = np.log((1 + len(texts)) / (1 + frequencies)) + 1
    unit = normalize(counts.multiply(weights).tocsr())
    with threadpool_limits(limits=1):  # sums over several threads differ from run to run
        _, _, vectors = randomized_svd(
            unit,
            width,
            n_iter=5,  # pyright: ignore[reportArgumentType]
            random_state=seed,
        )
    return np.column_stack([terms, (vectors * weights).T]).astype(np.float32)


def term_table(terms: np.ndarray, vocab_size: int) -> np.ndarray:
    """The embedding table of fitted terms: float32 `[vocab, width]`, zero for a token that no
    document of the sample had."""
    rows = np.zeros((vocab_size, terms.shape[1] - 1), np.float32)
    rows[terms[:, 0].astype(np.int64)] = terms[:, 1:]
    return rows
