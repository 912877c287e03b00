"""States of labelled documents, kept on disk by the tokens of the document and the backbone.

One pass of the backbone gives the pooled states of several blocks, which the probe reads, and the
states of all tokens after one block, which the judge trains on. Both lie in an `EmbeddingCache`.
They are committed every `PART_TOKENS` tokens, so a killed pass loses only the last of them. New
labels need states of new documents only. States of tokens are kept normalised, in half precision.
They need 2 bytes per token and dimension (0.1 GiB per 100,000 tokens at 576 dimensions). Documents
whose states do not fit on the disk are computed again on each use, but only these.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from nmoe_core.base.errors import CurationError, LockedError
from nmoe_core.base.fingerprint import sha256_json
from nmoe_core.base.progress import LOGGER, Meter
from nmoe_core.engine import Transformer
from nmoe_core.quality.embedding_cache import EmbeddingCache
from nmoe_core.quality.heads.features import (
    Batch,
    arithmetic,
    device_of,
    finite_states,
    padded_batches,
    pooled,
    small_batches,
)
from nmoe_core.quality.heads.scores import DocumentTokens, require_few_failed

STATES_CODE = "states/1"
PART_TOKENS = 2**15
_HALF_BYTES = 2
_WAIT_S = 1.0
_NOT_FINITE = "backbone states are not finite"
_log = logging.getLogger(LOGGER)


class KeptStates:
    """The states of documents by one backbone.

    Args:
        model: The backbone.
        directory: Directory of the states of all backbones. If it would get larger than
            `max_bytes`, states of other backbones, blocks or settings are deleted.
        max_bytes: Maximum bytes of the directory.
        blocks: The blocks whose pooled states are kept.
        tap: The block whose states of all tokens are kept; None for no such block.
    """

    def __init__(
        self,
        model: Transformer,
        directory: Path,
        max_bytes: int,
        blocks: Sequence[int],
        tap: int | None = None,
    ) -> None:
        self.model = model
        self.blocks = tuple(blocks)
        self.tap = tap
        self._directory = directory
        self._max_bytes = max_bytes
        made_with = [STATES_CODE, model.digest, arithmetic(model)]
        width = model.config.hidden_size
        self._pooled = _opened(
            directory, "pooled", [*made_with, *blocks], width * len(blocks), per_token=False
        )
        self._tokens = None
        if tap is not None:
            self._tokens = _opened(directory, "tokens", [*made_with, tap], width, per_token=True)

    def pooled(self, documents: DocumentTokens) -> np.ndarray:
        """Mean states of each document after each block: float32 `[N, blocks, H]`, NaN for a
        document whose states are not finite. Raises HeadError if more than a few documents have
        such states (E-HEAD-NONFINITE)."""
        keys = _keys(documents)
        if len(self._pooled.missing(keys)):
            self._compute(documents, keys)
        rows = self._pooled.read(self._pooled.find(keys))
        bad: list[int] = np.flatnonzero(~np.isfinite(rows).all(axis=1)).tolist()
        require_few_failed({documents.names[i]: _NOT_FINITE for i in bad}, len(documents))
        return rows.reshape(len(documents), len(self.blocks), -1)

    def copy(self, other: KeptStates, documents: DocumentTokens) -> None:
        """Copy the pooled states that another store of the same backbone has of all blocks."""
        with _sole_writer(self._pooled):
            keys = _keys(documents)
            rows = self._pooled.missing(keys)
            places = other._pooled.find(keys[rows])
            rows = rows[places >= 0]
            places = places[places >= 0]
            if len(rows):
                found = other._pooled.read(places).reshape(len(rows), len(other.blocks), -1)
                found = found[:, [other.blocks.index(block) for block in self.blocks]]
                lengths = other._pooled.tokens(places)
                self._pooled.append(keys[rows], lengths, found.reshape(len(rows), -1))

    def tokens(self, documents: DocumentTokens) -> TokenStates:
        """The states of all tokens of documents after the block `tap`; raises as `pooled`."""
        assert self._tokens is not None
        assert self.tap is not None
        keys = _keys(documents)
        if len(self._fitting(documents, keys)):
            self._compute(documents, keys)
        return TokenStates(self.model, documents, self.tap, self._tokens)

    def _compute(self, documents: DocumentTokens, keys: np.ndarray) -> None:
        with ExitStack() as stack:
            for cache in (self._pooled, self._tokens):
                if cache is not None:
                    stack.enter_context(_sole_writer(cache))
            self._make_room(documents, keys)
            is_pooled = np.zeros(len(documents), np.bool_)
            is_pooled[self._pooled.missing(keys)] = True
            is_kept = np.zeros(len(documents), np.bool_)
            is_kept[self._fitting(documents, keys)] = True
            lengths = np.array([len(tokens) for tokens in documents.tokens])
            todo = np.flatnonzero(is_pooled | is_kept)
            todo = todo[np.argsort(lengths[todo], kind="stable")]
            meter = Meter("states of the backbone", len(todo))
            for part in padded_batches(lengths[todo], len(todo), PART_TOKENS):
                self._compute_part(documents, keys, todo[part], (is_pooled, is_kept), meter)

    def _compute_part(
        self,
        documents: DocumentTokens,
        keys: np.ndarray,
        rows: np.ndarray,
        wanted: tuple[np.ndarray, np.ndarray],
        meter: Meter,
    ) -> None:
        """Compute and commit the states of the documents at `rows`; `wanted` says for each document
        whether its pooled states and its tokens' states are kept."""
        taps = {*self.blocks} if self.tap is None else {*self.blocks, self.tap}
        width = self.model.config.hidden_size
        means = np.full((len(documents), len(self.blocks) * width), np.nan, np.float32)
        kept: dict[int, np.ndarray] = {}
        for batch in small_batches(documents, device_of(self.model), rows.tolist()):
            states, good = finite_states(self.model, batch, sorted(taps), {})
            found = [pooled(states[block], good.lengths).cpu() for block in self.blocks]
            means[good.rows] = torch.cat(found, dim=1)
            if self.tap is not None:
                kept |= dict(_halves(states[self.tap], good))
            meter.add(len(batch.rows))
        is_pooled, is_kept = wanted
        lengths = np.array([len(tokens) for tokens in documents.tokens])
        own = rows[is_pooled[rows]]
        if len(own):
            self._pooled.append(keys[own], lengths[own], means[own])
        own = rows[is_kept[rows]]
        if len(own) and self._tokens is not None:
            empty = np.empty((0, width), np.float16)  # marks a document that failed
            halves = [kept.get(i, empty) for i in own.tolist()]
            sizes = np.array([len(half) for half in halves])
            self._tokens.append(keys[own], sizes, np.concatenate(halves))

    def _fitting(self, documents: DocumentTokens, keys: np.ndarray) -> np.ndarray:
        """The documents without states of their tokens, as many of the first as fit on the disk."""
        if self._tokens is None:
            return np.empty(0, np.int64)
        rows = self._tokens.missing(keys)
        sizes = np.array([len(documents.tokens[i]) for i in rows.tolist()], np.int64)
        sizes = sizes * _HALF_BYTES * self.model.config.hidden_size
        pooled_bytes = 4 * self._pooled.width * len(self._pooled.missing(keys))
        free = self._max_bytes - pooled_bytes - self._pooled.num_bytes - self._tokens.num_bytes
        return rows[np.cumsum(sizes) <= free]

    def _make_room(self, documents: DocumentTokens, keys: np.ndarray) -> None:
        """Delete states of other backbones or blocks if the directory would get too large."""
        ours = {cache.directory for cache in (self._pooled, self._tokens) if cache is not None}
        sizes = [path.stat().st_size for path in self._directory.rglob("*") if path.is_file()]
        wanted = sum(len(documents.tokens[i]) for i in self._fitting(documents, keys).tolist())
        wanted = wanted * _HALF_BYTES * self.model.config.hidden_size
        wanted += 4 * self._pooled.width * len(self._pooled.missing(keys))
        if sum(sizes) + wanted > self._max_bytes:
            for path in self._directory.iterdir():
                if path.is_dir() and path not in ours:
                    shutil.rmtree(path, ignore_errors=True)


