"""Deep document embeddings: the mean of the model's last hidden state over a document's tokens.

The state after the final norm is averaged in fp32 over real tokens and L2-normalised. A batch that
does not fit into memory is split, and later batches are smaller. Each of several devices holds the
whole model and embeds a part of the documents. Rows are cached by the digest of text and model, so
a run resumes after a kill. If a single document does not fit into memory, an error is raised after
all other documents are cached.
"""

import multiprocessing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from loader.rows.children import safe_children
from nmoe_core.base.atomic import write_json
from nmoe_core.base.compute.api import map_shards
from nmoe_core.base.compute.tables import ComputeTable
from nmoe_core.base.errors import ConfigError, CurationError
from nmoe_core.base.fingerprint import sha256_json
from nmoe_core.curate.jsonl.record_embeddings import (
    Block,
    embed_records,
    fill_cache,
    open_tokenizer,
)
from nmoe_core.curate.jsonl.record_files import (
    JsonlInput,
    JsonlPaths,
    OnError,
    lock_outputs,
    scan_jsonl,
    write_array,
)
from nmoe_core.curate.topics.embed import table_shape
from nmoe_core.quality.embedding_cache import EmbeddingCache

METHOD = "deep-mean-l2/1"
COMMIT_ROWS = 512
# The limit of tokens per pass is multiplied by SHRINK after a batch that did not fit into memory,
# and by GROW after a batch that fitted.
SHRINK = 0.6
GROW = 1.1


@dataclass(frozen=True, slots=True)
class DeepSettings:
    """Settings of the embeddings and of their computation, named as the command's flags."""

    text_field: str = "text"
    batch_size: int = 32
    batch_tokens: int = 16_384
    max_tokens: int | None = None
    limit: int | None = None
    is_reverse: bool = False
    devices: tuple[str, ...] | None = None  # None: all GPUs, or the CPU without a GPU
    dtype: str = "auto"  # bfloat16 on GPUs and float32 on CPUs
    tokenizer: str | None = None
    on_error: OnError = "fail"
    tensor_parallel: int = 1


def embed_deep(
    input_path: Path, output: Path, model_dir: Path, settings: DeepSettings
) -> dict[str, Any]:
    """Write `output`, float32 `[N, hidden]` in file order, and `{output}_meta.json`; return the
    metadata.

    Raises:
        ConfigError: Tensor parallelism is requested (E-CONFIG-TP).
        CurationError: The input cannot be used (E-CURATION-INPUT, E-CURATION-LINE), or a document
            does not fit into the device's memory even alone (E-CURATION-MEMORY).
        CheckpointError, TokenizerError: The checkpoint's files or tokenizer cannot be used.
        LockedError: Another process is writing the same output (E-LOCKED).
    """
    import torch

    from nmoe_core.engine.weights.checkpoint import open_checkpoint
    from nmoe_core.engine.weights.weight_files import checkpoint_digest
    from nmoe_core.quality.heads.features import padded_batches

    _refuse_tensor_parallel(settings.tensor_parallel)
    tokenizer = open_tokenizer(model_dir, table_shape(model_dir)[0], settings.tokenizer)
    records = scan_jsonl(input_path, settings.text_field, settings.on_error)
    gpus = tuple(f"cuda:{i}" for i in range(torch.cuda.device_count()))
    devices = settings.devices or gpus or ("cpu",)
    dtype = settings.dtype
    if dtype == "auto":
        dtype = "bfloat16" if devices[0].startswith("cuda") else "float32"
    with open_checkpoint(model_dir) as checkpoint:  # reads headers, no weights
        config = checkpoint.config
    most_tokens = config.max_position_embeddings
    width = config.hidden_size
    max_tokens = min(settings.max_tokens or most_tokens, most_tokens)
    model = sha256_json([METHOD, checkpoint_digest(model_dir), dtype, tokenizer.fingerprint])
    paths = JsonlPaths(input_path, output.with_suffix(""), model_dir)
    chosen = np.arange(min(settings.limit or len(records), len(records)))
    with lock_outputs(paths):
        counts = embed_records(records, None, tokenizer, paths.cache).tokens
        keys = _keys(records, counts, max_tokens)
        cache = EmbeddingCache(paths.cache / model[:16], model, width)
        todo = chosen[cache.missing(keys[chosen])]
        todo = todo[np.argsort(counts[todo], kind="stable")]
        todo = todo[::-1] if settings.is_reverse else todo
        lengths = np.minimum(counts, max_tokens)[todo]
        sizes = settings.batch_size, settings.batch_tokens
        batches = [todo[one] for one in padded_batches(lengths, *sizes)]

        def tokens(batch: np.ndarray) -> list[np.ndarray]:
            encoded = tokenizer.rows(list(records.texts(batch)))
            return [ids[:max_tokens].astype(np.int64) for ids in encoded]

        with safe_children():
            free_devices = multiprocessing.get_context("spawn").SimpleQueue()
        for device in devices:
            free_devices.put(device)
        results = map_shards(
            DeepEmbedder.__call__,
            map(tokens, batches),
            ComputeTable(workers=len(devices)),
            initializer=partial(open_embedder, str(model_dir), dtype, free_devices),
        )
        too_long: list[int] = []
        found = _blocks(zip(batches, results), len(todo), counts, too_long)
        fill_cache(cache, keys, found, len(todo))
        if too_long:
            shortest = int(counts[too_long].min())
            raise CurationError(
                "some documents are too long for the device; the other embeddings are cached",
                where=output,
                found=f"{len(too_long)} documents of at least {shortest} tokens",
                do=f"run again with --max-tokens {max(1, shortest // 2)}, or on a larger device",
                code="E-CURATION-MEMORY",
            )
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
            "devices": list(devices),
            "dtype": dtype,
        }
        write_array(output, cache.read(cache.find(keys[chosen])))
        write_json(paths.beside("_meta.json"), facts)
    return facts | {"embedded_now": len(todo)}  # not in the file: it differs from run to run


