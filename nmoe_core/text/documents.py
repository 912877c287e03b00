"""Decodes many documents at once into an Arrow array of texts.

With a tiktoken encoding, one call looks up the bytes of all tokens of a batch in a table. This is
many times faster than decoding document by document, which other tokenizers require.
"""

import functools
from typing import TYPE_CHECKING

import numpy as np

from nmoe_core.text.reference import TiktokenReference
from nmoe_core.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import pyarrow as pa


def decode_documents(
    tokenizer: Tokenizer, tokens: np.ndarray, spans: np.ndarray
) -> "pa.LargeStringArray":
    """The texts of documents. `tokens` are the tokens of a shard file; `spans`, int64 `[documents,
    2]`, include EOS and, if the shard has BOS, BOS. A document that was cut inside a character ends
    with U+FFFD."""
    import pyarrow as pa

    inner = [tokens[start : end - 1] for start, end in spans.tolist()]
    if not isinstance(tokenizer.reference, TiktokenReference) or tokenizer.bos_token_id is not None:
        return pa.array(map(tokenizer.decode, inner), pa.large_string())
    ids = np.concatenate([np.empty(0, tokens.dtype), *inner])
    _, places, payload = _table(tokenizer.reference).take(pa.array(ids)).buffers()
    lasts = np.cumsum([0, *map(len, inner)], dtype=np.int64)
    offsets = pa.py_buffer(np.frombuffer(places, np.int64)[lasts])
    texts = pa.Array.from_buffers(pa.large_binary(), len(inner), [None, offsets, payload])
    try:
        return texts.cast(pa.large_string())  # the cast checks every byte
    except pa.ArrowInvalid:
        decoded = [text.decode("utf-8", "replace") for text in texts.to_pylist()]
        return pa.array(decoded, pa.large_string())


@functools.lru_cache(maxsize=2)
def _table(reference: TiktokenReference) -> "pa.LargeBinaryArray":
    """The bytes of each token, empty for an id without a token."""
    import pyarrow as pa

    payload, offsets = reference.token_bytes
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(payload)]
    return pa.Array.from_buffers(pa.large_binary(), reference.vocab_size, buffers)
