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
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from nmoe_core.base.compute.api import HERE, map_shards
from nmoe_core.base.compute.tables import ComputeTable
from nmoe_core.base.errors import CurationError, LockedError
from nmoe_core.base.fingerprint import sha256_json
from nmoe_core.base.progress import LOGGER, Meter
from nmoe_core.engine import Transformer
from nmoe_core.quality.embedding_cache import EmbeddingCache
from nmoe_core.quality.heads.features import (
    Batch,
    arithmetic,
    collate,
    device_of,
    finite_states,
    padded_batches,
    pooled,
    small_batches,
    small_slices,
)
from nmoe_core.quality.heads.scores import DocumentTokens, require_few_failed

STATES_CODE = "states/1"
PART_TOKENS = 2**15
_HALF_BYTES = 2
_WAIT_S = 1.0
_NOT_FINITE = "backbone states are not finite"
_log = logging.getLogger(LOGGER)


class Workers(NamedTuple):
    """The processes that compute states, and how each of them loads the backbone."""

    compute: ComputeTable
    load: Callable[[], Transformer]


class KeptStates:
    """The states of documents by one backbone.

    Args:
        model: The backbone.
        directory: Directory of the states of all backbones. If it would get larger than
            `max_bytes`, states of other backbones, blocks or settings are deleted.
        max_bytes: Maximum bytes of the directory.
        blocks: The blocks whose pooled states are kept.
        tap: The block whose states of all tokens are kept; None for no such block.
        workers: Processes that compute missing states; None for this process. The batches and their
            order are the same, and so are the bytes of the directory.
    """

    def __init__(
        self,
        model: Transformer,
        directory: Path,
        max_bytes: int,
        blocks: Sequence[int],
        tap: int | None = None,
        workers: Workers | None = None,
    ) -> None:
        self.model = model
        self._workers = workers
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

    def compute(self, documents: DocumentTokens) -> None:
        """Compute and keep the states of these documents that are missing."""
        keys = _keys(documents)
        if len(self._pooled.missing(keys)) or len(self._fitting(documents, keys)):
            self._compute(documents, keys)

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

    def find(self, documents: DocumentTokens, blocks: Sequence[int]) -> np.ndarray:
        """Mean states on disk of each document after these blocks, float32 `[N, blocks * H]`; NaN
        for a document without any, or without finite ones. Nothing is computed."""
        width = self.model.config.hidden_size
        found = np.full((len(documents), len(blocks), width), np.nan, np.float32)
        places = self._pooled.find(_keys(documents))
        rows = np.flatnonzero(places >= 0)
        try:
            stored = self._pooled.read(places[rows]).reshape(len(rows), len(self.blocks), width)
            found[rows] = stored[:, [self.blocks.index(block) for block in blocks]]
        except (OSError, ValueError):  # deleted meanwhile
            pass
        return found.reshape(len(documents), -1)

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
            device = device_of(self.model)
            parts = []
            for some in padded_batches(lengths[todo], len(todo), PART_TOKENS):
                rows = todo[some]
                parts.append([rows[batch] for batch in small_slices(lengths[rows], device)])
            meter = Meter("states of the backbone", len(todo))
            every = (_at(documents, rows) for part in parts for rows in part)
            with closing(self._states(every)) as states:
                for part in parts:
                    self._compute_part(documents, keys, part, (is_pooled, is_kept), states, meter)

    def _states(self, batches: Iterator[DocumentTokens]) -> Generator[_States]:
        """The states of batches, in order."""
        work = partial(_states_of, self.blocks, self.tap)
        if self._workers is None:
            yield from map_shards(work, batches, HERE, initializer=lambda: self.model)
            return
        compute, load = self._workers
        load = partial(_alone, load)
        for states in map_shards(work, batches, compute, initializer=load):
            self.model.tokens_processed += states.num_tokens
            yield states

    def _compute_part(
        self,
        documents: DocumentTokens,
        keys: np.ndarray,
        part: Sequence[np.ndarray],
        wanted: tuple[np.ndarray, np.ndarray],
        states: Iterator[_States],
        meter: Meter,
    ) -> None:
        """Commit the states of the documents of a part, which has the rows of its batches; `wanted`
        says for each document whether its pooled states and its tokens' states are kept."""
        means = []
        halves: list[np.ndarray] = []
        for rows, found in zip(part, states):
            means.append(found.means)
            halves += found.halves
            meter.add(len(rows))
        is_pooled, is_kept = wanted
        rows = np.concatenate(part)
        lengths = np.array([len(documents.tokens[i]) for i in rows.tolist()])
        own = is_pooled[rows]
        if own.any():
            self._pooled.append(keys[rows[own]], lengths[own], np.concatenate(means)[own])
        own = np.flatnonzero(is_kept[rows]).tolist()
        if own and self._tokens is not None:
            sizes = np.array([len(halves[i]) for i in own])
            self._tokens.append(keys[rows[own]], sizes, np.concatenate([halves[i] for i in own]))

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


class _States(NamedTuple):
    """States of the documents of a batch: the pooled ones `[B, blocks * H]`, NaN for a document
    that failed; with a tap, of each document those of its tokens, float16 `[T, H]`, none if it
    failed; and the number of tokens that ran."""

    means: np.ndarray
    halves: list[np.ndarray]
    num_tokens: int


def _states_of(
    blocks: Sequence[int], tap: int | None, model: Transformer, documents: DocumentTokens
) -> _States:
    """The states of one batch; a worker calls this."""
    taps = {*blocks} if tap is None else {*blocks, tap}
    width = model.config.hidden_size
    batch = collate(documents, [*range(len(documents))], device_of(model))
    states, good = finite_states(model, batch, sorted(taps), {})
    means = np.full((len(documents), len(blocks) * width), np.nan, np.float32)
    found = [pooled(states[block], good.lengths).cpu() for block in blocks]
    means[good.rows] = torch.cat(found, dim=1)
    halves = []
    if tap is not None:
        halves = [np.empty((0, width), np.float16)] * len(documents)
        for row, half in _halves(states[tap], good):
            halves[row] = half
    return _States(means, halves, sum(map(len, documents.tokens)))


def _alone(load: Callable[[], Transformer]) -> Transformer:
    """The backbone in a worker, which has one thread as the process that trains."""
    torch.set_num_threads(1)
    return load()


def _at(documents: DocumentTokens, rows: np.ndarray) -> DocumentTokens:
    """The documents at these rows."""
    places: list[int] = rows.tolist()
    names = [documents.names[i] for i in places]
    return DocumentTokens(names, [documents.tokens[i] for i in places])


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
