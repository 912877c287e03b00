"""Deep document embeddings: the mean of the model's last hidden state over a document's tokens.

The state after the final norm is averaged in fp32 over real tokens and L2-normalised. Documents go
longest with longest; a batch that does not fit into memory is split and the next ones are smaller;
several devices take documents, each with the whole model. Rows are kept in a cache by the digest of
text and model, so a run after a kill continues, and an edited document costs itself. Costs one
forward pass per token. A document that does not fit alone is an error after all others are kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from nmoe_core.base.atomic import write_json
from nmoe_core.base.errors import ConfigError, CurationError
from nmoe_core.base.fingerprint import sha256_json
from nmoe_core.compute.api import map_shards
from nmoe_core.config.tables import ComputeTable
from nmoe_core.curate.jsonl import deep_worker
from nmoe_core.curate.jsonl.embedding_cache import EmbeddingCache
from nmoe_core.curate.jsonl.input import JsonlInput, OnError, scan_jsonl
from nmoe_core.curate.jsonl.output import JsonlPaths, lock_outputs, write_array
from nmoe_core.curate.jsonl.record_embeddings import (
    Block,
    Progress,
    embed_records,
    fill_cache,
    missing_records,
    silent,
)
from nmoe_core.curate.topics.embedding_table import table_shape
from nmoe_core.curate.topics.model_tokenizer import TextTokenizer, open_tokenizer

METHOD = "deep-mean-l2/1"
COMMIT_ROWS = 512


@dataclass(frozen=True, slots=True)
class DeepSettings:
    """What decides the rows, and how they are made.

    `devices` None takes every GPU there is, else the CPU; `dtype` auto is bfloat16 on GPUs and
    float32 on CPUs.
    """

    text_field: str = "text"
    batch_size: int = 32
    batch_tokens: int = 16_384
    max_tokens: int | None = None
    limit: int | None = None
    is_reverse: bool = False
    devices: tuple[str, ...] | None = None
    dtype: str = "auto"
    tokenizer: str | None = None
    on_error: OnError = "fail"
    tensor_parallel: int = 1


def embed_deep(
    input_path: Path,
    output: Path,
    model_dir: Path,
    settings: DeepSettings,
    *,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Write `output`, float32 `[N, hidden]` in file order, and `{output}_meta.json`; return that.

    Raises:
        ConfigError: Tensor parallelism is asked for (E-CONFIG-TP).
        CurationError: The input cannot be used (E-CURATION-INPUT, E-CURATION-LINE); a document
            does not fit into memory alone (E-CURATION-MEMORY).
        CheckpointError, TokenizerError: The checkpoint's files or tokenizer cannot be used.
        LockedError: Another process is writing the same output (E-LOCKED).
    """
    if settings.tensor_parallel != 1:
        raise _no_tensor_parallel(settings.tensor_parallel)
    from nmoe_core.engine.weights.checkpoint import checkpoint_digest

    tokenizer = open_tokenizer(model_dir, table_shape(model_dir)[0], settings.tokenizer)
    records = scan_jsonl(input_path, settings.text_field, settings.on_error)
    devices = settings.devices or deep_worker.all_devices()
    dtype = settings.dtype
    if dtype == "auto":
        dtype = "bfloat16" if devices[0].startswith("cuda") else "float32"
    width, most_tokens = deep_worker.model_limits(model_dir)
    max_tokens = min(settings.max_tokens or most_tokens, most_tokens)
    model = sha256_json([METHOD, checkpoint_digest(model_dir), dtype, tokenizer.fingerprint])
    paths = JsonlPaths(input_path, output.with_suffix(""), model_dir)
    chosen = np.arange(min(settings.limit or len(records), len(records)))
    with lock_outputs(paths):
        counts = embed_records(records, None, tokenizer, paths.cache, progress=progress).tokens
        keys = _keys(records, counts, max_tokens)
        cache = EmbeddingCache(paths.cache / model[:16], model, width)
        todo = chosen[missing_records(cache, keys[chosen])]
        todo = todo[np.argsort(counts[todo], kind="stable")]
        todo = todo[::-1] if settings.is_reverse else todo
        work = _Work(records, tokenizer, counts, max_tokens, settings)
        too_long: list[int] = []
        found = _blocks(work, todo, too_long, devices, (str(model_dir), dtype))
        fill_cache(cache, keys, found, len(todo), progress=progress)
        if too_long:
            raise _out_of_memory(output, len(too_long), int(counts[too_long].min()))
        facts = {
            "input": str(input_path),
            "input_sha256": records.sha256,
            "output": str(output),
            "embedding_method": METHOD,
            "model": model,
            "num_records": len(chosen),
            "width": width,
            "max_tokens": max_tokens,
            "num_truncated": int((counts[chosen] > max_tokens).sum()),
            "embedded_now": len(todo),
            "devices": list(devices),
            "dtype": dtype,
        }
        write_array(output, cache.read(cache.find(keys[chosen])))
        write_json(paths.beside("_meta.json"), facts)
    return facts