class TokenStates:
    """The normalised states of all tokens after one block, for any rows of some documents.

    `lengths` counts the tokens of each document, `num_kept` the documents whose states are on disk.
    `failed` maps the id of each excluded document to the reason.
    """

    def __init__(
        self, model: Transformer, documents: DocumentTokens, tap: int, cache: EmbeddingCache
    ) -> None:
        self._model = model
        self._documents = documents
        self._tap = tap
        self._cache = cache
        self._places = cache.find(_keys(documents))
        self.lengths = [len(tokens) for tokens in documents.tokens]
        self.num_kept = int((self._places >= 0).sum())
        kept = np.flatnonzero(self._places >= 0)
        bad: list[int] = kept[cache.tokens(self._places[kept]) == 0].tolist()
        names = [documents.names[i] for i in bad]
        self.failed = dict.fromkeys(names, _NOT_FINITE)
        require_few_failed(self.failed, len(documents))

    def of(self, rows: list[int]) -> tuple[Tensor, Tensor, list[int]]:
        """States `[B, T, H]` padded with zeros, lengths `[B]`, and their rows. Raises HeadError if
        more than a few documents so far have states that are not finite (E-HEAD-NONFINITE)."""
        device = device_of(self._model)
        kept = [i for i in rows if self._places[i] >= 0]
        read = self._cache.read(self._places[kept])
        ends = np.cumsum(self._cache.tokens(self._places[kept]))
        found = dict(zip(kept, np.split(read, ends[:-1])))
        others = [i for i in rows if self._places[i] < 0]
        for batch in small_batches(self._documents, device, others):
            failed: dict[int, str] = {}
            states, good = finite_states(self._model, batch, (self._tap,), failed)
            found |= dict(_halves(states[self._tap], good))
            self.failed |= {self._documents.names[i]: reason for i, reason in failed.items()}
            require_few_failed(self.failed, len(self._documents))
        rows = [i for i in rows if len(found.get(i, ()))]
        lengths = torch.tensor([self.lengths[i] for i in rows], device=device)
        if not rows:
            return torch.empty(0, 1, self._model.config.hidden_size), lengths, rows
        padded = pad_sequence([torch.from_numpy(found[i]) for i in rows], batch_first=True)
        return padded.to(device).float(), lengths, rows


