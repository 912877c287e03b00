"""Embeddings and token counts of records, through the cache: only new texts are computed.

A row is found by the digest of its text and of the model, so appended records cost themselves and
an edited one costs one. Each block is committed to the cache when it is done: a killed run loses
one block. Equal texts are computed once. Special tokens are never added, texts are never cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nmoe_core.base.errors import TokenizerError
from nmoe_core.base.fingerprint import sha256_file, sha256_json
from nmoe_core.base.settings import DEFAULT_TOKENIZER
from nmoe_core.curate.jsonl.embedding_cache import EmbeddingCache
from nmoe_core.curate.jsonl.files import JsonlInput
from nmoe_core.curate.topics.embed import EmbeddingTable, pool, runs_within
from nmoe_core.text.tokenizer import FileTokenizer, load_tokenizer
from nmoe_core.text.vocabulary import Encoded

BLOCK_BYTES = 2**23
BLOCK_RECORDS = 16_384
_HARMONY_ROWS = 201_088
Progress = Callable[[str, int, int], None]
# Records, their lengths in tokens without EOS, and their rows.
Block = tuple[np.ndarray, np.ndarray, np.ndarray]


def silent(what: str, done: int, total: int) -> None:
    """No progress wanted."""


@dataclass(frozen=True, slots=True)
class TextTokenizer:
    """What embedding needs of a tokenizer; `fingerprint` is a digest of vocabulary and rules."""

    fingerprint: str
    encode: Callable[[Sequence[str]], Encoded]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of each text: uint32 `[length]` each."""
        encoded = self.encode(texts)
        return np.split(encoded.ids, encoded.offsets[1:-1]) if texts else []


def open_tokenizer(model_dir: Path, num_rows: int, name: str | None = None) -> TextTokenizer:
    """The tokenizer of a checkpoint: its `tokenizer.json`, or an encoding by name.

    A checkpoint with neither is taken for gpt-oss if its table has that vocabulary's size.

    `model_dir` may be the directory above its `original/`; `num_rows` is that of its table.

    Raises:
        TokenizerError: There is none (E-TOKENIZER-NAME), or it is broken (E-TOKENIZER-FILE).
    """
    path = model_dir / "tokenizer.json"
    if name is None and path.is_file():
        no_eos = 0  # texts are embedded without one
        return TextTokenizer(sha256_file(path), FileTokenizer(str(path), no_eos).encode_batch)
    if name is None and num_rows != _HARMONY_ROWS:
        raise TokenizerError(
            "the checkpoint has no tokenizer",
            where=model_dir,
            found=f"no tokenizer.json, {num_rows} rows of embeddings",
            do="put its tokenizer.json there, or name an encoding with --tokenizer",
            code="E-TOKENIZER-NAME",
        )
    tokenizer = load_tokenizer(name or DEFAULT_TOKENIZER)
    return TextTokenizer(tokenizer.fingerprint, tokenizer.encode_batch)


@dataclass(frozen=True, slots=True)
class RecordEmbeddings:
    """What was found or made for the records of an input."""

    tokens: np.ndarray  # length of each text in tokens, without EOS: int64 [N]
    rows: np.ndarray  # float32 [N, width]; width 0 where only tokens were asked for
    num_computed: int  # texts that were not in the cache


def embed_records(
    records: JsonlInput,
    table: EmbeddingTable | None,
    tokenizer: TextTokenizer,
    cache_root: Path,
    *,
    is_kept: bool = True,
    progress: Progress = silent,
) -> RecordEmbeddings:
    """Shallow embeddings and token counts of all records, in file order; without a table, counts.

    `cache_root` holds one cache for each model; with `is_kept` False its files stay as they are.
    """
    model = tokenizer.fingerprint
    if table is not None:
        model = sha256_json([table.backbone, table.method, tokenizer.fingerprint])
    directory = cache_root / model[:16]
    width = 0
    if table is not None:  # an existing cache knows it, so the table is read only if needed
        width = EmbeddingCache.width_of(directory) or table.rows.shape[1]
    cache = EmbeddingCache(directory, model, width, is_kept=is_kept)
    missing = missing_records(cache, records.keys)

    def compute() -> Iterator[Block]:
        sizes = np.diff(records.spans[missing], axis=1).ravel()
        for run in runs_within(sizes, BLOCK_BYTES, BLOCK_RECORDS):
            block = missing[run]
            texts = tokenizer.encode_batch(list(records.texts(block)))
            tokens = np.array([len(text) for text in texts], np.int64)
            empty = np.empty((len(texts), 0), np.float32)
            yield block, tokens, empty if table is None else pool(texts, table.rows)

    fill_cache(cache, records.keys, compute(), len(missing), progress)
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
    progress: Progress = silent,
) -> None:
    """Commit blocks of `total` records in all, one by one as they are made.

    `keys` are those of all records.

    Raises:
        LockedError: Another process fills this cache (E-LOCKED).
    """
    done = 0
    with cache.writer() if total else nullcontext():
        for records, tokens, rows in found:
            cache.append(keys[records], tokens, rows)
            done += len(records)
            progress("embedded", done, total)
