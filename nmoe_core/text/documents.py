"""Decodes many documents at once into an Arrow array of texts.

If a tokenizer's text is the bytes of its tokens one after the other, one call looks up the bytes of
all tokens of a batch in a table: those of tiktoken, byte-level ones, and models of SentencePiece,
also as a `tokenizer.json`. This is many times faster than decoding document by document, which
other tokenizers require.
"""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from nmoe_core.text.reference import Reference
from nmoe_core.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import pyarrow as pa


def decode_documents(
    tokenizer: Tokenizer, tokens: np.ndarray, spans: np.ndarray
) -> "pa.LargeStringArray":
    """The texts of documents. `tokens` are the tokens of a shard file; `spans`, int64 `[documents,
    2]`, include EOS and, if the shard has BOS, BOS. A document that was cut inside a character ends
    with U+FFFD."""
    bos = tokenizer.bos_token_id
    is_bos = np.zeros(len(spans), np.int64)
    if bos is not None and len(spans):
        is_bos[:] = (tokens[spans[:, 0]] == bos) & (spans[:, 1] - spans[:, 0] > 1)
    starts = (spans[:, 0] + is_bos).tolist()
    inner = [tokens[start : end - 1] for start, end in zip(starts, spans[:, 1].tolist())]
    return decode_tokens(tokenizer.reference, inner)


def decode_tokens(reference: Reference, rows: Sequence[np.ndarray]) -> "pa.LargeStringArray":
    """The text of each row of tokens, which have neither BOS nor EOS. A row that was cut inside a
    character ends with U+FFFD."""
    import pyarrow as pa

    table = _table(reference)
    if table is None:
        return pa.array((reference.decode(row.tolist()) for row in rows), pa.large_string())
    ids = np.concatenate([np.empty(0, np.int32), *rows], dtype=np.int32, casting="unsafe")
    lasts = np.cumsum([0, *map(len, rows)], dtype=np.int64)
    has_first = len(table) > reference.vocab_size
    if has_first:
        ids[lasts[:-1][np.diff(lasts) > 0]] += reference.vocab_size
    _, places, payload = table.take(_indices(ids)).buffers()
    offsets = pa.py_buffer(np.frombuffer(places, np.int64)[lasts])
    texts = pa.Array.from_buffers(pa.large_binary(), len(rows), [None, offsets, payload])
    try:
        return texts.cast(pa.large_string())  # the cast checks every byte
    except pa.ArrowInvalid:
        pairs = zip(texts.to_pylist(), rows)
        decoded = [_decoded(text, row, reference if has_first else None) for text, row in pairs]
        return pa.array(decoded, pa.large_string())


def _decoded(payload: bytes, row: np.ndarray, reference: Reference | None) -> str:
    """The text of a row; its library decides if the bytes of its tokens are no UTF-8."""
    try:
        return payload.decode("utf-8", "replace" if reference is None else "strict")
    except UnicodeDecodeError:
        assert reference is not None
        return reference.decode(row.tolist())


def _indices(ids: np.ndarray) -> "pa.Int32Array":
    """Ids as indices. pyarrow takes 32-bit ones twice as fast as 16-bit ones, and `pa.array` of an
    array would import pandas."""
    import pyarrow as pa

    return pa.Array.from_buffers(pa.int32(), len(ids), [None, pa.py_buffer(ids)])


def share_table(reference: Reference) -> None:
    """Make the table of a tokenizer now, so that processes forked later share it."""
    _table(reference)


@functools.lru_cache(maxsize=2)
def _table(reference: Reference) -> "pa.LargeBinaryArray | None":
    """The bytes of each token, empty for an id without a token; None if a text is not the bytes of
    its tokens."""
    import pyarrow as pa

    found = reference.token_bytes
    if found is None:
        return None
    payload, offsets = found
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(payload)]
    return pa.Array.from_buffers(pa.large_binary(), len(offsets) - 1, buffers)