@dataclass(frozen=True, slots=True)
class _Work:
    records: JsonlInput
    tokenizer: TextTokenizer
    counts: np.ndarray
    max_tokens: int
    settings: DeepSettings

    def batches(self, todo: np.ndarray) -> Iterator[np.ndarray]:
        """Runs of documents of at most `batch_size`, and `batch_tokens` when padded."""
        start = 0
        while start < len(todo):
            stop, longest = start, 0
            while stop < len(todo) and stop - start < self.settings.batch_size:
                longest = max(longest, min(int(self.counts[todo[stop]]), self.max_tokens))
                if stop > start and longest * (stop - start + 1) > self.settings.batch_tokens:
                    break
                stop += 1
            yield todo[start:stop]
            start = stop

    def tokens(self, batch: np.ndarray) -> list[np.ndarray]:
        """Token ids of a batch, cut to `max_tokens`."""
        encoded = self.tokenizer.encode_batch(list(self.records.texts(batch)))
        return [ids[: self.max_tokens].astype(np.int64) for ids in encoded]


def _blocks(
    work: _Work,
    todo: np.ndarray,
    too_long: list[int],
    devices: tuple[str, ...],
    model: tuple[str, str],
) -> Iterator[Block]:
    """Embedded documents in blocks; those that did not fit into memory alone join `too_long`."""
    batches = list(work.batches(todo))
    items = (work.tokens(batch) for batch in batches)
    results = map_shards(
        deep_worker.embed_batch,
        items,
        ComputeTable(workers=len(devices)),
        initializer=partial(deep_worker.open_embedder, *model, deep_worker.hand_out(devices)),
    )
    pending: list[tuple[np.ndarray, np.ndarray]] = []
    num_left = len(todo)
    for batch, found in zip(batches, results):
        pending.append((batch, found))
        num_left -= len(batch)
        if num_left and sum(len(one) for one, _ in pending) < COMMIT_ROWS:
            continue
        documents = np.concatenate([one for one, _ in pending])
        rows = np.concatenate([part for _, part in pending])
        has_fit = np.isfinite(rows).all(axis=1)
        too_long.extend(documents[~has_fit].tolist())
        yield documents[has_fit], work.counts[documents[has_fit]], rows[has_fit]
        pending.clear()


def _keys(records: JsonlInput, counts: np.ndarray, max_tokens: int) -> np.ndarray:
    """Digest of what is embedded: the text, and where it was cut."""
    keys = records.keys.copy()
    for document in np.flatnonzero(counts > max_tokens).tolist():
        text = bytes(keys[document]).ljust(32, b"\0")
        keys[document] = sha256(text + max_tokens.to_bytes(8, "little")).digest()
    return keys


def _no_tensor_parallel(degree: int) -> ConfigError:
    return ConfigError(
        "embedding splits documents over devices, not the model",
        found=f"--tp {degree}",
        expected="--devices cuda:0 cuda:1 ...",
        do=(
            "each device holds the whole model (MXFP4 experts stay packed) and takes documents of "
            "its own: no all-reduce per layer, and a row does not depend on their number"
        ),
        code="E-CONFIG-TP",
    )


def _out_of_memory(output: Path, num_documents: int, shortest: int) -> CurationError:
    return CurationError(
        "documents do not fit into memory alone; all others are kept",
        where=output,
        found=f"{num_documents} documents of at least {shortest} tokens",
        do=f"run again with --max-tokens {max(1, shortest // 2)}, or on a larger device",
        code="E-CURATION-MEMORY",
    )