def _halves(hidden: Tensor, batch: Batch) -> Iterator[tuple[int, np.ndarray]]:
    """The row of each document of a batch, and its normalised states, float16 `[T, H]`."""
    normalised = F.layer_norm(hidden.float(), hidden.shape[-1:]).half().cpu().numpy()
    for row, states, length in zip(batch.rows, normalised, batch.lengths.tolist()):
        yield row, states[:length]


def _keys(documents: DocumentTokens) -> np.ndarray:
    found = [hashlib.sha256(np.asarray(one, "<u4").tobytes()) for one in documents.tokens]
    return np.array([digest.digest() for digest in found], "S32")


def _opened(
    directory: Path, kind: str, made_with: list[object], width: int, *, per_token: bool
) -> EmbeddingCache:
    """The store of these states; a damaged store is deleted."""
    model = sha256_json(made_with)
    path = directory / f"{kind}-{model[:16]}"
    try:
        return EmbeddingCache(path, model, width, per_token=per_token)
    except (CurationError, OSError, ValueError, KeyError):
        shutil.rmtree(path, ignore_errors=True)
        return EmbeddingCache(path, model, width, per_token=per_token)


@contextmanager
def _sole_writer(cache: EmbeddingCache) -> Iterator[None]:
    """Hold the store for writing, after another process that computes states has ended."""
    with ExitStack() as stack:
        is_told = False
        while True:
            try:
                stack.enter_context(cache.writer())
                break
            except LockedError:
                if not is_told:
                    _log.info("another process computes states; waiting for it")
                is_told = True
                time.sleep(_WAIT_S)
        yield
