"""One forward pass over a paged cache: new tokens of several sequences, long prompts in pieces.

Each chunk adds `count` tokens to its sequence's `start` cached ones. Chunks of one token, which
are what decoding makes, are attended to all at once; longer ones one by one, with the attention
of whole documents, after what the cache holds. Indices are worked out once a pass, not once a
block. With `batch_invariant` every chunk takes the second way and products are filled up to the
shape that documents have, so that a token's bits depend on its sequence alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nmoe_core.engine.attention import attend, attend_cached
from nmoe_core.engine.generation.cache import PagedCache
from nmoe_core.engine.packing import MIN_ROWS
from nmoe_core.engine.transfers import on_device

Rows = slice | Tensor


@dataclass(frozen=True, slots=True)
class Chunk:
    """`count` tokens that follow the `start` cached ones of the sequence in `slot`."""

    slot: int
    start: int
    count: int

    @property
    def stop(self) -> int:
        """Positions cached after the pass."""
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class _Keys:
    """Where the keys of single queries lie: pages or slots to take, and which are seen."""

    taken: Rows
    mask: Tensor


class StepBatch:
    """Context of one pass.

    Args:
        cache: Has pages reserved for every chunk.
        chunks: Rows of the pass, in order; those of one token first.
        batch_invariant: Whether bits must not depend on the batch.
    """

    def __init__(
        self, cache: PagedCache, chunks: Sequence[Chunk], batch_invariant: bool = False
    ) -> None:
        self._cache = cache
        self._device = cache.keys[0].device
        self.min_rows = MIN_ROWS if batch_invariant else 1
        singles = [] if batch_invariant else [chunk for chunk in chunks if chunk.count == 1]
        self._num_singles = len(singles)
        self._longer = chunks[len(singles) :]
        ends = np.cumsum([chunk.count for chunk in chunks])[len(singles) :].tolist()
        self._longer_rows = [
            slice(end - chunk.count, end) for chunk, end in zip(self._longer, ends)
        ]
        positions = [np.arange(chunk.start, chunk.stop) for chunk in chunks]
        slots = np.repeat([chunk.slot for chunk in chunks], [chunk.count for chunk in chunks])
        flat = np.concatenate(positions)
        self.positions = self._tensor(flat)
        self._written = self._tensor(self._page_rows(slots, flat))
        ring_size = cache.ring_size
        is_kept = np.concatenate([p >= p[-1] + 1 - ring_size for p in positions])
        self._ring_sources = None if is_kept.all() else self._tensor(is_kept.nonzero()[0])
        ring_rows = slots * ring_size + flat % ring_size
        self._ring_written = self._tensor(ring_rows[is_kept])
        if singles:
            slots = np.asarray([chunk.slot for chunk in singles])
            self._find_keys(slots, np.asarray([chunk.stop for chunk in singles]))
        self._history = [self._page_history(chunk) for chunk in self._longer]
        self._ring_history = [self._ring_history_of(chunk) for chunk in self._longer]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        """As `attention.Context.attend`; also writes the rows' keys and values."""
        cache, window = self._cache, self._cache.windows[layer]
        keys, values = cache.keys[layer], cache.values[layer]
        key_rows, value_rows = keys.flatten(0, 1), values.flatten(0, 1)
        seen = self._seen(key_rows, k, window), self._seen(value_rows, v, window)
        self._write(key_rows, k, window)
        self._write(value_rows, v, window)
        if not self._longer:
            return self._attend_singles(keys, values, q, sinks, window)
        mixed = torch.empty_like(q)
        if self._num_singles:
            single = slice(0, self._num_singles)
            mixed[single] = self._attend_singles(keys, values, q[single], sinks, window)
        for chunk, rows, chunk_k, chunk_v in zip(self._longer, self._longer_rows, *seen):
            queries = q[rows].unflatten(1, (k.shape[1], -1)).permute(1, 2, 0, 3)[None]
            result = attend(queries, chunk_k, chunk_v, sinks, window, chunk.start)
            mixed[rows] = result[0].permute(2, 0, 1, 3).flatten(1, 2)
        return mixed

    def _find_keys(self, slots: np.ndarray, lengths: np.ndarray) -> None:
        """Note where the keys of the chunks of one token lie, `lengths` of them each."""
        self._all_keys = self._page_keys(slots, lengths)
        self._ring_keys = self._ring_keys_of(slots, lengths)

    def _seen(self, cached: Tensor, new: Tensor, window: int | None) -> list[Tensor]:
        """[1, kv_heads, S, head_dim] of each longer chunk: what it sees of the cache, and its own.

        Copies, made before the write: a ring's new rows take the place of old ones still seen.
        """
        history = self._history if window is None else self._ring_history
        return [
            torch.cat([cached[past], new[rows]]).transpose(0, 1)[None]
            for past, rows in zip(history, self._longer_rows)
        ]

    def _write(self, rows: Tensor, new: Tensor, window: int | None) -> None:
        if window is None:
            rows.index_copy_(0, self._written, new)
        else:
            new = new if self._ring_sources is None else new[self._ring_sources]
            rows.index_copy_(0, self._ring_written, new)

    def _attend_singles(
        self, keys: Tensor, values: Tensor, q: Tensor, sinks: Tensor, window: int | None
    ) -> Tensor:
        where = self._all_keys if window is None else self._ring_keys
        if window is not None:
            keys = keys.unflatten(0, (-1, self._cache.ring_pages))
            values = values.unflatten(0, (-1, self._cache.ring_pages))
        shape = (len(q), -1, *keys.shape[-2:])
        k, v = keys[where.taken].view(shape), values[where.taken].view(shape)
        return attend_cached(q, k, v, sinks, where.mask)

    def _page_rows(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        size = self._cache.page_size
        return self._cache.tables[slots, positions // size].astype(np.int64) * size + (
            positions % size
        )

    def _page_keys(self, slots: np.ndarray, lengths: np.ndarray) -> _Keys:
        num_pages = self._cache.pages_for(int(lengths.max()))
        pages = self._cache.tables[slots, :num_pages]
        is_seen = np.arange(num_pages * self._cache.page_size) < lengths[:, None]
        return _Keys(self._rows(pages.astype(np.int64)), self._mask(is_seen))

    def _ring_keys_of(self, slots: np.ndarray, lengths: np.ndarray) -> _Keys:
        size = self._cache.ring_size
        age = (lengths[:, None] - 1 - np.arange(size)) % size
        is_seen = age < np.minimum(lengths, self._cache.window)[:, None]
        return _Keys(self._rows(slots), self._mask(is_seen))

    def _page_history(self, chunk: Chunk) -> Rows:
        return self._rows(self._page_rows(np.asarray(chunk.slot), np.arange(chunk.start)))

    def _ring_history_of(self, chunk: Chunk) -> Rows:
        size = self._cache.ring_size
        first = max(0, chunk.start - self._cache.window + 1)
        return self._rows(chunk.slot * size + np.arange(first, chunk.start) % size)

    def _rows(self, index: np.ndarray) -> Rows:
        """The index as a slice, which copies nothing, where its numbers follow one another."""
        flat = index.ravel()
        if len(flat) == 0:
            return slice(0, 0)
        in_one_piece = len(index) == 1 or index.ndim == 1
        if in_one_piece and bool((np.diff(flat) == 1).all()):
            return slice(int(flat[0]), int(flat[-1]) + 1)
        return self._tensor(index)

    def _mask(self, is_seen: np.ndarray) -> Tensor:
        mask = np.where(is_seen, np.float32(0), np.float32(-np.inf))
        return self._tensor(mask)[:, None, None]

    def _tensor(self, values: np.ndarray) -> Tensor:
        return on_device(values, self._device)
