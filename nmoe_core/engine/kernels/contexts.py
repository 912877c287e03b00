"""What a pass's rows are, for kernels: whole documents, or new tokens over a paged cache.

The plain contexts work out positions, pages and rings; these hand them to the kernels. A pass of
single tokens, which decoding makes, writes keys and values straight into their pages; longer
chunks keep a contiguous copy beside it, which they attend to after what the cache holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from nmoe_core.engine.attention import PackedDocuments
from nmoe_core.engine.generation.cache import PagedCache
from nmoe_core.engine.generation.step import Chunk, StepBatch
from nmoe_core.engine.kernels.decode_attention import decode_attention
from nmoe_core.engine.kernels.prefill_attention import prefill_attention, query_blocks
from nmoe_core.engine.kernels.rope_cache import rotate_and_store
from nmoe_core.engine.packing import Packing
from nmoe_core.engine.transfers import on_device
from nmoe_core.engine.weights.config import ModelConfig


class KernelContext(Protocol):
    """What a kernel block needs of a context.

    `batch_invariant`: whether the experts take one tile shape for every batch.
    """

    batch_invariant: bool

    def attend_rows(self, layer: int, qkv: Tensor, rotation: Tensor, sinks: Tensor) -> Tensor:
        """Mixed values [N, heads, head_dim] of a block's fused projection [N, q + k + v].

        rotation: complex64 [N, head_dim / 2], of the rows' positions.
        """
        ...


class KernelDocuments(PackedDocuments):
    """Whole documents, each attending to itself."""

    batch_invariant = False

    def __init__(self, config: ModelConfig, packing: Packing) -> None:
        super().__init__(config, packing)
        self._shape = config.num_key_value_heads, config.head_dim
        rows = torch.arange(packing.num_tokens + 1, device=self.positions.device)
        is_first = torch.cat([self.positions == 0, self.positions.new_ones(1, dtype=torch.bool)])
        self._rows = rows[:-1]
        self._blocks = query_blocks(rows[is_first].int(), packing.num_tokens)

    def attend_rows(self, layer: int, qkv: Tensor, rotation: Tensor, sinks: Tensor) -> Tensor:
        """As `KernelContext.attend_rows`."""
        q, k, v = _rotated(qkv, rotation, self._rows, self._shape)
        return prefill_attention(q, k, v, sinks, self._blocks, self._windows[layer])


def _rotated(
    qkv: Tensor, rotation: Tensor, rows: Tensor, shape: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [N, heads of each, head_dim], queries and keys rotated."""
    k, v = (qkv.new_empty(len(qkv), 1, *shape) for _ in range(2))
    q = rotate_and_store(qkv, rotation, rows, rows, k, v)
    return q, k.squeeze(1), v.squeeze(1)


class KernelStep(StepBatch):
    """New tokens of sequences that a cache keeps."""

    def __init__(
        self, cache: PagedCache, chunks: Sequence[Chunk], batch_invariant: bool = False
    ) -> None:
        super().__init__(cache, chunks, batch_invariant)
        self.batch_invariant = batch_invariant
        self._rows = torch.arange(len(self.positions), device=self._device)
        if not self._longer:
            return
        counts = [chunk.count for chunk in self._longer]
        reach = cache.window - 1
        self._blocks = query_blocks(self._starts(counts), sum(counts))
        self._key_starts = self._starts([chunk.stop for chunk in self._longer])
        self._ring_starts = self._starts(
            [min(chunk.start, reach) + chunk.count for chunk in self._longer]
        )

    @property
    def is_decode(self) -> bool:
        """Whether every chunk is one token whose cache slot is read by the decoding kernel."""
        return not self._longer

    @property
    def cache(self) -> PagedCache:
        """The pages."""
        return self._cache

    @property
    def written(self) -> Tensor:
        """int64 [N], row of each token among the pages of blocks that see everything."""
        return self._written

    @property
    def ring_written(self) -> Tensor:
        """int64 [N], row of each token among the rings of windowed blocks; when `is_decode`."""
        return self._ring_written

    def attend_rows(self, layer: int, qkv: Tensor, rotation: Tensor, sinks: Tensor) -> Tensor:
        """As `KernelContext.attend_rows`; also writes the rows' keys and values."""
        cache, window = self._cache, self._cache.windows[layer]
        keys, values = cache.keys[layer], cache.values[layer]
        if self.is_decode:
            written = self.written if window is None else self.ring_written
            q = rotate_and_store(qkv, rotation, self._rows, written, keys, values)
            return self._decode(q, keys, values, sinks, window)
        q, k, v = _rotated(qkv, rotation, self._rows, keys.shape[2:])
        seen_keys = self._with_history(keys, k, window)
        seen_values = self._with_history(values, v, window)
        self._write(keys.flatten(0, 1), k, window)
        self._write(values.flatten(0, 1), v, window)
        single, longer = q[: self._num_singles], q[self._num_singles :]
        starts = self._key_starts if window is None else self._ring_starts
        mixed = prefill_attention(
            longer, seen_keys, seen_values, sinks, self._blocks, window, starts
        )
        if not self._num_singles:
            return mixed
        return torch.cat([self._decode(single, keys, values, sinks, window), mixed])

    def _find_keys(self, slots: np.ndarray, lengths: np.ndarray) -> None:
        """As `StepBatch`; what the decoding kernel reads."""
        cache = self._cache
        self.max_length = int(lengths.max())
        self.lengths = on_device(lengths.astype(np.int32), self._device)
        self.tables = on_device(cache.tables[slots], self._device)
        ring = slots[:, None] * cache.ring_pages + np.arange(cache.ring_pages)
        self.ring_tables = on_device(ring.astype(np.int32), self._device)

    def _decode(
        self, q: Tensor, keys: Tensor, values: Tensor, sinks: Tensor, window: int | None
    ) -> Tensor:
        tables = self.tables if window is None else self.ring_tables
        return decode_attention(
            q, keys, values, tables, self.lengths, sinks, window, self.max_length
        )

    def _with_history(self, pages: Tensor, new: Tensor, window: int | None) -> Tensor:
        """Rows that the longer chunks see: of each, those cached, then its own.

        A copy, made before the write: a ring's new rows take the place of old ones still seen.
        """
        cached = pages.flatten(0, 1)
        history = self._history if window is None else self._ring_history
        parts = (
            part
            for past, rows in zip(history, self._longer_rows)
            for part in (cached[past], new[rows])
        )
        return torch.cat(list(parts))

    def _starts(self, counts: list[int]) -> Tensor:
        return on_device(np.cumsum([0, *counts]).astype(np.int32), self._device)
