"""One forward pass over a paged cache: new tokens of several sequences, long prompts in chunks.

Attention for chunks of one token, as in decoding, runs for all of them together. Attention for
longer chunks runs chunk by chunk, with the function for whole documents, over the cached keys and
the chunk's own keys. Indices are computed once per pass, not once per block. With
`batch_invariant`, attention runs chunk by chunk for all chunks, and matrix products are padded to
the shape used for documents. So the bits of a token's result depend only on its sequence.
"""

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
    """`count` tokens after the `start` cached tokens of the sequence in `slot`."""

    slot: int
    start: int
    count: int

    @property
    def stop(self) -> int:
        """Number of cached positions after the pass."""
        return self.start + self.count


@dataclass(slots=True)
class Places:
    """Cache positions of a pass in all blocks of one kind: full pages, or rings of a window.

    written: int64, the cache row of each new token that is stored. kept: int64, the rows of the
    pass that are stored; None for all rows. history: the cache rows that are visible to each longer
    chunk. taken: the pages or slots that hold the keys for single tokens. mask: which of these keys
    are visible.
    """

    written: Tensor
    kept: Tensor | None
    history: list[Rows]
    taken: Rows | None = None
    mask: Tensor | None = None


class StepBatch:
    """Context of one pass: the rows of its chunks, single tokens first.

    The cache must have pages reserved for every chunk.
    """

    def __init__(
        self, cache: PagedCache, chunks: Sequence[Chunk], batch_invariant: bool = False
    ) -> None:
        self.cache = cache
        self.batch_invariant = batch_invariant
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
        size = cache.ring_size
        self.positions = self._tensor(flat)
        past = [
            self._rows(self._page_rows(np.asarray(chunk.slot), np.arange(chunk.start)))
            for chunk in self._longer
        ]
        ring_past = [
            np.arange(max(0, chunk.start - cache.window + 1), chunk.start) for chunk in self._longer
        ]
        is_kept = np.concatenate([p >= p[-1] + 1 - size for p in positions])
        self._pages = Places(self._tensor(self._page_rows(slots, flat)), None, past)
        self._rings = Places(
            self._tensor((slots * size + flat % size)[is_kept]),
            None if is_kept.all() else self._tensor(is_kept.nonzero()[0]),
            [self._rows(c.slot * size + p % size) for c, p in zip(self._longer, ring_past)],
        )
        if singles:
            slots = np.asarray([chunk.slot for chunk in singles])
            self._find_keys(slots, np.asarray([chunk.stop for chunk in singles]))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        """See `attention.Context.attend`; also writes the rows' keys and values to the cache."""
        window = self.cache.windows[layer]
        keys = self.cache.keys[layer]
        values = self.cache.values[layer]
        # Copy visible rows before the write: new rows of a ring replace rows that are still needed.
        seen: list[list[torch.Tensor]] = []
        if self._longer:
            for pages, new in ((keys, k), (values, v)):
                pairs = self._seen(pages, new, window)
                seen.append([torch.cat(pair).transpose(0, 1)[None] for pair in pairs])
        self._write(keys, k, window)
        self._write(values, v, window)
        if not seen:
            return self._attend_singles(layer, q, sinks)
        mixed = torch.empty_like(q)
        if self._num_singles:
            single = slice(0, self._num_singles)
            mixed[single] = self._attend_singles(layer, q[single], sinks)
        for chunk, rows, chunk_k, chunk_v in zip(self._longer, self._longer_rows, *seen):
            queries = q[rows].unflatten(1, (k.shape[1], -1)).permute(1, 2, 0, 3)[None]
            result = attend(queries, chunk_k, chunk_v, sinks, window, chunk.start)
            mixed[rows] = result[0].permute(2, 0, 1, 3).flatten(1, 2)
        return mixed

    def _places(self, window: int | None) -> Places:
        return self._pages if window is None else self._rings

    def _find_keys(self, slots: np.ndarray, lengths: np.ndarray) -> None:
        """Find the cache rows of the keys of each sequence that adds one token; `lengths` holds
        their number per sequence."""
        cache = self.cache
        pages = cache.tables[slots, : cache.pages_for(int(lengths.max()))]
        self._pages.taken = self._rows(pages.astype(np.int64))
        self._pages.mask = self._mask(
            np.arange(pages.shape[1] * cache.page_size) < lengths[:, None]
        )
        age = (lengths[:, None] - 1 - np.arange(cache.ring_size)) % cache.ring_size
        self._rings.taken = self._rows(slots)
        self._rings.mask = self._mask(age < np.minimum(lengths, cache.window)[:, None])

    def _seen(self, pages: Tensor, new: Tensor, window: int | None) -> list[tuple[Tensor, Tensor]]:
        """The rows that are visible to each longer chunk: cached rows, then the chunk's own
        rows."""
        cached = pages.flatten(0, 1)
        history = self._places(window).history
        return [(_taken(cached, past), new[rows]) for past, rows in zip(history, self._longer_rows)]

    def _write(self, pages: Tensor, new: Tensor, window: int | None) -> None:
        places = self._places(window)
        kept = new if places.kept is None else new[places.kept]
        pages.flatten(0, 1).index_copy_(0, places.written, kept)

    def _attend_singles(self, layer: int, q: Tensor, sinks: Tensor | None) -> Tensor:
        window = self.cache.windows[layer]
        places = self._places(window)
        assert places.taken is not None
        assert places.mask is not None
        keys = self.cache.keys[layer]
        values = self.cache.values[layer]
        shape = (len(q), -1, *keys.shape[-2:])
        if window is not None:
            keys = keys.unflatten(0, (-1, self.cache.ring_pages))
            values = values.unflatten(0, (-1, self.cache.ring_pages))
        k, v = (_taken(pages, places.taken).view(shape) for pages in (keys, values))
        return attend_cached(q, k, v, sinks, places.mask)

    def _page_rows(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        size = self.cache.page_size
        pages = self.cache.tables[slots, positions // size].astype(np.int64)
        return pages * size + positions % size

    def _rows(self, index: np.ndarray) -> Rows:
        """The index; if its numbers are consecutive, a slice, so that indexing makes no copy."""
        flat = index.ravel()
        if len(flat) == 0:
            return slice(0, 0)
        if (len(index) == 1 or index.ndim == 1) and bool((np.diff(flat) == 1).all()):
            return slice(int(flat[0]), int(flat[-1]) + 1)
        return self._tensor(index)

    def _mask(self, is_seen: np.ndarray) -> Tensor:
        mask = np.where(is_seen, np.float32(0), np.float32(-np.inf))
        return self._tensor(mask)[:, None, None]

    def _tensor(self, values: np.ndarray) -> Tensor:
        return on_device(values, self._device)


def _taken(pages: Tensor, rows: Rows) -> Tensor:
    """Pages or rows of the cache, one after another: a view if they are consecutive."""
    if isinstance(rows, slice):
        return pages[rows]
    return pages.index_select(0, rows.flatten())  # on a CPU twice as fast as an index
