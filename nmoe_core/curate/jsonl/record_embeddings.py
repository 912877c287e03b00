"""Embeddings of the records of a JSONL file, through the cache: only new texts are computed.

A row is found by the digest of its text and of the model, so appended records cost themselves and
an edited one costs one. Each block is committed to the cache when it is done: a killed run loses
one block. Equal texts are computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nmoe_core.base.fingerprint import sha256_json
from nmoe_core.curate.jsonl.embedding_cache import EmbeddingCache
from nmoe_core.curate.jsonl.input import JsonlInput
from nmoe_core.curate.topics.embed import EmbeddingTable, pool, runs_within
from nmoe_core.curate.topics.model_tokenizer import TextTokenizer

BLOCK_BYTES = 2**23
BLOCK_RECORDS = 16_384
Progress = Callable[[str, int, int], None]
# Records, their lengths in tokens without EOS, and their rows.
Block = tuple[np.ndarray, np.ndarray, np.ndarray]


def silent(what: str, done: int, total: int) -> None:
    """No progress wanted."""


@dataclass(frozen=True, slots=True)
class RecordEmbeddings:
    """What was found or made for the records of an input.

    Attributes:
        tokens: int64 `[N]`, length of each text in tokens, without EOS.
        rows: float32 `[N, width]`; width 0 where only tokens were asked for.
        num_computed: Texts that were not in the cache.
    """

    tokens: np.ndarray
    rows: np.ndarray
    num_computed: int


def embed_records(
    records: JsonlInput,
    table: EmbeddingTable | None,
    tokenizer: TextTokenizer,
    cache_root: Path,
    *,
    is_kept: bool = True,
    progress: Progress = silent,
) -> RecordEmbeddings:
    """Shallow embeddings and token counts of all records, in file order.

    Args:
        records: The scanned input.
        table: The model's table; None for token counts alone.
        tokenizer: The model's tokenizer.
        cache_root: Holds one cache for each model.
        is_kept: False leaves the cache as it is.
        progress: Called with what is done, texts done and texts to do.
    """
    model = tokenizer.fingerprint
    if table is not None:
        model = sha256_json([table.backbone, table.method, tokenizer.fingerprint])
    directory = cache_root / model[:16]
    width = 0
    if table is not None:  # an existing cache knows it, so the table is read only if needed
        width = EmbeddingCache.width_of(directory) or table.rows.shape[1]
    cache = EmbeddingCache(directory, model, width)
    missing = missing_records(cache, records.keys)

    def compute() -> Iterator[Block]:
        lengths = records.lengths()[missing]
        for run in runs_within(lengths, BLOCK_BYTES, BLOCK_RECORDS):
            block = missing[run]
            texts = tokenizer.encode_batch(list(records.texts(block)))
            tokens = np.array([len(text) for text in texts], np.int64)
            empty = np.empty((len(texts), 0), np.float32)
            yield block, tokens, empty if table is None else pool(texts, table.rows)

    fill_cache(cache, records.keys, compute(), len(missing), is_kept=is_kept, progress=progress)
    places = cache.find(records.keys)
    return RecordEmbeddings(cache.tokens(places), cache.read(places), len(missing))


def missing_records(cache: EmbeddingCache, keys: np.ndarray) -> np.ndarray:
    """The first record of each key that the cache does not hold: int64, ascending."""
    absent = np.flatnonzero(cache.find(keys) < 0)
    _, first = np.unique(keys[absent], return_index=True)
    return absent[np.sort(first)]


def fill_cache(
    cache: EmbeddingCache,
    keys: np.ndarray,
    found: Iterable[Block],
    total: int,
    *,
    is_kept: bool = True,
    progress: Progress = silent,
) -> None:
    """Commit blocks of records one by one as they are made.

    Args:
        cache: Takes them.
        keys: `S32 [N]` of all records.
        found: Blocks of `total` records in all.
        total: 0 leaves the cache's files untouched.
        is_kept: False holds the rows in memory alone.
        progress: Called after each block.

    Raises:
        LockedError: Another process fills this cache (E-LOCKED).
    """
    done = 0
    with cache.writer() if is_kept and total else nullcontext():
        for records, tokens, rows in found:
            (cache.append if is_kept else cache.hold)(keys[records], tokens, rows)
            done += len(records)
            progress("embedded", done, total)
