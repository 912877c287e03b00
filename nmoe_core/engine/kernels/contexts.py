"""Contexts of a pass for kernels: complete documents, or new tokens over a paged cache.

The plain contexts compute positions, pages and rings; these classes pass them to the kernels. A
pass of single tokens, as in decoding, writes keys and values directly into their pages. A pass with
longer chunks also holds a contiguous copy of the new keys and values, to which chunks attend after
the cached keys.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from nmoe_core.engine.attention import PackedDocuments
from nmoe_core.engine.generation.cache import PagedCache
from nmoe_core.engine.generation.step import Chunk, StepBatch
from nmoe_core.engine.kernels.attention import (
    Cached,
    decode_attention,
    prefill_attention,
    query_blocks,
)
from nmoe_core.engine.kernels.rows import rotate_and_store
from nmoe_core.engine.packing import Packing
from nmoe_core.engine.weights.config import ModelConfig


class KernelDocuments(PackedDocuments):
    """Complete documents, each of which attends to itself."""

    def __init__(self, config: ModelConfig, packing: Packing) -> None:
        super().__init__(config, packing)
        self._shape = config.num_key_value_heads, config.head_dim
        rows = torch.arange(len(packing.positions) + 1, device=self.positions.device)
        is_first = torch.cat([self.positions == 0, self.positions.new_ones(1, dtype=torch.bool)])
        self._rows = rows[:-1]
        self._blocks = query_blocks(rows[is_first].int(), len(packing.positions))

    def attend_rows(self, layer: int, qkv: Tensor, rotation: Tensor, sinks: Tensor) -> Tensor:
        """Attention output [N, heads, head_dim] from a block's fused projection [N, q + k + v].

        rotation: complex64 [N, head_dim / 2], of the rows' positions.
        """
        q, k, v = _rotated(qkv, rotation, self._rows, self._shape)
        return prefill_attention(q, k, v, sinks, self._blocks, self._windows[layer])


@dataclass(frozen=True, slots=True)
class Singles:
    """Single new tokens of sequences in a cache.

    written, ring_written: int64 [B], row of each token in the pages of full-attention blocks and in
    the rings of sliding-window blocks, negative for an empty slot. tables, ring_tables: int32 [B,
    width], pages to read. lengths: int32 [B]. max_length: see `Cached`.
    """

    cache: PagedCache
    written: Tensor
    ring_written: Tensor
    tables: Tensor
    ring_tables: Tensor
    lengths: Tensor
    max_length: int

    def attend_rows(self, layer: int, qkv: Tensor, rotation: Tensor, sinks: Tensor) -> Tensor:
        """See `KernelDocuments.attend_rows`; also writes the keys and values to the cache."""
        written = self.written if self.cache.windows[layer] is None else self.ring_written
        pages = self.cache.keys[layer], self.cache.values[layer]
        return self.attend(layer, rotate_and_store(qkv, rotation, written, *pages), sinks)

    def attend(self, layer: int, q: Tensor, sinks: Tensor) -> Tensor:
        """Attention output of rotated queries [B, heads, head_dim], whose keys are in the cache."""
        window = self.cache.windows[layer]
        tables = self.tables if window is None else self.ring_tables
        cached = Cached(tables, self.lengths, self.max_length)
        pages = self.cache.keys[layer], self.cache.values[layer]
        return decode_attention(q, *pages, cached, sinks, window)


class KernelStep(StepBatch):
    """New tokens of sequences in a cache; `singles` are the chunks of one token, if any."""

    singles: Singles

    def __init__(
        self, cache: PagedCache, chunks: Sequence[Chunk], batch_invariant: bool = False
    ) -> None:
        super().__init__(cache, chunks, batch_invariant)
        if not self._longer:
            return
        self._rows = torch.arange(len(self.positions), device=self._device)
        counts = [chunk.count for chunk in self._longer]
        ring_counts = [min(c.start, cache.window - 1) + c.count for c in self._longer]
        blocks = query_blocks(self._starts(counts), sum(counts))
        key_starts = self._starts([chunk.stop for chunk in self._longer])
        self._blocks = replace(blocks, key_starts=key_starts)
        self._ring_blocks = replace(blocks, key_starts=self._starts(ring_counts))

    @property
    def is_decode(self) -> bool:
        """Whether every chunk is a single token, for which the decoding kernel is used."""
        return not self._longer

    def attend_rows(self, layer: int, qkv: Tensor, rotation: Tensor, sinks: Tensor) -> Tensor:
        """See `KernelDocuments.attend_rows`; also writes the keys and values to the cache."""
        if self.is_decode:
            return self.singles.attend_rows(layer, qkv, rotation, sinks)
        window = self.cache.windows[layer]
        keys = self.cache.keys[layer]
        values = self.cache.values[layer]
        q, k, v = _rotated(qkv, rotation, self._rows, keys.shape[2:])
        # Copy the visible rows before the write, because new rows of a ring replace old rows that
        # are still visible.
        seen_keys, seen_values = (
            torch.cat([part for pair in self._seen(pages, new, window) for part in pair])
            for pages, new in ((keys, k), (values, v))
        )
        self._write(keys, k, window)
        self._write(values, v, window)
        single = q[: self._num_singles]
        longer = q[self._num_singles :]
        blocks = self._blocks if window is None else self._ring_blocks
        mixed = prefill_attention(longer, seen_keys, seen_values, sinks, blocks, window)
        if not self._num_singles:
            return mixed
        return torch.cat([self.singles.attend(layer, single, sinks), mixed])

    def _find_keys(self, slots: np.ndarray, lengths: np.ndarray) -> None:
        """See `StepBatch`; computes the inputs of the decoding kernel."""
        cache = self.cache
        ring = slots[:, None] * cache.ring_pages + np.arange(cache.ring_pages)
        self.singles = Singles(
            cache,
            self._pages.written,
            self._rings.written,
            self._tensor(cache.tables[slots]),
            self._tensor(ring.astype(np.int32)),
            self._tensor(lengths.astype(np.int32)),
            int(lengths.max()),
        )

    def _starts(self, counts: list[int]) -> Tensor:
        return self._tensor(np.cumsum([0, *counts]).astype(np.int32))


def _rotated(
    qkv: Tensor, rotation: Tensor, rows: Tensor, shape: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [N, heads of each, head_dim], queries and keys rotated."""
    k, v = (qkv.new_empty(len(qkv), 1, *shape) for _ in range(2))
    q = rotate_and_store(qkv, rotation, rows, k, v)
    return q, k.squeeze(1), v.squeeze(1)
