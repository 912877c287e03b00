"""Embeddings of the records of a JSONL file, through the cache: only new texts are computed.

A row is found by the digest of its text and of the model, so appended records cost themselves and
an edited one costs one. Each block is committed to the cache when it is done: a killed run loses
one block. Equal texts are computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nmoe_core.base.fingerprint import sha256_json
from nmoe_core.curate.jsonl.embedding_cache import EmbeddingCache
from nmoe_core.curate.jsonl.input import JsonlInput
from nmoe_core.curate.topics.embed import EmbeddingTable, pool
from nmoe_core.curate.topics.model_tokenizer import TextTokenizer

BLOCK_BYTES = 2**23
BLOCK_RECORDS = 16_384
Progress = Callable[[str, int, int], None]


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
    progress: Progress = lambda what, done, total: None,
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
    width = 0 if table is None else _width(table, cache_root / model[:16])
    cache = EmbeddingCache(cache_root / model[:16], model, width)
    places = cache.find(records.keys)
    missing = first_of_each(records.keys, np.flatnonzero(places < 0))
    fresh: list[tuple[np.ndarray, np.ndarray]] = []

    def compute(block: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        texts = tokenizer.encode_batch(list(records.texts(block)))
        tokens = np.array([len(text) for text in texts], np.int64)
        rows = np.empty((len(texts), 0), np.float32) if table is None else pool(texts, table.rows)
        return tokens, rows

    done = 0
    if is_kept and len(missing):
        with cache.writer():
            for block in blocks(missing, records.lengths()):
                cache.append(records.keys[block], *compute(block))
                done += len(block)
                progress("embedded", done, len(missing))
        places = cache.find(records.keys)
    elif len(missing):
        fresh = [compute(block) for block in blocks(missing, records.lengths())]
    return _collect(records, cache, places, missing, fresh)


def first_of_each(keys: np.ndarray, records: np.ndarray) -> np.ndarray:
    """Of the given records, the first one of each key: int64, ascending."""
    _, first = np.unique(keys[records], return_index=True)
    return records[np.sort(first)]


def blocks(records: np.ndarray, lengths: np.ndarray) -> Iterator[np.ndarray]:
    """Runs of records of at most `BLOCK_BYTES` and `BLOCK_RECORDS`, or of one long record."""
    ends = np.cumsum(lengths[records])
    first = 0
    while first < len(records):
        limit = (ends[first - 1] if first else 0) + BLOCK_BYTES
        stop = max(int(np.searchsorted(ends, limit, side="right")), first + 1)
        stop = min(stop, first + BLOCK_RECORDS)
        yield records[first:stop]
        first = stop


def _width(table: EmbeddingTable, directory: Path) -> int:
    """Columns of the table; of an existing cache, so that the table is read only if needed."""
    from loader.files.format import read_json_object
    from nmoe_core.curate.jsonl.embedding_cache import HEADER_NAME

    header = directory / HEADER_NAME
    return read_json_object(header)["width"] if header.exists() else table.rows.shape[1]


def _collect(
    records: JsonlInput,
    cache: EmbeddingCache,
    places: np.ndarray,
    missing: np.ndarray,
    fresh: list[tuple[np.ndarray, np.ndarray]],
) -> RecordEmbeddings:
    """Rows in file order, from the cache and from what was computed beside it."""
    is_stored = places >= 0
    tokens = np.empty(len(records), np.int64)
    rows = np.empty((len(records), cache.width), np.float32)
    tokens[is_stored] = cache.tokens(places[is_stored])
    rows[is_stored] = cache.read(places[is_stored])
    if fresh:
        order = np.argsort(records.keys[missing], kind="stable")
        absent = np.flatnonzero(~is_stored)
        at = order[np.searchsorted(records.keys[missing], records.keys[absent], sorter=order)]
        tokens[absent] = np.concatenate([part for part, _ in fresh])[at]
        rows[absent] = np.concatenate([part for _, part in fresh])[at]
    return RecordEmbeddings(tokens, rows, len(missing))