def _blocks(
    results: Iterable[tuple[np.ndarray, np.ndarray]],
    num_left: int,
    counts: np.ndarray,
    too_long: list[int],
) -> Iterator[Block]:
    """Yield embedded documents in blocks; documents that do not fit into memory even alone are
    added to `too_long`."""
    pending: list[tuple[np.ndarray, np.ndarray]] = []
    for batch, found in results:
        pending.append((batch, found))
        num_left -= len(batch)
        if num_left and sum(len(one) for one, _ in pending) < COMMIT_ROWS:
            continue
        documents, rows = (np.concatenate(parts) for parts in zip(*pending))
        has_fit = np.isfinite(rows).all(axis=1)
        too_long.extend(documents[~has_fit].tolist())
        yield documents[has_fit], counts[documents[has_fit]], rows[has_fit]
        pending.clear()


def _keys(records: JsonlInput, counts: np.ndarray, max_tokens: int) -> np.ndarray:
    """Digest of the embedded part of each record: its text and the length to which it is cut."""
    keys = records.keys.copy()
    for document in np.flatnonzero(counts > max_tokens).tolist():
        text = bytes(keys[document]).ljust(32, b"\0")
        keys[document] = sha256(text + max_tokens.to_bytes(8, "little")).digest()
    return keys


def _refuse_tensor_parallel(degree: int) -> None:
    if degree != 1:
        raise ConfigError(
            "embedding splits documents over devices, not the model",
            found=f"--tp {degree}",
            expected="--devices cuda:0 cuda:1 ...",
            do=(
                "remove --tp: each device holds the whole model (MXFP4 experts stay packed) and "
                "embeds different documents, so rows do not depend on the number of devices"
            ),
            code="E-CONFIG-TP",
        )


class DeepEmbedder:
    """A model on one device, and the number of tokens per pass that fit into its memory, learned
    from failures.

    Args:
        model: A model of `nmoe_core.engine`. Its forward pass returns the residual stream after the
            last block; its attribute `norm` is the final norm.
        device: Device of the model.
    """

    def __init__(self, model: Any, device: str) -> None:
        self._model = model
        self._device = device
        self._most_tokens = float("inf")  # padding included

    def __call__(self, texts: list[np.ndarray]) -> np.ndarray:
        """Embed documents: float32 `[N, hidden]`, rows of length 1; zero for an empty document, NaN
        for a document that is too long."""
        rows = np.zeros((len(texts), self._model.config.hidden_size), np.float32)
        waiting = [[i for i, text in enumerate(texts) if len(text)]]
        while waiting:
            part = waiting.pop()
            if not part:
                continue
            size = len(part) * max(len(texts[i]) for i in part)
            halves = part[len(part) // 2 :], part[: len(part) // 2]
            if len(part) > 1 and size > self._most_tokens:
                waiting += halves
                continue
            try:
                rows[part] = self._forward([texts[i] for i in part])
            except MemoryError:
                self._most_tokens = min(self._most_tokens, size) * SHRINK
                if len(part) == 1:
                    rows[part] = np.nan
                else:
                    waiting += halves
            else:
                self._most_tokens *= GROW
        return rows

    def _forward(self, texts: list[np.ndarray]) -> np.ndarray:
        """Normalised mean states from one pass; raises MemoryError if the texts do not fit into
        memory."""
        import torch

        lengths = torch.tensor([len(text) for text in texts])
        ids = torch.zeros(len(texts), int(lengths.max()), dtype=torch.int64)
        for row, text in zip(ids, texts):
            row[: len(text)] = torch.from_numpy(text)
        try:
            with torch.inference_mode():
                last = self._model.config.num_hidden_layers
                ids = ids.to(self._device)
                lengths = lengths.to(self._device)
                _, states = self._model(
                    ids, lengths=lengths, return_hidden_states=(last,), no_logits=True
                )
                # Padding is zero before and after the norm, so it adds nothing to the sum.
                total = self._model.norm(states[last]).float().sum(dim=1)
                mean = total / lengths[:, None]
                return torch.nn.functional.normalize(mean, dim=1).cpu().numpy()
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            raise MemoryError from None


def open_embedder(model_dir: str, dtype: str, devices: Any) -> DeepEmbedder:
    """Load the model onto a device that no other process of this run uses; once per process."""
    import torch

    from nmoe_core.engine import Transformer

    device = devices.get()
    model = Transformer.from_checkpoint(Path(model_dir), device=device, dtype=getattr(torch, dtype))
    return DeepEmbedder(model, device)
