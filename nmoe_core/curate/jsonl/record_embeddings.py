"""Embeddings and token counts of records, through the cache: only new texts are computed.

A row is looked up by the digests of its text and of the model, so only new and edited records are
embedded. Each block is committed to the cache when it is computed, so a killed run loses at most
one block. Equal texts are embedded once. Special tokens are not added, and texts are not cut.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from nmoe_core.base.errors import TokenizerError
from nmoe_core.base.fingerprint import sha256_json
from nmoe_core.base.progress import Meter
from nmoe_core.base.settings import TokenizerSettings
from nmoe_core.curate.jsonl.record_files import JsonlInput
from nmoe_core.curate.topics.embed import EmbeddingTable, pool, runs_within
from nmoe_core.quality.embedding_cache import EmbeddingCache
from nmoe_core.text.models import model_tokenizer
from nmoe_core.text.tokenizer import Tokenizer, load_tokenizer

BLOCK_BYTES = 2**23
BLOCK_RECORDS = 16_384
# (record numbers, lengths in tokens without EOS, rows)
Block = tuple[np.ndarray, np.ndarray, np.ndarray]


class TextTokenizer(Protocol):
    """The methods of a tokenizer that embedding needs; `fingerprint` is a digest of vocabulary and
    rules."""

    fingerprint: str

    def rows(self, texts: Sequence[str]) -> list[np.ndarray]: ...


def open_tokenizer(model_dir: Path, num_rows: int, name: str | None = None) -> Tokenizer:
    """Load the tokenizer of a checkpoint (see `model_tokenizer`) or, if given, the tokenizer called
    `name`.

    `model_dir` may be the directory above `original/`; `num_rows` is the number of rows of the
    embedding table. Raises TokenizerError if there is no tokenizer (E-TOKENIZER-NAME), or if it is
    broken (E-TOKENIZER-FILE).
    """
    if name is not None:
        return load_tokenizer(TokenizerSettings(name, needs_eos=False))
    if (found := model_tokenizer(model_dir, num_rows)) is None:
        raise TokenizerError(
            "the checkpoint has no tokenizer",
            where=model_dir,
            found=f"no tokenizer.json, an embedding table of {num_rows} rows",
            do="copy the model's tokenizer.json there, or name a tokenizer with --tokenizer",
            code="E-TOKENIZER-NAME",
        )
    return load_tokenizer(found)


@dataclass(frozen=True, slots=True)
class RecordEmbeddings:
    """Embeddings that were cached or computed for the records of an input."""

    tokens: np.ndarray  # length of each text in tokens, without EOS: int64 [N]
    rows: np.ndarray  # float32 [N, width]; width 0 if only tokens were requested
    num_computed: int  # texts that were not in the cache


def embed_records(
    records: JsonlInput,
    table: EmbeddingTable | None,
    tokenizer: TextTokenizer,
    cache_root: Path,
    *,
    is_kept: bool = True,
) -> RecordEmbeddings:
    """Compute shallow embeddings and token counts of all records, in file order; only token counts
    if `table` is None.

    `cache_root` holds one cache per model; if `is_kept` is False, its files are not changed.
    """
    model = tokenizer.fingerprint
    if table is not None:
        model = sha256_json([table.backbone, table.method, tokenizer.fingerprint])
    directory = cache_root / model[:16]
    width = 0
    if table is not None:  # take the width from an existing cache, to avoid reading the table
        width = EmbeddingCache.width_of(directory) or table.rows.shape[1]
    cache = EmbeddingCache(directory, model, width, is_kept=is_kept)
    missing = cache.missing(records.keys)

    def compute() -> Iterator[Block]:
        sizes = np.diff(records.spans[missing], axis=1).ravel()
        for run in runs_within(sizes, BLOCK_BYTES, BLOCK_RECORDS):
            block = missing[run]
            texts = tokenizer.rows(list(records.texts(block)))
            tokens = np.array([len(text) for text in texts], np.int64)
            empty = np.empty((len(texts), 0), np.float32)
            yield block, tokens, empty if table is None else pool(texts, table.rows)

    fill_cache(cache, records.keys, compute(), len(missing))
    places = cache.find(records.keys)
    return RecordEmbeddings(cache.tokens(places), cache.read(places), len(missing))


def fill_cache(cache: EmbeddingCache, keys: np.ndarray, found: Iterable[Block], total: int) -> None:
    """Commit each block of `found` as soon as it is computed; `total` is the number of records to
    compute.

    `keys` are the keys of all records. Raises LockedError if another process fills this cache
    (E-LOCKED).
    """
    meter = Meter("embed", total, "texts")
    with cache.writer() if total else nullcontext():
        for records, tokens, rows in found:
            cache.append(keys[records], tokens, rows)
            meter.add(len(records))
